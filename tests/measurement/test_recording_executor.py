"""Recorded rounds are those that the streams of an engine received."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from model_zoo import make_model
from scheduled_run import sampling_of

from drift_sdk import Chain, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk.measurement import AcceptanceTrace, RecordedRounds, RecordingExecutor, recorded_engine
from drift_sdk.steps import DecodeRow, ExecutorLimits, SlotAssignment, SlotOutput, StepPlan, StepResult

NUM_TOKENS = (60, 5, 70, 1)


async def test_recorded_rounds_of_an_engine_with_drafts(tmp_path: Path) -> None:
    make_model(0, tmp_path)
    speculation = Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False)
    config = EngineConfig(executor="eager", max_num_seqs=2, speculation=speculation)
    engine = recorded_engine(tmp_path, config)
    async with engine:
        streams = [
            engine.generate([5 + index, 7] * 3, SamplingParams(max_tokens=number, ignore_eos=True))
            for index, number in enumerate(NUM_TOKENS)
        ]
        await asyncio.gather(*(stream.completion() for stream in streams))
        stats = engine.stats()

    trace = engine.rounds.trace()
    # The first token comes from the prefill, so a request of one token has no round.
    assert sorted(map(sum, trace.sequences)) == sorted(number - 1 for number in NUM_TOKENS if number > 1)
    assert max(trace.lengths) > 1
    assert sum(trace.lengths) - len(trace.lengths) == stats.num_accepted_tokens
    active = [len(step) for step in engine.rounds.steps]
    assert (min(active), max(active)) == (1, 2) and sum(active) == len(trace.lengths)
    trace.save(tmp_path / "trace.json")
    assert AcceptanceTrace.load(tmp_path / "trace.json") == trace


class ScriptedExecutor:
    """An executor whose rows emit these numbers of tokens in each step."""

    limits = ExecutorLimits(max_num_seqs=2, max_model_len=8, num_blocks=4, block_size=4, vocab_size=9)

    def __init__(self, steps: list[list[int]]) -> None:
        self.steps = steps
        self.is_closed = False

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        decode = tuple(SlotOutput(token_ids=(1,) * number) for number in self.steps.pop(0))
        return StepResult(step_id=0, prefill=(), decode=decode, duration_s=0.0)

    def close(self) -> None:
        self.is_closed = True


def plan(rows: list[int], assigned: Sequence[int] = ()) -> StepPlan:
    return StepPlan(
        step_id=0,
        assignments=tuple(SlotAssignment(slot=slot, sampling=sampling_of(1, 4)) for slot in assigned),
        block_updates=(),
        prefill=(),
        decode=tuple(DecodeRow(slot=slot, num_draft_tokens=3) for slot in rows),
    )


def test_rounds_are_recorded_after_their_slots_are_reassigned() -> None:
    rounds = RecordedRounds()
    inner = ScriptedExecutor([[3, 1], [2, 0], [], [1, 4]])
    executor = RecordingExecutor(inner, rounds)
    assert executor.limits is inner.limits
    executor.launch(plan([0, 1], assigned=[0, 1]))
    executor.launch(plan([0, 1]))  # slot 1 has finished, but that step is not collected yet
    executor.collect()
    executor.launch(plan([], assigned=[1]))
    executor.launch(plan([1, 0]))
    for _ in range(3):
        executor.collect()
    assert rounds.steps == [{0: 3, 1: 1}, {0: 2}, {2: 1, 0: 4}]
    assert rounds.trace().sequences == ((3, 2, 4), (1,), (1,))
    executor.close()
    assert inner.is_closed
