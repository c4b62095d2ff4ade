"""The client of a measured service: sends a load, records when each chunk arrives, computes the figures.

Standard library alone: peers' processes import this module.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from perf.harness.host import percentile
from perf.service.load import Case, Request

__all__ = ["SHARES", "Drive", "Record", "Service", "drive", "figures_of", "token_gaps"]

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Service(Protocol):
    """The part of a service that the client uses."""

    def stream(self, request: Request, is_sampled: bool) -> AsyncIterator[int]:
        """Generate exactly `request.num_tokens` tokens; yields the number of tokens of each chunk."""
        ...


@dataclass
class Record:
    """The course of one request. Times are in seconds since the start of the load.

    sent_at:   when the client sent it; in an open loop, when it was due.
    chunks:    arrival time and number of tokens of each chunk.
    ended_at:  None if the load was cut off before the request ended.
    error:     set if the request failed, or ended with another number of tokens than requested.
    """

    num_prompt_tokens: int
    num_tokens: int
    sent_at: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float | None = None
    error: str | None = None


@dataclass
class Drive:
    """One run of a load.

    records:  in the order of sending.
    window:   start and end of the time in which the load was steady.
    total_s:  when the last request ended or the load was cut off.
    """

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
    """Send all requests, for at most `limit_s` seconds; requests still running then are cancelled.

    The window of a closed loop opens when as many requests have ended as there are clients, and closes when a
    client first finds none left to send: all clients are busy in between. The window of an open loop reaches
    from the arrival of a fifth of the requests to that of the last. If a window never opens, it is the whole
    run.
    """
    load = _Load(service, case, requests, clock)
    try:
        async with asyncio.timeout(limit_s):
            await (load.run_closed_loop() if case.clients else load.run_open_loop())
    except TimeoutError:
        load.close_window()

    return load.result()


class _Load:
    """A load while it runs."""

    def __init__(
        self, service: Service, case: Case, requests: Sequence[Request], clock: Callable[[], float]
    ) -> None:
        self._service, self._case, self._requests, self._clock = service, case, requests, clock
        self._began_at = clock()
        self._records: list[Record] = []
        self._num_ended = 0
        self._window_begin: float | None = None
        self._window_end: float | None = None

    async def run_closed_loop(self) -> None:
        unsent = iter(self._requests)

        async def client() -> None:
            for request in unsent:
                await self._send(request, self._now())
                self._num_ended += 1
                if self._num_ended == self._case.clients:
                    self._window_begin = self._now()
            self.close_window()

        async with asyncio.TaskGroup() as clients:
            for _ in range(self._case.clients):
                clients.create_task(client())

    async def run_open_loop(self) -> None:
        async with asyncio.TaskGroup() as running:
            for index, request in enumerate(self._requests):
                await asyncio.sleep(request.due_s - self._now())
                running.create_task(self._send(request, request.due_s))
                if index == len(self._requests) // 5:
                    self._window_begin = request.due_s
            self.close_window()

    def close_window(self) -> None:
        """The load is not steady any more. Only the first call has an effect."""
        if self._window_end is None:
            self._window_end = self._now()

    def result(self) -> Drive:
        total_s = self._now()
        begin, end = self._window_begin, self._window_end
        if begin is None or end is None or begin >= end:
            return Drive(self._records, (0.0, total_s), total_s)

        return Drive(self._records, (begin, end), total_s)

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
        """Seconds since the start of the load."""
        return self._clock() - self._began_at


def figures_of(drive: Drive) -> dict[str, Any]:
    """Throughput, latencies and counts of a run.

    tokens_per_s, prompt_tokens_per_s:  in the window: tokens that arrived, and prompt tokens of the requests
                                        whose first token arrived.
    whole_tokens_per_s:                 of the whole run, from the first request to the last token.
    ttft_ms, e2e_s:                     of the requests sent in the window, whenever they ended.
    itl_ms:                             of the tokens that arrived in the window, see `token_gaps`.
    num_errors, num_unfinished:         requests that failed, and requests that were cut off.
    """
    records, (begin, end) = drive.records, drive.window
    sent = [record for record in records if begin <= record.sent_at <= end and record.error is None]
    ttfts_s = [record.chunks[0][0] - record.sent_at for record in sent if record.chunks]
    gaps_s = [gap for record in records for at, gap in token_gaps(record) if begin <= at <= end]
    ends_s = [record.ended_at - record.sent_at for record in sent if record.ended_at is not None]
    errors = [record.error for record in records if record.error is not None]
    return {
        "num_requests": len(records),
        "num_errors": len(errors),
        "first_error": errors[0] if errors else None,
        "num_unfinished": sum(record.ended_at is None for record in records),
        "num_window_requests": len(sent),
        "window_s": round(end - begin, 3),
        "total_s": round(drive.total_s, 3),
        "tokens_per_s": num_tokens(records, begin, end) / (end - begin),
        "whole_tokens_per_s": num_tokens(records, 0.0, drive.total_s) / drive.total_s,
        "prompt_tokens_per_s": num_prompt_tokens(records, begin, end) / (end - begin),
        "num_tokens": num_tokens(records, 0.0, drive.total_s),
        "num_prompt_tokens": num_prompt_tokens(records, 0.0, drive.total_s),
        "ttft_ms": percentiles(ttfts_s, 1e3),
        "itl_ms": percentiles(gaps_s, 1e3),
        "e2e_s": percentiles(ends_s),
    }


def token_gaps(record: Record) -> Iterator[tuple[float, float]]:
    """Arrival time and inter-token latency of each token after the first chunk.

    A chunk of n tokens that arrives t seconds after the previous one counts as n tokens at t/n each.
    """
    for (before, _), (at, number) in pairwise(record.chunks):
        for _ in range(number):
            yield at, (at - before) / number


def num_tokens(records: Sequence[Record], begin: float, end: float) -> int:
    """Tokens that arrived from `begin` to `end`."""
    return sum(number for record in records for at, number in record.chunks if begin <= at <= end)


def num_prompt_tokens(records: Sequence[Record], begin: float, end: float) -> int:
    """Prompt tokens of the requests whose first token arrived from `begin` to `end`."""
    return sum(
        record.num_prompt_tokens
        for record in records
        if record.chunks and begin <= record.chunks[0][0] <= end
    )


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """The percentiles of SHARES, times `scale`; 0 if there are no values."""
    return {name: round(percentile(list(values), share) * scale, 4) for name, share in SHARES.items()}
