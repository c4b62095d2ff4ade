"""Event loops of callers: calls into them, which never wait, and a loop for callers that have none."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import current_token

from drift_sdk.driver.process_hooks import num_forks
from drift_sdk.errors import EngineClosed


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


ResultT = TypeVar("ResultT")

log: logging.Logger = logging.getLogger("drift_sdk")


class LoopThread:
    """An asyncio event loop in a daemon thread of its own.

    anyio's BlockingPortal is not used. Its thread is waited for when it is collected, which hangs in a forked
    child and at the interpreter's exit; it waits until the loop has begun a call, where an exception such as
    KeyboardInterrupt leaves the call without a way to cancel it; and a call that the loop does not come to
    before it ends is waited for without end.
    """

    def __init__(self, name: str = "drift-sync") -> None:
        self._num_forks = num_forks()
        self._lock = threading.Lock()
        self._is_over = False
        self._failure: BaseException | None = None
        self._calls: set[Future[Any]] = set()  # those that have not ended
        self._tasks: set[asyncio.Task[None]] = set()  # of calls; used on the loop only
        self._stopped = asyncio.Event()  # used on the loop only
        started: Future[LoopPoster] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        try:
            self._thread.start()
            self._poster = started.result()
        except BaseException:  # interrupted: nobody can stop the loop later
            started.add_done_callback(self._stop_started)
            raise

    @property
    def is_from_parent(self) -> bool:
        """Whether it was made by a process that this one is a fork of: its thread does not exist here."""
        return self._num_forks != num_forks()

    @property
    def has_failed(self) -> bool:
        """Whether the loop has ended by an exception: its calls have ended with EngineClosed."""
        return self._failure is not None

    def call(self, function: Callable[..., Awaitable[ResultT]], *arguments: Any) -> ResultT:
        """Run a coroutine function on the loop and wait for its result; EngineClosed if the loop has been
        stopped, or if the interpreter exits, which ends daemon threads. If the wait is interrupted by an
        exception, the coroutine is cancelled."""
        if sys.is_finalizing():
            raise closed()

        future: Future[ResultT] = Future()
        try:
            self._post_call(future, function, arguments)
            return future.result()
        except BaseException:
            future.cancel()  # without effect if it has ended
            raise

    def spawn(self, function: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Run a coroutine function on the loop without waiting for it; EngineClosed if the loop has been
        stopped. What it raises is logged."""
        future: Future[Any] = Future()
        future.add_done_callback(log_failure)
        self._post_call(future, function, arguments)

    def post(self, function: Callable[[], None]) -> None:
        """Have the loop call a function soon, without waiting for that; never if it has ended."""
        if not self.is_from_parent:
            with suppress(LoopClosed):
                self._poster.post(function)

    def stop(self) -> None:
        """End the thread when its calls have ended, and wait for that. Later calls raise EngineClosed."""
        self._end_soon()
        self._thread.join()

    def abandon(self) -> None:
        """Have the thread ended when its calls have ended, without waiting for that."""
        if not self.is_from_parent:
            self._end_soon()

    def _stop_started(self, started: Future[LoopPoster]) -> None:
        """End the thread of a loop that has started, if it has."""
        if started.exception() is None:
            with suppress(LoopClosed):
                started.result().post(self._stopped.set)

    def _run(self, started: Future[LoopPoster]) -> None:
        """The thread's function."""

        async def main() -> None:
            self._context = copy_context()
            started.set_result(LoopPoster.current())
            await self._stopped.wait()
            while self._tasks:
                await asyncio.wait(self._tasks)

        try:
            asyncio.run(main())
        except BaseException as error:
            self._failure = error
        finally:
            with self._lock:
                self._is_over = True
                calls, self._calls = self._calls, set()
            for future in calls:  # posted when the loop was ending
                end_call(future, self._closed())
        if self._failure is not None:
            if started.done():
                log.error("an event loop of the engine failed", exc_info=self._failure)
            else:
                started.set_exception(self._failure)

    def _post_call(
        self, future: Future[Any], function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]
    ) -> None:
        with self._lock:
            if self._is_over:
                raise self._closed()

            self._calls.add(future)
        with suppress(LoopClosed):  # the thread is ending, and ends the call
            self._poster.post(self._begin, future, function, arguments)

    def _begin(
        self, future: Future[Any], function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]
    ) -> None:
        """Begin a call, in a task; called on the loop."""
        if self._stopped.is_set():
            self._end(future, self._closed())
            return

        # Not in the caller's context, which may name another kind of event loop as the one that is running.
        context = self._context.copy()
        call = self._carry_out(future, function, arguments)
        task = asyncio.get_running_loop().create_task(call, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(
        self, future: Future[Any], function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]
    ) -> None:
        result: Any = None
        try:
            with anyio.CancelScope() as scope:
                # Called at once if the call has been cancelled before. It is begun even so: a cancelled wait
                # for a stream ends the request.
                future.add_done_callback(lambda done: self.post(scope.cancel) if done.cancelled() else None)
                result = await function(*arguments)
        except anyio.get_cancelled_exc_class():
            task = asyncio.current_task()
            if task is not None and task.cancelling() and not future.cancelled():  # by a loop that has failed
                self._end(future, self._closed())
            else:
                future.cancel()
                self._end(future, None)
            raise
        except BaseException as error:
            self._end(future, error)
        else:
            self._end(future, None, result)

    def _end(self, future: Future[Any], error: BaseException | None, result: Any = None) -> None:
        with self._lock:
            self._calls.discard(future)
        end_call(future, error, result)

    def _closed(self) -> EngineClosed:
        """The error of a call that the loop does not end."""
        error = closed()
        error.__cause__ = self._failure
        return error

    def _end_soon(self) -> None:
        self.post(self._stopped.set)


def closed() -> EngineClosed:
    return EngineClosed("the engine was closed")


def end_call(future: Future[Any], error: BaseException | None, result: Any = None) -> None:
    """Tell how a call ended, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return

    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def log_failure(future: Future[Any]) -> None:
    """Log the error of a call whose result nobody reads."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("a call on an event loop of the engine failed", exc_info=error)


def check_no_loop() -> None:
    """RuntimeError in a thread that runs an event loop, which a blocking call would stop."""
    try:
        LoopPoster.current()
    except RuntimeError:
        return

    raise RuntimeError("a SyncEngine would block the event loop that is running here: use Engine and await")
