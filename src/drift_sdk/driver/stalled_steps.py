"""A warning if steps on a CPU stall: some take many times as long as others like them."""

from __future__ import annotations

import logging
import sys
from collections import deque
from statistics import median

__all__ = ["StalledSteps"]

FACTOR = 8.0
"""A step that takes more than this many times the median has stalled."""
NUM_STEPS = 9
"""Latest steps with as many rows, which the median is of."""
MOST_STALLED = 4
"""More stalled steps in a row are no stall: steps have become slower, because sequences are longer, say."""
MOST_LOST_S = 5.0
"""Seconds that steps may lose altogether before the warning."""

log: logging.Logger = logging.getLogger("drift_sdk")


class StalledSteps:
    """Compares decoding steps with those before them that had as many rows, until it has warned once."""

    def __init__(self) -> None:
        self._durations: dict[int, deque[float]] = {}
        self._stalled: list[float] = []  # seconds lost by the newest steps, all of which have stalled
        self._lost_s = 0.0
        self._is_over = False

    def note(self, num_rows: int, duration_s: float) -> None:
        """A step of decode rows alone has taken so long. Called on the engine's thread."""
        if self._is_over:
            return

        durations = self._durations.setdefault(num_rows, deque(maxlen=NUM_STEPS))
        usual_s = median(durations) if len(durations) == NUM_STEPS else duration_s
        if duration_s > FACTOR * usual_s and len(self._stalled) < MOST_STALLED:
            self._stalled.append(duration_s - usual_s)
            return

        if duration_s > FACTOR * usual_s:
            durations.clear()
        else:
            self._lost_s += sum(self._stalled)
        self._stalled.clear()
        durations.append(duration_s)
        if self._lost_s > MOST_LOST_S:
            self._is_over = True
            self._warn(num_rows, usual_s)

    def _warn(self, num_rows: int, usual_s: float) -> None:
        torch = sys.modules.get("torch")
        if torch is None or torch.cuda.is_initialized() or torch.get_num_threads() == 1:
            return

        log.warning(
            "steps have stalled for %.0f s in all: with %d rows one usually takes %.0f ms, and some take "
            "over %.0f times that. torch's %d threads (OMP_NUM_THREADS) wait for each other if others use "
            "their cores or a container has fewer: EngineConfig(num_threads=...) sets their number",
            *(self._lost_s, num_rows, 1e3 * usual_s, FACTOR, torch.get_num_threads()),
        )
