"""Fixtures of tests that measure on a CPU, which may be busy with other things."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drift_sdk import Engine, SamplingParams
from drift_sdk.processors import LogitsProcessor
from perf.harness.decoding import GREEDY, generation_seconds


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations take 1 ms a token, so that longer ones always take longer."""

    async def seconds(
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        params: SamplingParams = GREEDY,
        processor: LogitsProcessor | None = None,
    ) -> float:
        await generation_seconds(engine, prompts, num_tokens, params, processor)
        return 1e-3 * num_tokens

    for module in ("perf.decode", "perf.harness.rounds"):
        monkeypatch.setattr(f"{module}.generation_seconds", seconds)
