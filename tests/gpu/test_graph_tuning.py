"""Tuning on a GPU: measured once, kept, and without effect on tokens."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest
from random_folder import make_random_folder

from drift_sdk import Engine, EngineConfig, EngineStats, SamplingParams
from drift_sdk._kernels.gemm.tuner import SHORT
from drift_sdk.startup import graph_startup

pytestmark = pytest.mark.gpu


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(graph_startup, "EFFORTS", graph_startup.EFFORTS | {"short": SHORT})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_random_folder(tmp_path / "model", "llama", num_hidden_layers=2)


async def serve(folder: Path, tuning: str) -> tuple[list[tuple[int, ...]], EngineStats]:
    """The tokens of 40 requests together, and the engine's statistics."""
    rng = random.Random(2)
    given = [[rng.randrange(3, 30_000) for _ in range(rng.randint(1, 100))] for _ in range(40)]
    config = EngineConfig(
        device="cuda",
        executor="graph",
        load="random",
        max_num_seqs=64,
        max_model_len=256,
        kv_cache_tokens=16_384,
        tuning=tuning,
    )
    async with Engine(folder, config) as engine:
        streams = [engine.generate(prompt, SamplingParams(max_tokens=24)) for prompt in given]
        return [(await stream).token_ids for stream in streams], engine.stats()


def test_short_tuning_is_kept_and_changes_no_token(folder: Path) -> None:
    async def main() -> None:
        expected, stats = await serve(folder, "off")
        assert (stats.num_tuned_shapes, stats.num_untuned_shapes) == (0, 5)
        for is_first in (True, False):
            found, stats = await serve(folder, "short")
            assert found == expected
            assert (stats.num_tuned_shapes, stats.num_untuned_shapes) == (5, 0)
            assert ("tune" in dict(stats.start_seconds)) == is_first

    anyio.run(main)
