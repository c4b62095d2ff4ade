"""strict_performance: slow paths raise errors; host work is counted with and without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from interpreted_device import InterpretedDevice, InterpretedEvent, InterpretedReplay
from loops import on_every_loop, run
from tiny_llama import tiny_llama

from drift_sdk import (
    ConfigError,
    EngineConfig,
    ExecutorError,
    NGram,
    Regex,
    RequestError,
    SamplingParams,
    Speculation,
    TokenMachine,
    TokenState,
)
from drift_sdk._kernels.gemm import gemm as cublas_gemm
from drift_sdk._kernels.gemm.gemm import GemmTiles
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles, WatchedTable
from drift_sdk.driver.requests import RequestRegistry
from drift_sdk.driver.stats_recorder import StatsRecorder
from drift_sdk.execution.device.resources import Ring, RingSizes
from drift_sdk.execution.device.slot_table import NO_UPDATES
from drift_sdk.execution.graph import graph_executor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import AllocationCount, GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.prometheus import metrics_text
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.startup.executor_factory import StrictExecutor, choose_executor, untuned_error
from drift_sdk.steps import DecodeRow, ExecutorLimits, HostWork, SlotOutput, StepPlan, StepResult
from drift_sdk.testing import scripted_engine

CPU = torch.device("cpu")
TILES = TunedTiles(((16, GemmTiles(True, 64, 16, 64, 4, 4)), (32, GemmTiles(True, 64, 32, 64, 4, 4))))


class OneStep:
    """An executor that returns a given result for its only step."""

    limits = None

    def __init__(self, **result: object) -> None:
        values = {"step_id": 0, "prefill": (), "decode": (), "duration_s": 0.0}
        self._result = StepResult(**{**values, **result})
        self.plans: list[StepPlan] = []
        self.is_closed = False

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        return self._result

    def close(self) -> None:
        self.is_closed = True


def plan_of(*num_drafts: int) -> StepPlan:
    rows = tuple(DecodeRow(slot=slot, num_draft_tokens=number) for slot, number in enumerate(num_drafts))
    return StepPlan(step_id=0, assignments=(), block_updates=(), prefill=(), decode=rows)


def collect(plan: StepPlan, *, must_draft: bool = False, **result: object) -> StepResult:
    inner = OneStep(**result)
    executor = StrictExecutor(inner, must_draft=must_draft)
    executor.launch(plan)
    assert inner.plans == [plan]
    found = executor.collect()
    executor.close()
    assert inner.is_closed
    return found


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (HostWork(num_waits=2), "2 waits for room"),
        (HostWork(num_split_rounds=1), "1 rounds in which the host"),
        (HostWork(num_copies=3), "3 results copied"),
        (HostWork(num_allocations=7), "7 allocations of device memory"),
    ],
)
def test_host_work_is_an_error(work: HostWork, message: str) -> None:
    with pytest.raises(ExecutorError, match=f"strict_performance: {message}") as caught:
        collect(plan_of(), host_work=work)
    assert not caught.value.process_unusable


def test_row_without_its_planned_drafts_is_an_error() -> None:
    drafted = SlotOutput(token_ids=(5,), num_drafted=1)
    lost = SlotOutput(token_ids=(5,))
    with pytest.raises(ExecutorError, match="slot 1 drafted none of 3 planned tokens"):
        collect(plan_of(3, 3), decode=(drafted, lost), must_draft=True)
    collect(plan_of(3, 3), decode=(drafted, lost))  # with a drafter that may find no draft


@pytest.mark.parametrize(
    ("num_drafts", "output"),
    [
        (0, SlotOutput(token_ids=(5,))),  # not planned to draft, by the policy or the request
        (3, SlotOutput(token_ids=(5,), finish="length")),  # room for one last token
        (3, SlotOutput(token_ids=(5,), finish="stop")),
        (3, SlotOutput()),  # the slot had finished before
        (3, SlotOutput(token_ids=(5,), num_drafted=1)),
    ],
)
def test_rows_without_drafts_are_accepted(num_drafts: int, output: SlotOutput) -> None:
    collect(plan_of(num_drafts), decode=(output,), must_draft=True)


class SlowEvent(InterpretedEvent):
    is_slow = False
    num_waits = 0

    @property
    def is_done(self) -> bool:
        return not self.is_slow

    def wait(self, timeout_s: float | None = None) -> None:
        self.num_waits += 1


class SlowDevice(InterpretedDevice):
    def __init__(self) -> None:
        self.events: list[SlowEvent] = []

    def event(self) -> SlowEvent:
        self.events.append(SlowEvent())
        return self.events[-1]


def test_ring_counts_host_work() -> None:
    device = SlowDevice()
    sizes = RingSizes(
        num_entries=2,
        max_updates=4,
        payload_words=4,
        record_words=4,
        max_slots=1,
        num_draft_masks=2,
        mask_words=1,
    )
    ring = Ring(device, sizes)
    replay = SimpleNamespace(launch=lambda: None)
    for _ in range(2):
        entry = ring.acquire(NO_UPDATES)
        ring.start(entry, replay)
        results = ring.results(entry)
    assert ring.take_work(0) == HostWork()
    device.events[0].is_slow = True
    assert ring.acquire(NO_UPDATES) == 0
    assert device.events[0].num_waits == 1
    results.is_pending = False
    assert ring.acquire(NO_UPDATES) == 1
    ring.wait(1)
    assert ring.take_work(5) == HostWork(num_waits=1, num_split_rounds=1, num_copies=1, num_allocations=5)
    assert ring.take_work(0) == HostWork()


def test_allocations_are_counted_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_executor, "ALLOCATION_COUNT_INTERVAL", 3)
    device = SimpleNamespace(num_allocations=10)
    count = AllocationCount(device)
    found = []
    for _ in range(7):
        device.num_allocations += 1
        found.append(count.step())
    assert found == [0, 0, 3, 0, 0, 3, 0]


def test_watched_table_records_missing_entries() -> None:
    gemms = {"128x128": TILES, "256x64 gated": TILES}
    table, watched = TunedTable(gemms=gemms), WatchedTable(gemms=gemms)
    assert watched.gemm(128, 128).tiles is TILES
    assert watched.gemm(256, 64, is_gated=True).tiles is TILES
    assert watched.gemm(128, 128, is_whole=True) == table.gemm(128, 128, is_whole=True)
    assert watched.untuned == set()
    for shape, options in (((256, 64), {}), ((512, 64), {"is_gated": True}), ((96, 64), {"is_whole": True})):
        assert watched.gemm(*shape, **options) == TunedTable().gemm(*shape, **options)
    assert watched.untuned == {"256x64", "512x64 gated", "96x64"}
    assert WatchedTable(gemms=gemms).untuned == set()  # tables do not share the set


class WarmingDevice(InterpretedDevice):
    """Runs a step once before it is captured, as a GPU does."""

    def capture(self, step: Callable[[], None]) -> InterpretedReplay:
        self.warm_up(step)
        return super().capture(step)

    def warm_up(self, step: Callable[[], None]) -> None:
        step()


@pytest.mark.interpreter
@pytest.mark.parametrize("has_same_bits", [True, False])
def test_weights_for_which_cublas_has_other_bits_count_as_untuned(
    has_same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_gemm, "_is_for_library", lambda x, config: config.is_library)
    monkeypatch.setattr(cublas_gemm, "library_way", lambda *_: "slices" if has_same_bits else None)
    for name in ("library_multiply", "library_gated_multiply"):
        monkeypatch.setattr(cublas_gemm, name, lambda *_: None)
    decoder = Decoder.random(read_spec(tiny_llama(vocab_size=80)), device="cpu", dtype=torch.float32)
    by_library = TunedTiles(((1, GemmTiles(True, 64, 16, 64, 3, 4, is_library=True)),))
    weights = {"64x32", "32x32", "48x32 gated", "32x24", "80x32"}  # qkv, output, gate and up, down, head
    watched = WatchedTable(gemms=dict.fromkeys(weights, by_library))
    limits = ExecutorLimits(max_num_seqs=1, max_model_len=32, num_blocks=8, block_size=4, vocab_size=80)
    GraphExecutor(WarmingDevice(), decoder, limits, watched, GraphOptions(prefill_token_budget=16)).close()
    assert watched.untuned == (set() if has_same_bits else weights)


def test_untuned_error_names_weights_and_the_command() -> None:
    error = untuned_error("nvidia-x", ("256x64", "512x64 gated"))
    assert isinstance(error, ConfigError)
    assert error.field == "strict_performance" and error.value is True
    assert "nvidia-x lacks 256x64, 512x64 gated" in str(error)
    assert re.search(r"run python -m drift_sdk tune 256x64 512x64:gated$", str(error))


@pytest.mark.parametrize("executor", ["auto", "eager"])
def test_strict_performance_is_rejected_without_graphs(executor: str) -> None:
    with pytest.raises(ConfigError, match="strict_performance=True: expected executor graph") as caught:
        choose_executor(EngineConfig(executor=executor, strict_performance=True), CPU)
    assert (caught.value.field, caught.value.value) == ("strict_performance", True)


def test_a_timeout_of_steps_is_rejected_on_a_gpu_without_graphs() -> None:
    config = EngineConfig(executor="eager", step_timeout_s=2.0)
    with pytest.raises(ConfigError, match="step_timeout_s=2.0: expected executor graph"):
        choose_executor(config, torch.device("cuda"))
    assert choose_executor(config, CPU) == ("eager", None)  # there is no GPU that could hang


@on_every_loop
def test_requests_that_need_host_work_are_rejected(loop: str) -> None:
    async def main() -> None:
        config = EngineConfig(
            max_model_len=64,
            kv_cache_tokens=1024,
            strict_performance=True,
            speculation=Speculation(draft=NGram()),
        )
        grammar, machine = Regex("777"), TokenMachine((TokenState(),))
        async with scripted_engine("777", config=config) as engine:
            for params, field in (
                (SamplingParams(prompt_logprobs=0), "prompt_logprobs"),
                (SamplingParams(prompt_states="mean"), "prompt_states"),
                (SamplingParams(logprobs=0, logprob_token_ids=(5,)), "logprob_token_ids"),
                (SamplingParams(grammar=grammar), "grammar"),
                (SamplingParams(logits_processors=(machine,)), "logits_processors"),
            ):
                expected = r"expected (None|\(\)|no TokenMachine).* strict_performance"
                with pytest.raises(RequestError, match=f"{field}=.*: {expected}") as e:
                    engine.generate("x", params)
                assert (e.value.field, e.value.value) == (field, getattr(params, field))
            assert engine.stats().num_submitted == 0
            params = SamplingParams(grammar=grammar, num_draft_tokens=0)
            assert (await engine.generate("x", params)).text == "777"
            assert (await engine.generate("x", SamplingParams(logprobs=3))).text == "777"

        plain = config.replace(speculation=None)
        async with scripted_engine("777", config=plain) as engine:
            assert (await engine.generate("x", SamplingParams(grammar=grammar))).text == "777"

        async with scripted_engine("777", config=config.replace(strict_performance=False)) as engine:
            params = SamplingParams(grammar=grammar, prompt_logprobs=0)
            assert (await engine.generate("x", params)).text == "777"

    run(loop, main)


def test_host_work_is_in_the_statistics() -> None:
    recorder = StatsRecorder(RequestRegistry(None))
    for work in (HostWork(num_waits=1, num_copies=2), HostWork(num_waits=3, num_split_rounds=5), HostWork()):
        result = StepResult(step_id=0, prefill=(), decode=(), duration_s=0.001, host_work=work)
        recorder.collected(result)
    allocated = HostWork(num_allocations=9)
    recorder.collected(StepResult(step_id=0, prefill=(), decode=(), duration_s=0.001, host_work=allocated))
    config = SchedulerConfig(max_num_seqs=1, num_blocks=1, block_size=16, prefill_token_budget=16)
    recorder.publish(Scheduler(config))
    stats = recorder.stats
    assert (stats.num_host_waits, stats.num_split_rounds, stats.num_host_copies) == (4, 5, 2)
    assert (stats.num_allocations, stats.num_untuned_shapes) == (9, 0)
    text = metrics_text(stats, recorder.histograms, model="m", executor="e")
    assert 'drift_host_work_total{kind="allocation"} 9.0' in text
    assert 'drift_host_work_total{kind="round"} 5.0' in text
