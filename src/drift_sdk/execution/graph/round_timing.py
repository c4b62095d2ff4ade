"""What rounds take on an idle device, before there is anything to serve."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from drift_sdk.execution.device.device import Device, Replay

__all__ = ["time_rounds"]

NUM_REPLAYS = 3


def time_rounds(device: Device, rounds: Mapping[tuple[int, int], Replay]) -> dict[tuple[int, int], float]:
    """Seconds of each replay, the median of a few. All their rows are padding, so attention is not in it."""
    marks = [device.event() for _ in range(NUM_REPLAYS + 1)]
    costs: dict[tuple[int, int], float] = {}
    for shape, replay in rounds.items():
        marks[0].record()
        for mark in marks[1:]:
            replay.launch()
            mark.record()
        marks[-1].wait()
        costs[shape] = median(later.seconds_since(earlier) for earlier, later in pairwise(marks))

    return costs
