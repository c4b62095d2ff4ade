"""Progress of a start: the time that each stage takes, and calls of `on_progress`."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable
from itertools import pairwise

from drift_sdk.driver.loop_poster import LoopClosed, LoopPoster
from drift_sdk.errors import ConfigError
from drift_sdk.progress import Download, Progress, Report

__all__ = ["ProgressReporter", "StageClock", "check_on_progress"]

log: logging.Logger = logging.getLogger("drift_sdk")


class StageClock:
    """Passes reports on and times the stages. A stage lasts from its first report to the first report of the
    next; "imports" comes before the first report; the last stage reported has no length."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._begun_at = {"imports": time.monotonic()}

    def __call__(self, stage: str, fraction: float, download: Download | None = None) -> None:
        self._begun_at.setdefault(stage, time.monotonic())
        self._report(stage, fraction, download)

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """(stage, seconds), in order."""
        times = [*self._begun_at.values()]
        lengths = (end - begin for begin, end in pairwise(times))
        return tuple(zip(self._begun_at, lengths, strict=False))


class ProgressReporter:
    """Reports a start to `on_progress`, on the event loop that runs where it is made, once for each whole
    percent of a stage. It is called as a `Report`, on any one thread at a time.

    When `on_progress` raises an exception, that is logged once and `on_progress` is not called again: on trio
    an exception there would end the whole run.
    """

    def __init__(self, on_progress: Callable[[Progress], object] | None) -> None:
        self._on_progress = on_progress
        self._loop_poster = LoopPoster.current()
        self._last: tuple[str, int] | None = None

    def __call__(self, stage: str, fraction: float, download: Download | None = None) -> None:
        percent = int(fraction * 100)
        if (stage, percent) == self._last:
            return

        self._last = stage, percent
        log.debug("%s: %d%%", stage, percent)
        if self._on_progress is not None:
            try:
                progress = Progress(stage=stage, fraction=fraction, download=download)
                self._loop_poster.post(self._call, progress)
            except LoopClosed:
                return

    def _call(self, progress: Progress) -> None:
        """Runs on the event loop."""
        if self._on_progress is None:
            return

        try:
            self._on_progress(progress)
        except BaseException as error:
            # Ctrl-C during the call; trio delivers it elsewhere. Other threads never get it.
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and isinstance(error, KeyboardInterrupt):
                raise

            self._on_progress = None
            log.exception("on_progress raised an exception and is not called again")


def check_on_progress(on_progress: object) -> None:
    """ConfigError for what is neither None nor an ordinary function: nothing would await a coroutine."""
    if on_progress is None or (callable(on_progress) and not is_coroutine_function(on_progress)):
        return

    allowed = "a function that takes a Progress, not a coroutine function, or None"
    raise ConfigError.of("on_progress", on_progress, allowed)


def is_coroutine_function(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - of an object whose class has an async __call__
    )
