"""The door of an engine: who may come in, and who is inside."""

from __future__ import annotations

import threading
from collections.abc import Callable

from drift_sdk.driver.loop_poster import LoopPoster
from drift_sdk.driver.request import Request
from drift_sdk.errors import EngineClosed, ExecutorError, QueueFull
from drift_sdk.stats import EngineStats

__all__ = ["RequestRegistry", "failure_of"]


class RequestRegistry:
    """Live requests, from the call that submits them to their end. Used from any thread.

    A request enters when `admit` takes it in, and counts as entering until the scheduler knows it.
    """

    def __init__(self, max_queued_requests: int | None) -> None:
        self._max_queued_requests = max_queued_requests
        # Reentrant: a section may be interrupted by the collector, and that by an engine's finaliser.
        self._lock = threading.RLock()
        self._live: dict[Request, None] = {}
        self._num_entering = 0
        self.num_admitted = 0
        self.num_rejected = 0
        self.is_open = False
        self._is_closed = False
        self._failure: BaseException | None = None

    def open(self) -> None:
        """Let requests in, unless it has been closed already."""
        with self._lock:
            self.is_open = not self._is_closed

    def close(self, failure: BaseException | None = None) -> None:
        """Let nobody in any more; they are told of the failure, if that is why."""
        with self._lock:
            self.is_open, self._is_closed = False, True
            self._failure = failure or self._failure

    def admit(self, request: Request, read_stats: Callable[[], EngineStats]) -> None:
        """Take a request in; QueueFull, EngineClosed or ExecutorError if that cannot be."""
        with self._lock:
            if not self.is_open:
                raise self.refusal()

            if not self.has_room(read_stats()):
                self.num_rejected += 1
                raise QueueFull(
                    f"max_queued_requests={self._max_queued_requests} requests are waiting already"
                )

            self._num_entering += 1
            self.num_admitted += 1
            self._live[request] = None

    def refusal(self) -> EngineClosed | ExecutorError:
        """The error for a request that comes while it is closed."""
        if self._failure is not None:
            return failure_of(self._failure)

        return EngineClosed("the engine is not open")

    def has_room(self, stats: EngineStats) -> bool:
        """Whether the queue would take one more request."""
        limit = self._max_queued_requests
        return limit is None or self._num_entering + stats.num_queued - stats.num_free_slots < limit

    def withdraw(self, request: Request) -> None:
        """Undo `admit`."""
        with self._lock:
            self._num_entering -= 1
            self.num_admitted -= 1
            self._live.pop(request, None)

    def entered(self, publish_stats: Callable[[], None]) -> None:
        """One more of those admitted is known to the scheduler, or failed before. It passes from one count
        to the other at once, so nobody is turned away for having been counted twice."""
        with self._lock:
            publish_stats()
            self._num_entering -= 1

    def leave(self, request: Request) -> None:
        with self._lock:
            self._live.pop(request, None)

    def live(self, bridge: LoopPoster | None = None) -> list[Request]:
        """Who is inside, of one event loop or of all."""
        with self._lock:
            return [
                request for request in self._live if bridge is None or request.feed.bridge.loop is bridge.loop
            ]

    @property
    def is_empty(self) -> bool:
        return not self._live


def failure_of(cause: BaseException) -> ExecutorError:
    """A fresh error for one caller."""
    is_unusable = isinstance(cause, ExecutorError) and cause.process_unusable
    error = ExecutorError(f"the engine failed: {cause!r}", process_unusable=is_unusable)
    error.__cause__ = cause
    return error
