"""uvicorn with a shutdown that lets open answers end, and a limit for clients that send slowly."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from drift_sdk import BaseEngine, ConfigError, DriftError

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as cause:
    raise DriftError('serving needs the package uvicorn: pip install "drift-engine[openai]"') from cause

__all__ = ["DrainingServer", "LimitedHeads", "serve"]

HEAD_TIMEOUT_S = 20.0
"""Most seconds from the beginning of a connection, or the first byte of a further request, to the end of the
request's head."""
CLOSE_TIMEOUT_S = 5
"""Seconds that a client has to read the rest of its answer after the engines have been closed."""


async def serve(
    application: Callable[..., Any],
    engines: Iterable[BaseEngine],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_s: float = 20.0,
    sockets: Sequence[socket.socket] | None = None,
) -> None:
    """Serve an ASGI application by uvicorn until SIGTERM or SIGINT, or until it is cancelled; returns after
    SIGTERM, and raises KeyboardInterrupt after SIGINT. Runs on asyncio, in the main thread.

    engines: those that the application uses, which are closed at the end: new requests get a 503, and open
             answers have time to end.
    drain_s: seconds of that time. Then streams end with an error event, and other answers with a 503.
    sockets: that are listened on; None = one of host and port.

    A second SIGINT or cancellation ends everything at once. Raises ConfigError for a port that cannot be
    listened on."""
    if sockets is None:
        check_port(host, port)
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        http=LimitedHeads,
        ws="none",
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    server = DrainingServer(config, engines, drain_s)

    def stop(number: int, frame: object) -> None:
        server.should_exit = True

    # uvicorn raises the signals again that it has got, by the handlers that it found.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        await _until_cancelled(server, None if sockets is None else list(sockets))
    finally:
        signal.signal(signal.SIGTERM, before)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError for a port that cannot be listened on: uvicorn would end the process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError.of("port", port, f"a free port of {host}: {error.strerror}") from error


async def _until_cancelled(server: DrainingServer, sockets: list[socket.socket] | None) -> None:
    """Run a server, which shuts down as at a signal when this task is cancelled."""
    serving = asyncio.ensure_future(server.serve(sockets))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        while not serving.done():
            try:
                await asyncio.wait([serving])
            except asyncio.CancelledError:
                server.force_exit = True
        if (error := None if serving.cancelled() else serving.exception()) is not None:
            raise error from None
        raise


class DrainingServer(uvicorn.Server):
    """A server that lets open answers end when SIGTERM or SIGINT comes.

    It stops listening and closes the engines: new requests on open connections get a 503. Then uvicorn closes
    the connections; clients that do not read have until its own `timeout_graceful_shutdown`.
    """

    def __init__(self, config: uvicorn.Config, engines: Iterable[BaseEngine], drain_s: float) -> None:
        super().__init__(config)
        self._engines = list(engines)
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        closing = asyncio.gather(*(engine.aclose(drain=self._drain_s) for engine in self._engines))
        while not (closing.done() or self.force_exit):
            await asyncio.wait([closing], timeout=0.1)  # a signal's handler sets force_exit
        await super().shutdown(sockets)
        if self.force_exit:
            await asyncio.gather(*(engine.aclose() for engine in self._engines))
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
