"""The closing summary of an engine, and the counts that it is made of."""

from __future__ import annotations

import logging

import anyio
import pytest

from drift_sdk import EngineConfig, SamplingParams
from drift_sdk.driver.stats_recorder import ActiveSequences
from drift_sdk.testing import scripted_engine


def test_active_sequences_of_decoding_steps() -> None:
    active = ActiveSequences()
    assert (active.fewest, active.mean, active.most) == (0, 0.0, 0)
    for number in (3, 1, 5):
        active.add(number)
    assert (active.fewest, active.mean, active.most) == (1, 3.0, 5)


def test_closing_engine_logs_active_sequences(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        config = EngineConfig(max_model_len=64, kv_cache_tokens=1024, max_num_seqs=2)
        async with scripted_engine("abcdefgh", config=config) as engine:
            streams = [engine.generate("x", SamplingParams(max_tokens=number)) for number in (3, 8)]
            for stream in streams:
                await stream
            stats = engine.stats()
            assert 1 <= stats.min_active <= stats.mean_active <= stats.max_active <= 2
            assert stats.min_active == 1
            assert stats.violations == ()

    with caplog.at_level(logging.INFO, logger="drift_sdk"):
        anyio.run(main)
    lines = [record.getMessage() for record in caplog.records]
    (closing,) = [
        line for line in lines if line.startswith("closed after 2 requests and 11 generated tokens")
    ]
    assert "active sequences in a decoding step: mean" in closing
    assert not any(line.startswith("speculation:") for line in lines)
