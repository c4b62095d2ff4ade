"""strict_performance, step_timeout_s and measured round costs, on a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from loops import run
from random_folder import make_random_draft_folder, make_random_folder

from drift_sdk import Chain, ConfigError, Engine, EngineConfig, ExecutorError, SamplingParams, Speculation
from drift_sdk._kernels.gemm.tuning import TunedTable, WatchedTable
from drift_sdk.execution.device.device import Device
from drift_sdk.execution.graph import graph_executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(tmp_path_factory.mktemp("strict") / "target", "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return make_random_draft_folder(folder.with_name("draft"), folder)


@pytest.fixture
def everything_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedTable, "gemm", TunedTable.gemm)


def engine_of(folder: Path, **fields: Any) -> Engine:
    options = {"max_num_seqs": 8, "max_model_len": 512, "kv_cache_tokens": 8192, "load": "random"} | fields
    return Engine(folder, EngineConfig(device="cuda", executor="graph", **options))


def prompts(number: int, most: int = 200) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, 30_000) for _ in range(rng.randint(1, most))] for _ in range(number)]


async def serve(engine: Engine, given: Sequence[list[int]], params: SamplingParams = GREEDY) -> None:
    for stream in [engine.generate(prompt, params) for prompt in given]:
        assert len((await stream).token_ids) == params.max_tokens


def test_strict_engine_with_untuned_weights_does_not_start(folder: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="python -m drift_sdk tune .*32000x1024") as caught:
            async with engine_of(folder, strict_performance=True):
                pass
        assert caught.value.field == "strict_performance"
        assert "5632x1024:gated" in str(caught.value)

        async with engine_of(folder) as engine:
            assert engine.stats().num_untuned_shapes > 3
            await serve(engine, prompts(2))

    run("asyncio", main)


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.usefixtures("everything_tuned")
def test_serving_needs_no_host_work(
    folder: Path, draft: Path, has_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_executor, "ALLOCATION_COUNT_INTERVAL", 1)
    speculation = Speculation(draft=draft, shape=Chain(3), adaptive=False) if has_draft else None

    async def main() -> None:
        async with engine_of(folder, strict_performance=True, speculation=speculation) as engine:
            await serve(engine, prompts(40))
            await serve(engine, prompts(8), SamplingParams(max_tokens=40, ignore_eos=True, logprobs=5))
            stats = engine.stats()
            assert stats.num_steps > 100
            assert (stats.num_host_waits, stats.num_split_rounds, stats.num_allocations) == (0, 0, 0)
            assert stats.num_undrafted_by_drafter == 0

    run("asyncio", main)


@pytest.mark.usefixtures("everything_tuned")
def test_allocations_close_a_strict_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_executor, "ALLOCATION_COUNT_INTERVAL", 1)

    async def main() -> None:
        async with engine_of(folder, strict_performance=True) as engine:
            stream = engine.generate(prompts(1)[0], SamplingParams(max_tokens=400, ignore_eos=True))
            async for _ in stream:
                torch.zeros(1000, device="cuda")
                break
            with pytest.raises(ExecutorError, match="allocations of device memory"):
                await stream

        async with engine_of(folder) as engine:
            await serve(engine, prompts(1), SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=2))
            assert engine.stats().num_allocations > 0

    run("asyncio", main)


def test_round_costs_are_measured_and_plausible(folder: Path, draft: Path) -> None:
    async def main() -> None:
        async with engine_of(folder, speculation=Speculation(draft=draft)) as engine:
            costs = engine._driver._scheduler.config.round_costs
            assert set(costs) == {(slots, k) for slots in (1, 2, 4, 8) for k in (0, 1, 3)}
            for slots in (1, 2, 4, 8):
                assert 1e-5 < costs[slots, 0] < costs[slots, 1] < costs[slots, 3] < 0.1
            assert dict(engine.stats().start_seconds)["measure rounds"] < 1.0
            await serve(engine, prompts(8))

    run("asyncio", main)


def test_step_beyond_the_timeout_closes_the_engine(folder: Path) -> None:
    class SlowReplay:
        def __init__(self, device: Device, replay: Any) -> None:
            self._device, self._replay = device, replay

        def launch(self) -> None:
            with self._device.work():
                torch.cuda._sleep(6_000_000_000)  # clock cycles, about three seconds
            self._replay.launch()

        def close(self) -> None:
            self._replay.close()

    async def main() -> None:
        engine = engine_of(folder, step_timeout_s=0.3)
        async with engine:
            await serve(engine, prompts(2))
            device, graphs = engine._driver._executor._device, engine._driver._executor._graphs
            graphs.decode = {shape: SlowReplay(device, replay) for shape, replay in graphs.decode.items()}
            started_at = time.monotonic()
            with anyio.fail_after(2.0), pytest.raises(ExecutorError, match="within 0.3 s") as caught:
                await engine.generate([5, 6, 7], GREEDY)
            assert caught.value.process_unusable
        assert 0.3 < time.monotonic() - started_at < 2.0  # closing did not wait either

    run("asyncio", main)
    torch.cuda.synchronize()
