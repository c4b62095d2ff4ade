"""Calls from other threads into a caller's event loop, which never wait for that loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio
from anyio.lowlevel import current_token

__all__ = ["Latch", "LoopClosed", "LoopPoster"]


class LoopClosed(Exception):
    """The caller's event loop has ended; nothing can be delivered to it any more."""


class LoopPoster:
    """Posts calls to one event loop, `loop`: an asyncio or uvloop loop, or a trio token."""

    __slots__ = ("_is_asyncio", "_post", "_post_here", "loop")

    def __init__(self, loop: Any) -> None:
        self.loop: Any = loop
        self._is_asyncio = isinstance(loop, asyncio.AbstractEventLoop)
        self._post = loop.call_soon_threadsafe if self._is_asyncio else loop.run_sync_soon
        self._post_here = loop.call_soon if self._is_asyncio else loop.run_sync_soon

    @classmethod
    def current(cls) -> LoopPoster:
        """A poster to the loop that runs in this thread; RuntimeError if there is none."""
        loop = running_loop()
        if loop is None:
            raise RuntimeError(
                "no event loop is running here: call this from a coroutine, or from a callback of a loop"
            )

        return cls(loop)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop. Cheap on asyncio: it is asked for every chunk."""
        if not self._is_asyncio:
            return running_loop() is self.loop

        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def event(self) -> asyncio.Event | anyio.Event:
        """An event for tasks of this loop. On asyncio it is asyncio's own, which takes less time to make and
        to wait for than anyio's: streams wait for every chunk."""
        return asyncio.Event() if self._is_asyncio else anyio.Event()

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call `function(*args)` soon; `LoopClosed` if the loop has ended. From any thread."""
        try:
            self._post(function, *args)
        except RuntimeError as error:  # trio.RunFinishedError is one too
            raise LoopClosed from error

    def post_here(self, function: Callable[..., object], *args: object) -> None:
        """The same on the loop's own thread, which need not be woken up."""
        self._post_here(function, *args)


def running_loop() -> Any:
    """The event loop that runs in this thread, of asyncio or uvloop, or a trio token; None without one."""
    try:
        return current_token().native_token
    except (anyio.NoEventLoopError, RuntimeError):
        pass  # anyio finds the loop of a task, not of a callback or a line in asyncio's REPL

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        trio: Any = sys.modules.get("trio")
        is_running = trio is not None and trio.lowlevel.in_trio_run()
        return trio.lowlevel.current_trio_token() if is_running else None


class Latch:
    """Set once by any thread, awaited by any number of tasks of any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[tuple[LoopPoster, anyio.Event]] = []
        self._error: BaseException | None = None
        self.is_set: bool = False

    def set(self, error: BaseException | None = None) -> None:
        """Set it, and resume the tasks that wait; `error` is what their `wait` returns."""
        with self._lock:
            self.is_set, self._error = True, error
            waiters, self._waiters = self._waiters, []

        for loop_poster, event in waiters:
            try:
                loop_poster.post(event.set)
            except LoopClosed:
                continue

    async def wait(self) -> BaseException | None:
        """Wait until it is set; the error it was set with, or None."""
        with self._lock:
            if self.is_set:
                return self._error

            event = anyio.Event()
            self._waiters.append((LoopPoster.current(), event))

        await event.wait()
        return self._error

    async def wait_shielded(self) -> BaseException | None:
        """Wait until it is set even if the task is cancelled; the cancellation is raised afterwards. That
        includes asyncio's native cancellation (task.cancel, wait_for, TaskGroup), which anyio's shields do
        not hold off."""
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
