"""Steps of the manual driver."""

from __future__ import annotations

import pytest

from drift_sdk.errors import ConfigError
from drift_sdk.steps import MAX_CHUNKS, ExecutorLimits, SlotOutput, StepPlan, StepResult
from perf.harness.manual_driver import ManualDriver, _prefill_steps


def test_prompts_are_cut_by_the_budget_and_the_most_chunks() -> None:
    steps = [*_prefill_steps([[1, 2, 3]] * (MAX_CHUNKS + 2), budget=1000)]
    assert [len(chunks) for chunks in steps] == [MAX_CHUNKS, 2]
    cut = [*_prefill_steps([[1, 2, 3], [4, 5, 6]], budget=4)]
    assert [[(chunk.slot, chunk.start, chunk.token_ids) for chunk in chunks] for chunks in cut] == [
        [(0, 0, (1, 2, 3)), (1, 0, (4,))],
        [(1, 1, (5, 6))],
    ]


class PlanRecorder:
    """An executor that computes nothing. plans: those that it was given."""

    is_done = True

    def __init__(self, num_slots: int = 3) -> None:
        self.limits = ExecutorLimits(
            max_num_seqs=num_slots, max_model_len=32, num_blocks=24, block_size=4, vocab_size=9
        )
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        plan = self.plans[-1]
        decode = tuple(SlotOutput(token_ids=(1,)) for _ in plan.decode)
        return StepResult(step_id=plan.step_id, prefill=(), decode=decode, duration_s=0.0)

    def close(self) -> None:
        pass


def test_chunks_of_a_waiting_prompt_are_computed_beside_rounds() -> None:
    executor = PlanRecorder()
    slots = ManualDriver(executor, prefill_token_budget=16)
    slots.fill(5, [20, 20], waiting=[3, 4])
    for _ in range(3):
        slots.round(0)
    prefill, *rounds = executor.plans
    assert [assignment.slot for assignment in prefill.assignments] == [0, 1, 2]
    assert [(chunk.slot, len(chunk.token_ids)) for chunk in prefill.prefill] == [(0, 5), (1, 5)]
    assert [[row.slot for row in plan.decode] for plan in rounds] == [[0, 1]] * 3
    chunks = [[(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in plan.prefill] for plan in rounds]
    assert chunks == [[(2, 0, 3)], [(2, 3, 4)], []]
    assert all(chunk.next_token_id is not None for plan in rounds for chunk in plan.prefill)
    blocks = [update.block_ids for update in prefill.block_updates]
    assert len(blocks[2]) * 4 > 3 + 4 and not set(blocks[2]) & {*blocks[0], *blocks[1]}


def test_waiting_prompt_needs_a_slot() -> None:
    slots = ManualDriver(PlanRecorder(num_slots=2), prefill_token_budget=16)
    with pytest.raises(ConfigError, match="max_num_seqs=2: expected at least 3"):
        slots.fill(5, [20, 20], waiting=[3])
