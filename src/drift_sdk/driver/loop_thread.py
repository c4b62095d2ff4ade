"""LoopThread: an event loop for callers that have none."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from drift_sdk.driver.loop_poster import LoopClosed, LoopPoster
from drift_sdk.driver.process_hooks import num_forks
from drift_sdk.errors import EngineClosed

__all__ = ["LoopThread", "check_no_loop"]

ResultT = TypeVar("ResultT")


class LoopThread:
    """An asyncio event loop in a daemon thread of its own.

    `start_blocking_portal` is not used: as a generator it waits for the loop when it is collected, which
    hangs in a forked child and at the interpreter's exit.
    """

    def __init__(self, name: str = "drift-sync") -> None:
        self._num_forks = num_forks()
        started: Future[tuple[BlockingPortal, LoopPoster]] = Future()
        self._thread = threading.Thread(target=run_loop, args=(started,), name=name, daemon=True)
        self._thread.start()
        self._portal, self._poster = started.result()

    @property
    def is_from_parent(self) -> bool:
        """Whether it was made by a process that this one is a fork of: its thread does not exist here."""
        return self._num_forks != num_forks()

    def call(self, function: Callable[..., Awaitable[ResultT]], *arguments: Any) -> ResultT:
        """Run a coroutine function on the loop and wait for its result; EngineClosed if the loop has been
        stopped. If the wait is interrupted by an exception, the coroutine is cancelled."""
        try:
            future = self._portal.start_task_soon(function, *arguments)
        except RuntimeError as error:
            raise EngineClosed("the engine was closed") from error

        try:
            return future.result()
        except BaseException:
            future.cancel()  # without effect if it has ended
            raise

    def spawn(self, function: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Run a coroutine function on the loop without waiting for it; EngineClosed if the loop has been
        stopped. The function must raise nothing."""
        try:
            self._portal.start_task_soon(function, *arguments)
        except RuntimeError as error:
            raise EngineClosed("the engine was closed") from error

    def post(self, function: Callable[[], None]) -> None:
        """Have the loop call a function soon, without waiting for that; never if it has ended."""
        if not self.is_from_parent:
            with suppress(LoopClosed):
                self._poster.post(function)

    def stop(self) -> None:
        """End the thread and wait for that."""
        with suppress(EngineClosed):  # it has been stopped
            self.call(self._portal.stop)
        self._thread.join()

    def abandon(self) -> None:
        """Have the thread ended, without waiting for that."""
        if not self.is_from_parent:
            threading.Thread(target=self.stop, name="drift-sync-stop", daemon=True).start()


def run_loop(started: Future[tuple[BlockingPortal, LoopPoster]]) -> None:
    """The function of a loop's thread."""

    async def main() -> None:
        async with BlockingPortal() as portal:
            started.set_result((portal, LoopPoster.current()))
            await portal.sleep_until_stopped()

    anyio.run(main)


def check_no_loop() -> None:
    """RuntimeError in a thread that runs an event loop, which a blocking call would stop."""
    try:
        LoopPoster.current()
    except RuntimeError:
        return

    raise RuntimeError("a SyncEngine would block the event loop that is running here: use Engine and await")
