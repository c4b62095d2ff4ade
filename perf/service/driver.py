"""Drives a load through a service and notes when each chunk came. Standard library alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from perf.service.load import Case, Request

__all__ = ["Drive", "Record", "Service", "drive"]


class Service(Protocol):
    """An engine behind its asynchronous face."""

    def stream(self, request: Request, is_sampled: bool) -> AsyncIterator[int]:
        """Generates exactly `request.num_tokens` tokens; yields the number of tokens of each chunk."""
        ...


@dataclass
class Record:
    """What became of a request. Times in seconds since the load began.

    sent_at:   when the client sent it; in an open loop, when it was due.
    chunks:    arrival and number of tokens of each.
    ended_at:  None if the load was cut off before.
    error:     of a request that failed, or ended with another number of tokens than asked for.
    """

    num_prompt_tokens: int
    num_tokens: int
    sent_at: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float | None = None
    error: str | None = None


@dataclass
class Drive:
    """A load that was driven: records in the order of sending, the window in which it was steady (from, to),
    and when the last request ended or the load was cut off."""

    records: list[Record]
    window: tuple[float, float]
    total_s: float


async def drive(
    service: Service,
    case: Case,
    requests: Sequence[Request],
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Drive:
    """Send all requests, for `limit_s` seconds at most: what still runs then is cancelled.

    The window of a closed loop opens when as many requests have ended as there are clients, and closes when a
    client first finds none left to send: all clients are busy in between. That of an open loop reaches from
    the arrival of a fifth of the requests to that of the last. A window that never opened is the whole run.
    """
    load = _Load(service, case, requests, clock)
    try:
        async with asyncio.timeout(limit_s):
            await (load.closed_loop() if case.clients else load.open_loop())
    except TimeoutError:
        load.fade()

    return load.driven()


class _Load:
    def __init__(
        self, service: Service, case: Case, requests: Sequence[Request], clock: Callable[[], float]
    ) -> None:
        self._service, self._case, self._requests, self._clock = service, case, requests, clock
        self._began_at = clock()
        self._records: list[Record] = []
        self._num_ended = 0
        self._steady_at: float | None = None
        self._faded_at: float | None = None

    async def closed_loop(self) -> None:
        unsent = iter(self._requests)

        async def client() -> None:
            for request in unsent:
                await self._send(request, self._now())
                self._num_ended += 1
                if self._num_ended == self._case.clients:
                    self._steady_at = self._now()
            self.fade()

        async with asyncio.TaskGroup() as clients:
            for _ in range(self._case.clients):
                clients.create_task(client())

    async def open_loop(self) -> None:
        async with asyncio.TaskGroup() as running:
            for index, request in enumerate(self._requests):
                await asyncio.sleep(request.due_s - self._now())
                running.create_task(self._send(request, request.due_s))
                if index == len(self._requests) // 5:
                    self._steady_at = request.due_s
            self.fade()

    def fade(self) -> None:
        """The load is not what it was from now on."""
        if self._faded_at is None:
            self._faded_at = self._now()

    def driven(self) -> Drive:
        total_s = self._now()
        if self._steady_at is None or self._faded_at is None or self._steady_at >= self._faded_at:
            return Drive(self._records, (0.0, total_s), total_s)

        return Drive(self._records, (self._steady_at, self._faded_at), total_s)

    async def _send(self, request: Request, sent_at: float) -> None:
        record = Record(len(request.prompt), request.num_tokens, sent_at)
        self._records.append(record)
        try:
            async for num_tokens in self._service.stream(request, self._case.is_sampled):
                record.chunks.append((self._now(), num_tokens))
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"

        record.ended_at = self._now()
        num_tokens = sum(number for _, number in record.chunks)
        if record.error is None and num_tokens != request.num_tokens:
            record.error = f"{num_tokens} tokens: expected {request.num_tokens}"

    def _now(self) -> float:
        return self._clock() - self._began_at
