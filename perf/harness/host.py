"""Cost of decoding for the host process: lag of its event loop, CPU time of a thread."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from types import TracebackType

__all__ = ["ENGINE_THREAD", "LoopLag", "percentile", "thread_seconds"]

ENGINE_THREAD = "drift-engine"
SLEEP_S = 0.001


class LoopLag:
    """Measures the lag of the event loop while its `async with` block runs.

    A task sleeps for `period_s` seconds repeatedly and records how much later than requested it wakes.
    """

    def __init__(self, period_s: float = SLEEP_S) -> None:
        self.lags_s: list[float] = []
        self._period_s = period_s

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            asked_at = time.perf_counter()
            await asyncio.sleep(self._period_s)
            self.lags_s.append(time.perf_counter() - asked_at - self._period_s)

    @property
    def ms_p99(self) -> float:
        return percentile(self.lags_s, 0.99) * 1e3


def thread_seconds(name: str) -> float | None:
    """CPU seconds that the thread of this name has used; None if the system does not report it.

    Raises ValueError unless this process has exactly one such thread.
    """
    threads = [thread for thread in threading.enumerate() if thread.name == name]
    if len(threads) != 1:
        raise ValueError(f"thread={name!r}: {len(threads)} of them run, expected one")

    ident = threads[0].ident
    assert ident is not None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except (AttributeError, OSError):
        return None


def percentile(values: list[float], share: float) -> float:
    """The smallest value such that at least `share` of the values do not exceed it; 0 if there are none."""
    if not values:
        return 0.0

    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
