"""Where the time of a round goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from msgspec import Struct

from drift_sdk.profiling.manual_driver import ManualDriver
from drift_sdk.steps import SlotOutput

__all__ = ["StageTiming", "time_stages"]

NUM_WARM_UP_ROUNDS = 3


class StageTiming(Struct, frozen=True, kw_only=True):
    """Means over rounds, in seconds.

    stages: of the device, for each stage of a round, all its parts together. round_seconds: of the device,
    for a whole round. cpu_seconds: of the thread that launches and collects it. tokens_per_round,
    drafts_per_round: of a sequence.
    """

    stages: dict[str, float]
    round_seconds: float
    cpu_seconds: float
    tokens_per_round: float
    drafts_per_round: float
    num_rounds: int

    @property
    def unaccounted_share(self) -> float:
        """Of the round, what lies in no stage: between them, before and after."""
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

    take_stages: seconds of each stage in the steps since its last call. Raises ConfigError as
    `ManualDriver.fill`.
    """
    most = context + 1 + (NUM_WARM_UP_ROUNDS + num_rounds) * (num_draft_tokens + 1)
    slots.fill(context, [most + 1] * batch)
    for _ in range(NUM_WARM_UP_ROUNDS):
        slots.round(num_draft_tokens)
    take_stages()
    stages: dict[str, list[float]] = {}
    durations: list[float] = []
    outputs: list[SlotOutput] = []
    cpu_seconds = 0.0
    for _ in range(num_rounds):
        begun_at = time.thread_time()
        result = slots.round(num_draft_tokens)
        cpu_seconds += time.thread_time() - begun_at
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
