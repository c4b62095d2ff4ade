"""strict_performance: slow paths raise instead of degrading."""

from __future__ import annotations

from collections import deque

from drift_sdk.errors import ExecutorError
from drift_sdk.steps import Executor, ExecutorLimits, HostWork, StepPlan, StepResult


class StrictExecutor:
    """Wraps an executor and raises ExecutorError from `collect` for steps in which the host did work that the
    device should not depend on.

    That is: the host waited, took part in a round, copied results or allocated device memory. With
    `must_draft` also: a slot that was planned to draft did not, although its sequence goes on.
    """

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

    @property
    def is_done(self) -> bool:
        return self._executor.is_done

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
    """Raise ExecutorError for any host work."""
    for number, what in (
        (work.num_waits, "waits for room in the ring of inputs: too much was admitted at once"),
        (work.num_split_rounds, "rounds in which the host computed which tokens may follow the drafts"),
        (work.num_copies, "results copied to make room in the ring"),
        (work.num_allocations, "allocations of device memory while serving"),
    ):
        if number:
            raise ExecutorError(f"strict_performance: {number} {what}")


def check_drafts(plan: StepPlan, result: StepResult) -> None:
    """Raise ExecutorError for a row that was planned to draft, drafted nothing, and did not finish."""
    for row, output in zip(plan.decode, result.decode, strict=True):
        # In its last round a slot may have room for a single token, which needs no draft.
        goes_on = bool(output.token_ids) and output.finish is None
        if goes_on and row.num_draft_tokens > 0 and output.num_drafted == 0:
            planned = f"{row.num_draft_tokens} planned tokens"
            raise ExecutorError(f"strict_performance: slot {row.slot} drafted none of {planned}")
