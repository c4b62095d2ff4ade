"""uvicorn with a shutdown that lets open answers end, and a limit for clients that send slowly."""

import asyncio
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from drift_sdk import Engine

HEAD_TIMEOUT_S = 20.0
"""Most seconds from the beginning of a connection, or the first byte of a further request, to the end of the
request's head."""


class DrainingServer(uvicorn.Server):
    """A server that lets open answers end when SIGTERM or SIGINT comes.

    It stops listening and closes the engine: new requests on open connections get a 503. Answers that take
    longer than `drain_s` seconds end with an error, streams with an event, others with a 503. Then uvicorn
    closes the connections, those of clients that do not read after its own `timeout_graceful_shutdown`. A
    second SIGINT ends everything at once.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        closing = asyncio.create_task(self._engine.aclose(drain=self._drain_s))
        while not (closing.done() or self.force_exit):
            await asyncio.wait([closing], timeout=0.1)  # a signal's handler sets force_exit
        await super().shutdown(sockets)
        if self.force_exit:
            await self._engine.aclose()
        await closing


class LimitedHeads(H11Protocol):
    """A connection that is closed if the head of a request takes longer than `HEAD_TIMEOUT_S`. uvicorn itself
    limits only the time between two requests."""

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timeout()

    def _limit_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
