"""The recording executor: records how many tokens each round of an engine emits."""

from __future__ import annotations

from collections import deque

from drift_sdk.profiling.acceptance_trace import AcceptanceTrace
from drift_sdk.steps import Executor, ExecutorLimits, StepPlan, StepResult

__all__ = ["RecordedRounds", "RecordingExecutor"]


class RecordedRounds:
    """Numbers of tokens that the rounds of an engine emitted, since it was started.

    steps: for each step with rounds, a mapping from the number of a sequence to its number of tokens; slots
    that had finished got no tokens and are left out. num_sequences: how many sequences there have been; they
    are numbered in the order of their assignment. A sequence that was preempted is counted as a new one when
    it is resumed.
    """

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = []
        self.num_sequences = 0

    def trace(self) -> AcceptanceTrace:
        """The rounds of each sequence, sequences in the order of their first rounds.

        A round without drafts emitted one token; the last round of a sequence may have been cut short by its
        end.
        """
        found: dict[int, list[int]] = {}
        for step in self.steps:
            for sequence, num_tokens in step.items():
                found.setdefault(sequence, []).append(num_tokens)

        return AcceptanceTrace(tuple(map(tuple, found.values())))


class RecordingExecutor:
    """An `Executor` that runs plans on another one, and records their rounds in `rounds`."""

    def __init__(self, executor: Executor, rounds: RecordedRounds) -> None:
        self._executor, self._rounds = executor, rounds
        self._launched: deque[list[int]] = deque()  # of each step in flight, the sequence of each decode row
        self._sequences: dict[int, int] = {}  # the number of the sequence in each slot

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        for assignment in plan.assignments:
            self._sequences[assignment.slot] = self._rounds.num_sequences
            self._rounds.num_sequences += 1
        # By the time the step is collected, its slots may have been assigned to other sequences.
        self._launched.append([self._sequences[row.slot] for row in plan.decode])

    @property
    def is_done(self) -> bool:
        return self._executor.is_done

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
