"""Progress reports of a start: the time that each stage takes, and delivery to the caller's event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise

from drift_sdk.driver.loop_poster import LoopClosed, LoopPoster
from drift_sdk.progress import Progress, Report

__all__ = ["StageClock", "reporter"]

log = logging.getLogger("drift_sdk")


class StageClock:
    """Passes reports on. A stage lasts from its first report to that of the next; "imports" comes first, the
    last one reported has no length."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._begun_at = {"imports": time.monotonic()}

    def __call__(self, stage: str, fraction: float) -> None:
        self._begun_at.setdefault(stage, time.monotonic())
        self._report(stage, fraction)

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """Stages and their lengths, in order."""
        times = [*self._begun_at.values()]
        lengths = (end - begin for begin, end in pairwise(times))
        return tuple(zip(self._begun_at, lengths, strict=False))


def reporter(on_progress: Callable[[Progress], None] | None) -> Report:
    """Passes (stage, fraction), called on any thread, to `on_progress` on the running loop: each whole
    percent once."""
    bridge = LoopPoster.current()
    last: tuple[str, int] | None = None

    def report(stage: str, fraction: float) -> None:
        nonlocal last
        percent = int(fraction * 100)
        if (stage, percent) == last:
            return

        last = stage, percent
        log.debug("%s: %d%%", stage, percent)
        if on_progress is not None:
            try:
                bridge.post(on_progress, Progress(stage=stage, fraction=fraction))
            except LoopClosed:
                return

    return report
