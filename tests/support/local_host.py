"""An engine whose host runs in this process, on a loop of its own; all messages are pickled."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from drift_sdk import BaseEngine, DriftError, EngineConfig
from drift_sdk.driver.loops import LoopThread
from drift_sdk.remote.host import Channel, EngineHost, HostLost, HostUnavailable
from drift_sdk.remote.remote_engine import RemoteEngine

__all__ = ["LocalChannel", "LocalHostEngine"]


class LocalChannel:
    """Calls of a host on another loop.

    is_dead:         every call raises HostLost, also those in progress.
    faults:          called with a method's name for each call: None, or "before" or "after", for a call that
                     does not reach the host, or whose answer is lost.
    """

    def __init__(self, make_engine: Callable[[], BaseEngine]) -> None:
        self.loop = LoopThread("local-host")
        self.host = EngineHost(make_engine)
        self.is_dead = False
        self.faults: Callable[[str], str | None] = lambda method: None
        self.num_calls: dict[str, int] = {}
        self._calls: list[Future[Any]] = []
        self._died = asyncio.Event()

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.is_dead:
            raise HostLost("killed")

        self.num_calls[method] = self.num_calls.get(method, 0) + 1
        fault = self.faults(method)
        if fault == "before":
            raise HostUnavailable("not reached")

        sent = pickle.loads(pickle.dumps(arguments))
        host_loop = self.loop._poster.loop
        self._calls.append(asyncio.run_coroutine_threadsafe(getattr(self.host, method)(*sent), host_loop))
        answer = asyncio.wrap_future(self._calls[-1])
        died = asyncio.ensure_future(self._died.wait())
        await asyncio.wait([answer, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if self.is_dead:
            answer.cancel()
            raise HostLost("killed")

        try:
            result = answer.result()
        except DriftError as error:
            raise pickle.loads(pickle.dumps(error)) from None

        if fault == "after":
            raise HostUnavailable("no answer")

        return pickle.loads(pickle.dumps(result))

    async def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._died.set()
            for call in self._calls:
                call.cancel()
            self.loop.spawn(self.host._engine.aclose)
            self.loop.abandon()


class LocalHostEngine(RemoteEngine):
    """channels: of all starts, the newest last."""

    def __init__(self, make_engine: Callable[[], BaseEngine], config: EngineConfig | None = None) -> None:
        super().__init__("scripted", config if config is not None else make_engine().config)
        self._make_engine = make_engine
        self.channels: list[LocalChannel] = []

    async def _open_channel(self) -> Channel:
        self.channels.append(LocalChannel(self._make_engine))
        return self.channels[-1]

    def kill(self) -> None:
        """End the host as if its process had been killed; from any thread."""
        channel = self.channels[-1]

        async def kill() -> None:
            await channel.kill()

        assert self._link is not None
        self._link.loop.spawn(kill)
