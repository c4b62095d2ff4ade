"""A warning if other processes need the cores over which torch splits operations."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import monotonic, process_time

from msgspec import Struct

__all__ = ["BusyCores", "CoreTimes", "core_times"]

INTERVAL_S = 5.0
MOST_BUSY = 0.5
"""Cores that others may use on average before threads of an operation wait for each other noticeably."""

log = logging.getLogger("drift_sdk")


class CoreTimes(Struct, frozen=True):
    """at_s: when it was read. busy_s: time that the cores this process may use have worked since the machine
    was started, together. own_s: their time for this process."""

    at_s: float
    busy_s: float
    own_s: float
    num_cores: int


class BusyCores:
    """Compares the cores that other processes use with those that `num_threads` threads leave, every five
    seconds, until it has warned once. Does nothing for one thread, and where there is no /proc/stat."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._last = core_times() if num_threads > 1 else None

    def look(self) -> None:
        """Called after a step; almost always it returns at once."""
        last = self._last
        if last is None or monotonic() - last.at_s < INTERVAL_S:
            return

        self._last = now = core_times()
        if now is None:
            return

        num_busy = ((now.busy_s - last.busy_s) - (now.own_s - last.own_s)) / (now.at_s - last.at_s)
        num_left = now.num_cores - num_busy
        if self._num_threads > num_left + MOST_BUSY:
            self._last = None
            log.warning(
                "other processes use %.1f of %d cores, and torch splits operations over %d threads, which "
                "wait for each other: EngineConfig(num_threads=%d) may be several times faster",
                num_busy,
                now.num_cores,
                self._num_threads,
                max(1, int(num_left + MOST_BUSY)),
            )


def core_times() -> CoreTimes | None:
    """None where the system does not tell."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text().splitlines()
    except (AttributeError, OSError):
        return None

    ticks = 0
    for name, *fields in map(str.split, lines):
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, fields)
            ticks += user + nice + system + irq + softirq + steal
    busy_s = ticks / os.sysconf("SC_CLK_TCK")
    return CoreTimes(monotonic(), busy_s, process_time(), len(cores))
