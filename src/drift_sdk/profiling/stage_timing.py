"""Times of the stages of a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from msgspec import Struct

from drift_sdk.profiling.manual_driver import ManualDriver
from drift_sdk.steps import SlotOutput

__all__ = ["StageTiming", "time_stages"]

NUM_WARM_UP_ROUNDS = 3
"""Rounds run before the first one that is timed, so that clocks and caches are in their steady state."""


class StageTiming(Struct, frozen=True, kw_only=True):
    """Means over rounds, in seconds.

    stages: time on the device of each stage of a round, by its name; the parts of a stage are added up.
    round_seconds: time on the device of a whole round. cpu_seconds: CPU time of the thread that launches and
    collects a round. tokens_per_round, drafts_per_round: tokens emitted and drafted for one sequence.
    num_rounds: how many rounds were timed.
    """

    stages: dict[str, float]
    round_seconds: float
    cpu_seconds: float
    tokens_per_round: float
    drafts_per_round: float
    num_rounds: int

    @property
    def unaccounted_share(self) -> float:
        """The share of the round, 0 to 1, that belongs to no stage: between stages, before and after them."""
        return 1 - sum(self.stages.values()) / self.round_seconds


def time_stages(
    slots: ManualDriver,
    take_stages: Callable[[], dict[str, float]],
    *,
    batch: int,
    context: int,
    num_draft_tokens: int,
    num_rounds: int,
) -> StageTiming:
    """Fill the slots, then time rounds, one at a time.

    take_stages: returns the seconds of each stage in the steps since its last call. batch: number of
    sequences. context: prompt tokens of each. num_draft_tokens: drafts of a sequence in each round.
    num_rounds: how many rounds are timed, after NUM_WARM_UP_ROUNDS that are not. Raises ConfigError if the
    executor has no room for the sequences, see `ManualDriver.fill`.
    """
    max_length = context + 1 + (NUM_WARM_UP_ROUNDS + num_rounds) * (num_draft_tokens + 1)
    slots.fill(context, [max_length + 1] * batch)
    for _ in range(NUM_WARM_UP_ROUNDS):
        slots.round(num_draft_tokens)
    take_stages()
    stages: dict[str, list[float]] = {}
    durations: list[float] = []
    outputs: list[SlotOutput] = []
    cpu_seconds = 0.0
    for _ in range(num_rounds):
        started_at = time.thread_time()
        result = slots.round(num_draft_tokens)
        cpu_seconds += time.thread_time() - started_at
        durations.append(result.duration_s)
        outputs += result.decode
        for name, seconds in take_stages().items():
            stages.setdefault(name, []).append(seconds)

    return StageTiming(
        stages={name: sum(seconds) / num_rounds for name, seconds in stages.items()},
        round_seconds=statistics.mean(durations),
        cpu_seconds=cpu_seconds / num_rounds,
        tokens_per_round=statistics.mean(len(output.token_ids) for output in outputs),
        drafts_per_round=statistics.mean(output.num_drafted for output in outputs),
        num_rounds=num_rounds,
    )
