"""An executor that notes what came of every round."""

from __future__ import annotations

from collections import deque

from drift_sdk.profiling.acceptance_trace import AcceptanceTrace
from drift_sdk.steps import Executor, ExecutorLimits, StepPlan, StepResult

__all__ = ["RecordedRounds", "RecordingExecutor"]


class RecordedRounds:
    """What the rounds of an engine emitted, from its start on.

    steps: of each step with rounds, the tokens that each sequence got, by its number; a slot that had
    finished got none and is not there. A sequence that was preempted comes back as another one.
    """

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = []
        self.num_sequences = 0

    def trace(self) -> AcceptanceTrace:
        """Round by round of each sequence, in the order of their first rounds. A round that had no draft
        emitted one token; the last one of a sequence may have been cut short."""
        found: dict[int, list[int]] = {}
        for step in self.steps:
            for sequence, num_tokens in step.items():
                found.setdefault(sequence, []).append(num_tokens)

        return AcceptanceTrace(tuple(map(tuple, found.values())))


class RecordingExecutor:
    """Runs plans on `executor` and writes down their rounds."""

    def __init__(self, executor: Executor, rounds: RecordedRounds) -> None:
        self._executor, self._rounds = executor, rounds
        self._launched: deque[list[int]] = deque()  # sequences of each step's rows
        self._sequences: dict[int, int] = {}  # by slot

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        for assignment in plan.assignments:
            self._sequences[assignment.slot] = self._rounds.num_sequences
            self._rounds.num_sequences += 1
        # When the step is collected, its slots may be others'.
        self._launched.append([self._sequences[row.slot] for row in plan.decode])

    def collect(self) -> StepResult:
        result = self._executor.collect()
        sequences = self._launched.popleft()
        step = {
            sequence: len(output.token_ids)
            for sequence, output in zip(sequences, result.decode, strict=True)
            if output.token_ids
        }
        if step:
            self._rounds.steps.append(step)
        return result

    def close(self) -> None:
        self._launched.clear()
        self._executor.close()
