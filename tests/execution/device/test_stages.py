"""Marks around the stages of a round: their names and times, and that they do not change the output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
import torch
from draft_zoo import make_draft
from interpreted_device import InterpretedDevice, InterpretedEvent
from tiny_llama import tiny_llama

from drift_sdk import ConfigError, Engine, EngineConfig
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, NvtxStageMarks, StageMarks
from drift_sdk.execution.drafter_factory import NO_DRAFTER, EagleDrafterFactory
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.measurement import profiled_engine, recorded_engine
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.steps import ExecutorLimits, StepPlan
from perf.harness.manual_driver import ManualDriver
from perf.harness.simulation import acceptance_of
from perf.harness.stage_timing import GpuMark, TimedStageMarks, time_stages

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
TARGET = tiny_llama(vocab_size=160, num_hidden_layers=3)
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=40, num_blocks=20, block_size=4, vocab_size=160)
BUDGET = 16


class FakeMark:
    """A mark of a clock that advances by one second with every mark."""

    num_recorded = 0

    def record(self) -> None:
        FakeMark.num_recorded += 1
        self.at = FakeMark.num_recorded

    def seconds_since(self, earlier: FakeMark) -> float:
        return float(self.at - earlier.at)


@pytest.fixture
def target() -> Decoder:
    return Decoder.random(read_spec(TARGET), device=DEVICE, dtype=torch.float32, seed=2)


@pytest.fixture
def draft(target: Decoder, tmp_path: Path) -> DraftDecoder:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    make_draft("reference", tmp_path / "draft", tmp_path)
    return DraftDecoder.load(tmp_path / "draft", target)


def graph_executor(
    target: Decoder, draft: DraftDecoder | None, stages: StageMarks, acceptance: float = 1.0
) -> GraphExecutor:
    return GraphExecutor(
        GpuDevice(0) if IS_GPU else InterpretedDevice(),
        target,
        LIMITS,
        TunedTable(),
        GraphOptions(
            prefill_token_budget=BUDGET,
            acceptance=acceptance_of(acceptance),
            stages=stages,
        ),
        drafter_factory=EagleDrafterFactory(draft, (3,)) if draft is not None else NO_DRAFTER,
    )


def test_drafted_and_plain_rounds_have_their_stages(target: Decoder, draft: DraftDecoder) -> None:
    stages = TimedStageMarks(GpuMark if IS_GPU else InterpretedEvent)
    executor = graph_executor(target, draft, stages, acceptance=2.5)
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    times = time_stages(slots, stages.take, batch=1, context=6, num_draft_tokens=3, num_rounds=2)
    assert list(times.stages) == [
        "draft_lm_head", "draft_attention", "draft_mlp", "verify", "accept", "commit", "draft_extend",
    ]  # fmt: skip
    assert all(seconds > 0 for seconds in times.stages.values())
    assert 0 < times.unaccounted_share < 1
    assert times.tokens_per_round == 2.5  # the trace alternates between rounds of two and three tokens
    assert times.drafts_per_round == 3
    assert times.cpu_seconds > 0
    plain = time_stages(slots, stages.take, batch=2, context=9, num_draft_tokens=0, num_rounds=2)
    assert list(plain.stages) == ["base_decode", "accept", "commit", "draft_extend"]
    assert plain.tokens_per_round == 1
    executor.close()


@pytest.mark.interpreter  # marks of this clock cannot be captured in a graph
def test_kernels_are_marked_once(target: Decoder, draft: DraftDecoder) -> None:
    """Each part of a stage takes one second of the clock; parts of the same stage are added up."""
    stages = TimedStageMarks(FakeMark)
    executor = graph_executor(target, draft, stages)
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    slots.fill(5, [20])
    stages.take()
    slots.round(3)
    # draft_lm_head: three choices, and loading the outputs before the first. draft_attention: two draft rows,
    # each planned and run. verify: the forward pass, then the LM head. draft_extend is one stage, and stages
    # inside it are not counted.
    assert stages.take() == {
        "draft_lm_head": 4, "draft_attention": 4, "draft_mlp": 2, "verify": 2,
        "accept": 1, "commit": 1, "draft_extend": 1,
    }  # fmt: skip
    assert stages.take() == {}
    executor.close()


def test_no_stage_marks_capture_the_step_unchanged() -> None:
    captured: list[object] = []
    device = SimpleNamespace(capture=captured.append)

    def step() -> None: ...

    NO_STAGE_MARKS.capture(device, step)
    assert captured == [step]
    with NO_STAGE_MARKS("verify") as nothing:
        assert nothing is None


def test_nvtx_marks_surround_captures_and_launches(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the interpreted device a replay runs its step, so ranges of both appear."""
    names: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        names.append(name)
        yield

    monkeypatch.setattr("torch.cuda.nvtx.range", noted)
    executor = graph_executor(target, None, NvtxStageMarks())
    num_at_start = len(names)
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    slots.fill(6, [12])
    slots.round(0)
    assert names[num_at_start] == "prefill"
    if IS_GPU:
        assert num_at_start > 0 and names[num_at_start:] == ["prefill", "base_decode"]
    else:
        assert names[-4:] == ["base_decode"] * 2 + ["accept", "commit"]
    executor.close()


def test_marks_do_not_change_tokens(target: Decoder) -> None:
    found = []
    for stages in (NO_STAGE_MARKS, TimedStageMarks(GpuMark if IS_GPU else InterpretedEvent)):
        executor = graph_executor(target, None, stages)
        slots = ManualDriver(executor, prefill_token_budget=BUDGET)
        slots.fill(6, [12, 9])
        found.append([[output.token_ids for output in slots.round(0).decode] for _ in range(4)])
        executor.close()
    assert found[0] == found[1]


def test_manual_driver_drops_sequences_that_have_ended(target: Decoder) -> None:
    """It works with any executor. A prompt longer than the budget takes several steps."""
    executor = EagerExecutor(target, LIMITS)
    slots = ManualDriver(executor, prefill_token_budget=5)
    slots.fill(12, [16, 14])
    active = []
    while slots.active:
        active.append(len(slots.active))
        slots.round(0)
    assert active == [2, 1, 1]  # prefill has emitted a token of each sequence already
    times = time_stages(slots, dict, batch=2, context=8, num_draft_tokens=0, num_rounds=4)
    assert (times.tokens_per_round, times.stages, times.unaccounted_share) == (1, {}, 1)
    assert 0 < times.cpu_seconds <= times.round_seconds * 1.5
    executor.close()


class RecordingEagerExecutor(EagerExecutor):
    def __init__(self, target: Decoder) -> None:
        super().__init__(target, LIMITS)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().launch(plan)


@pytest.mark.parametrize("budget", [3, 5, 16])
def test_manual_driver_fills_the_budget_and_gives_each_slot_its_blocks(target: Decoder, budget: int) -> None:
    executor = RecordingEagerExecutor(target)
    ManualDriver(executor, prefill_token_budget=budget).fill(7, [20, 31])
    first, *others = executor.plans
    blocks = [block for update in first.block_updates for block in update.block_ids]
    assert len(blocks) == len(set(blocks)) == -(-21 // 4) + -(-32 // 4)
    assert not any(plan.assignments or plan.block_updates for plan in others)
    sizes = [sum(len(chunk.token_ids) for chunk in plan.prefill) for plan in executor.plans]
    assert all(size == budget for size in sizes[:-1]) and sum(sizes) == 14
    for slot in range(2):
        chunks = [chunk for plan in executor.plans for chunk in plan.prefill if chunk.slot == slot]
        prompt = [token for chunk in chunks for token in chunk.token_ids]
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            assert tuple(prompt[chunk.start : end]) == chunk.token_ids
            assert chunk.next_token_id == (prompt[end] if end < 7 else None)
    executor.close()


@pytest.mark.parametrize(
    "context, max_lengths, field",
    [
        (4, [8, 8, 8], "max_num_seqs"),
        (4, [41], "max_model_len"),
        (4, [40, 40], "kv_cache_tokens"),
        (4, [40, 50], "max_model_len"),
    ],
)
def test_manual_driver_rejects_sequences_without_room(
    target: Decoder, context: int, max_lengths: list[int], field: str
) -> None:
    slots = ManualDriver(EagerExecutor(target, LIMITS), prefill_token_budget=BUDGET)
    with pytest.raises(ConfigError, match=field):
        slots.fill(context, max_lengths)


def test_profiled_engine_opens_with_nvtx_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only with executor="graph"; other engines open without marks."""
    opened: list[object] = []

    def open_model(*_: object, stages: object, **__: object) -> None:
        opened.append(stages)
        raise ConfigError("enough")

    monkeypatch.setattr("drift_sdk.startup.model_startup.open_model", open_model)

    async def main(engine: Engine) -> None:
        with pytest.raises(ConfigError, match="enough"):
            await engine.start()

    config = EngineConfig(executor="graph")
    for engine in (profiled_engine(tmp_path, config), recorded_engine(tmp_path, config)):
        anyio.run(main, engine)
    assert isinstance(opened[0], NvtxStageMarks) and opened[1] is None
    with pytest.raises(ConfigError, match="executor='auto': expected \"graph\" to have its stages marked"):
        profiled_engine(tmp_path, EngineConfig())
