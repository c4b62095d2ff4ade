"""Admission control and the registry of live requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from drift_sdk.driver.event_sender import NO_EVENTS, EventSender
from drift_sdk.driver.loop_poster import LoopPoster
from drift_sdk.driver.request import Request
from drift_sdk.errors import EngineClosed, ExecutorError, QueueFull, RequestError, error_repr

__all__ = ["RequestRegistry", "failure_of"]


class RequestRegistry:
    """Live requests, from the call that submits them to their end. Used from any thread.

    A request is live once `admit` has returned. Every live request has a slot or waits for one, so that the
    queue is full if there are more than slots and `max_queued_requests`. A request that is being cancelled
    does not count: it leaves its place when the engine's thread has ended the step that runs.

    max_queued_requests: most requests that wait for a slot; None = unbounded.
    """

    def __init__(self, max_queued_requests: int | None, events: EventSender = NO_EVENTS) -> None:
        self._events = events
        self._max_queued_requests = max_queued_requests
        # Reentrant: the garbage collector may run within a locked section, and an engine's finaliser in it.
        self._lock = threading.RLock()
        self._live: dict[Request, None] = {}
        self._by_id: dict[str, list[Request]] = {}  # live requests by request_id and by group_id
        self._leaving: set[Request] = set()  # live ones that are being cancelled
        self._num_slots = 0
        self.num_admitted: int = 0
        self.num_rejected: int = 0
        self.is_open: bool = False
        self._is_closed = False
        self._failure: BaseException | None = None

    def open(self, num_slots: int) -> None:
        """Admit requests from now on, unless `close` has been called before. num_slots: most that run."""
        with self._lock:
            self._num_slots = num_slots
            self.is_open = not self._is_closed

    def close(self, failure: BaseException | None = None) -> None:
        """Reject new requests, with an ExecutorError that names `failure` if there is one, else
        EngineClosed."""
        with self._lock:
            self.is_open, self._is_closed = False, True
            self._failure = failure or self._failure

    def admit(self, requests: Sequence[Request]) -> None:
        """Make all of these requests live, or none: EngineClosed or ExecutorError if the registry is not
        open, RequestError if a live request has one of their ids or there are more than an idle engine
        takes, QueueFull."""
        ids = {name for request in requests for name in names_of(request)}
        with self._lock:
            if not self.is_open:
                raise self.rejection()

            taken = next((name for name in ids if name in self._by_id), None)
            if taken is not None:
                raise RequestError.of("request_id", taken, "an id that no live request has")

            most = self._most_at_once
            if most is not None and len(requests) > most:
                allowed = f"1 to {most}, all that may run and wait (max_num_seqs, max_queued_requests)"
                raise RequestError.of("n", len(requests), allowed)

            if not self.has_room(len(requests)):
                self.num_rejected += len(requests)
                error = self._queue_full(len(requests))
                for request in requests:
                    self._events.rejected(request.request_id, error)
                raise error

            self.num_admitted += len(requests)
            for request in requests:
                self._live[request] = None
                self._events.queued(request.request_id)
                for name in names_of(request):
                    self._by_id.setdefault(name, []).append(request)

    def rejection(self) -> EngineClosed | ExecutorError:
        """The error for a request that is submitted while the registry is not open."""
        if self._failure is not None:
            return failure_of(self._failure)

        return EngineClosed("the engine was closed" if self._is_closed else "the engine is still starting")

    def has_room(self, num_requests: int = 1) -> bool:
        """Whether so many more requests would be admitted, as far as the queue is concerned."""
        limit = self._max_queued_requests
        return limit is None or self._num_queued + num_requests <= limit

    def withdraw(self, requests: Sequence[Request]) -> None:
        """Undo `admit`."""
        with self._lock:
            self.num_admitted -= len(requests)
            for request in requests:
                self.remove(request)

    def leave(self, request: Request) -> None:
        """Called when a request is being cancelled."""
        with self._lock:
            if request in self._live:
                self._leaving.add(request)

    def remove(self, request: Request) -> None:
        """Called when a request has ended."""
        with self._lock:
            if request not in self._live:
                return

            del self._live[request]
            self._leaving.discard(request)
            for name in names_of(request):
                self._by_id[name].remove(request)
                if not self._by_id[name]:
                    del self._by_id[name]

    def find(self, request_id: str) -> list[Request]:
        """Live requests of this id: one, or all samples of a group; empty if there is none."""
        with self._lock:
            return list(self._by_id.get(request_id, ()))

    def live_requests(self, loop_poster: LoopPoster | None = None) -> list[Request]:
        """Live requests of one event loop, or of all (None)."""
        with self._lock:
            if loop_poster is None:
                return list(self._live)

            loop = loop_poster.loop
            return [request for request in self._live if request.stream_updates.loop_poster.loop is loop]

    @property
    def is_empty(self) -> bool:
        return not self._live

    @property
    def _num_queued(self) -> int:
        """Requests that wait for a slot: negative while more slots are free than requests are coming."""
        return len(self._live) - len(self._leaving) - self._num_slots

    @property
    def _most_at_once(self) -> int | None:
        """Most requests that are admitted while there are no others; None: any number."""
        limit = self._max_queued_requests
        return None if limit is None else self._num_slots + limit

    def _queue_full(self, num_requests: int) -> QueueFull:
        limit, num_queued = self._max_queued_requests, self._num_queued
        if num_requests > 1:
            room = max(limit - num_queued, 0) if limit is not None else 0
            return QueueFull(
                f"max_queued_requests={limit}: there is room for {room} of {num_requests} requests; "
                "try again later"
            )

        waiting = "1 request is" if num_queued == 1 else f"{max(num_queued, 0)} requests are"
        return QueueFull(
            f"max_queued_requests={limit}: no slot is free and {waiting} waiting for one already; try again "
            "later"
        )


def names_of(request: Request) -> tuple[str, ...]:
    """The ids that a request can be found by."""
    return (request.request_id,) if request.group_id is None else (request.request_id, request.group_id)


def failure_of(cause: BaseException) -> ExecutorError:
    """A new error, for one caller, that says the engine failed because of `cause`."""
    is_unusable = isinstance(cause, ExecutorError) and cause.process_unusable
    error = ExecutorError(f"the engine failed: {error_repr(cause)}", process_unusable=is_unusable)
    error.__cause__ = cause
    return error
