"""Calls of `on_progress`, with the time that each stage of a start takes, and of `on_event`.

Calls of `on_event` run on a thread of their own, so that they delay neither tokens nor an event loop.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

from drift_sdk._fields import is_coroutine_function
from drift_sdk.driver.loops import LoopClosed, LoopPoster
from drift_sdk.errors import ConfigError
from drift_sdk.events import (
    Download,
    EngineFailed,
    EngineStarted,
    EngineStopped,
    Event,
    Progress,
    Report,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestFirstToken,
    RequestPreempted,
    RequestQueued,
    RequestRejected,
)
from drift_sdk.results import Completion
from drift_sdk.scheduling.sequence import Sequence

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


MAX_WAITING = 10_000
"""Most events that wait for `on_event` to return; further ones are dropped."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that closing waits for the events that are left."""


class EventSender:
    """Sends events to a function, one at a time, in order. Methods may be called from any thread, and all but
    `close` never wait; without a function they do nothing.

    An exception of the function is logged, the first one alone. While `MAX_WAITING` events wait, further ones
    are dropped, which is logged once.
    """

    def __init__(self, on_event: Callable[[Event], object] | None) -> None:
        self._on_event = on_event
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._has_failed = False
        self._has_dropped = False
        self._thread = threading.Thread(target=self._run, name="drift-events", daemon=True)

    @property
    def is_on(self) -> bool:
        """Whether there is a function."""
        return self._on_event is not None

    def open(self) -> None:
        """Start the thread. Called once, before any other method."""
        if self.is_on:
            self._thread.start()

    def close(self) -> None:
        """Wait until the events sent so far have been handled, `CLOSE_TIMEOUT_S` seconds at most, and end the
        thread."""
        if not self.is_on:
            return

        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("on_event did not return within %.0f s; its thread is abandoned", CLOSE_TIMEOUT_S)

    def started(self, executor: str, seconds: float) -> None:
        if self.is_on:
            self._send(EngineStarted(time=time.time(), executor=executor, seconds=seconds))

    def engine_failed(self, error: BaseException) -> None:
        if self.is_on:
            self._send(EngineFailed(time=time.time(), error=error))

    def stopped(self) -> None:
        if self.is_on:
            self._send(EngineStopped(time=time.time()))

    def queued(self, request_id: str) -> None:
        if self.is_on:
            self._send(RequestQueued(time=time.time(), request_id=request_id))

    def rejected(self, request_id: str, error: Exception) -> None:
        if self.is_on:
            self._send(RequestRejected(time=time.time(), request_id=request_id, error=error))

    def admitted(self, sequence: Sequence) -> None:
        """The scheduler has given a sequence a slot."""
        if self.is_on:
            event = RequestAdmitted(
                time=time.time(),
                request_id=sequence.request_id,
                num_tokens=len(sequence.token_ids),
                num_cached=sequence.num_computed_tokens,
            )
            self._send(event)

    def preempted(self, sequence: Sequence) -> None:
        """The scheduler has taken a sequence's slot."""
        if self.is_on:
            self._send(RequestPreempted(time=time.time(), request_id=sequence.request_id))

    def first_token(self, request_id: str) -> None:
        if self.is_on:
            self._send(RequestFirstToken(time=time.time(), request_id=request_id))

    def finished(self, completion: Completion) -> None:
        if self.is_on:
            event = RequestFinished(
                time=time.time(),
                request_id=completion.request_id,
                finish_reason=completion.finish_reason,
                usage=completion.usage,
                timing=completion.timing,
                speculation=completion.speculation,
            )
            self._send(event)

    def failed(self, request_id: str, error: Exception) -> None:
        if self.is_on:
            self._send(RequestFailed(time=time.time(), request_id=request_id, error=error))

    def _send(self, event: Event) -> None:
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(event)
        elif not self._has_dropped:
            self._has_dropped = True
            log.warning("on_event is too slow: %d events wait, and further ones are dropped", MAX_WAITING)

    def _run(self) -> None:
        assert self._on_event is not None
        while True:
            try:
                if (event := self._waiting.get()) is None:
                    return

                self._on_event(event)
            except BaseException as error:
                # Later events are sent, also if it is this loop that has failed, for want of memory.
                if not self._has_failed:
                    self._has_failed = True
                    with suppress(Exception):
                        log.error("on_event raised an exception; further ones are not logged", exc_info=error)


NO_EVENTS = EventSender(None)


def check_on_event(on_event: object) -> None:
    """ConfigError for what is neither None nor an ordinary function: nothing would await a coroutine."""
    if on_event is None or (callable(on_event) and not is_coroutine_function(on_event)):
        return

    allowed = "a function that takes an Event, not a coroutine function, or None"
    raise ConfigError.of("on_event", on_event, allowed)
