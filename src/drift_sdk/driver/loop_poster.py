"""From the engine's thread into a caller's event loop, without ever waiting for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
from anyio.lowlevel import current_token

__all__ = ["Latch", "LoopClosed", "LoopPoster"]


class LoopClosed(Exception):
    """The caller's event loop has ended; nothing can be delivered to it any more."""


class LoopPoster:
    """Posts calls to one event loop (asyncio, uvloop or trio), `loop`."""

    __slots__ = ("_post", "loop")

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        is_asyncio = isinstance(loop, asyncio.AbstractEventLoop)
        self._post = loop.call_soon_threadsafe if is_asyncio else loop.run_sync_soon

    @classmethod
    def current(cls) -> LoopPoster:
        """The bridge to the running loop; RuntimeError outside one."""
        try:
            return cls(current_token().native_token)
        except (anyio.NoEventLoopError, RuntimeError):
            raise RuntimeError("call this from a coroutine: no event loop is running here") from None

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call `function(*args)` soon; `LoopClosed` if it never will."""
        try:
            self._post(function, *args)
        except RuntimeError as error:  # trio.RunFinishedError is one too
            raise LoopClosed from error


class Latch:
    """Set once by any thread, awaited by any number of tasks of any loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[tuple[LoopPoster, anyio.Event]] = []
        self._error: BaseException | None = None
        self.is_set = False

    def set(self, error: BaseException | None = None) -> None:
        with self._lock:
            self.is_set, self._error = True, error
            waiters, self._waiters = self._waiters, []

        for bridge, event in waiters:
            try:
                bridge.post(event.set)
            except LoopClosed:
                continue

    async def wait(self) -> BaseException | None:
        """Wait until set; what it was set with."""
        with self._lock:
            if self.is_set:
                return self._error

            event = anyio.Event()
            self._waiters.append((LoopPoster.current(), event))

        await event.wait()
        return self._error

    async def wait_shielded(self) -> BaseException | None:
        """Wait until set, through any cancellation; asyncio's own (task.cancel, wait_for, TaskGroup), which
        anyio's shield does not hold off, is raised afterwards."""
        cancelled: BaseException | None = None
        while True:
            try:
                with anyio.CancelScope(shield=True):
                    error = await self.wait()
                break
            except anyio.get_cancelled_exc_class() as exc:
                cancelled = exc

        if cancelled is not None:
            raise cancelled

        return error
