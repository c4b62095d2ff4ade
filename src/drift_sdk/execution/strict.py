"""What would silently be slow fails."""

from __future__ import annotations

from collections import deque

from drift_sdk.errors import ExecutorError
from drift_sdk.steps import Executor, ExecutorLimits, HostWork, StepPlan, StepResult

__all__ = ["StrictExecutor"]


class StrictExecutor:
    """Another executor whose steps must keep the device going by itself: ExecutorError where the host had to
    wait, take part in a round, copy results or allocate memory, and, with `must_draft`, where a slot that was
    to draft did not, though it went on."""

    def __init__(self, executor: Executor, *, must_draft: bool) -> None:
        self._executor = executor
        self._must_draft = must_draft
        self._launched: deque[StepPlan] = deque()

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)
        self._executor.launch(plan)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        plan = self._launched.popleft()
        check_host_work(result.host_work)
        if self._must_draft:
            check_drafts(plan, result)
        return result

    def close(self) -> None:
        self._executor.close()


def check_host_work(work: HostWork) -> None:
    for number, what in (
        (work.num_waits, "waits for room in the ring of inputs: too much was admitted at once"),
        (work.num_split_rounds, "rounds in which the host was asked what may follow the drafts"),
        (work.num_copies, "results copied to make room in the ring"),
        (work.num_allocations, "allocations of device memory while serving"),
    ):
        if number:
            raise ExecutorError(f"strict_performance: {number} {what}")


def check_drafts(plan: StepPlan, result: StepResult) -> None:
    for row, output in zip(plan.decode, result.decode, strict=True):
        # In its last round a slot may have use for a single token.
        goes_on = bool(output.token_ids) and output.finish is None
        if goes_on and row.num_draft_tokens > 0 and output.num_drafted == 0:
            planned = f"{row.num_draft_tokens} planned tokens"
            raise ExecutorError(f"strict_performance: slot {row.slot} drafted none of {planned}")
