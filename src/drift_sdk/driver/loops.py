"""Event loops of callers, called without waiting, and the process's state: exit, forks, garbage collection.

A daemon thread that returns from native code while the interpreter is being finalised is ended by
`pthread_exit`, which aborts the process if there are C++ or Rust frames on its stack. `atexit` hooks run
before finalisation, while daemon threads still run, so engines are closed there.

In a forked child none of the parent's threads exist, and any lock may be held by one of them. Objects of the
parent are therefore never used in the child: they remember `num_forks()` and compare.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import anyio
from anyio.lowlevel import current_token

from drift_sdk.errors import EngineClosed

EXIT_TIMEOUT_S = 20.0
"""Most seconds that all open engines together delay the exit."""
MAX_BUILTIN_FROZEN = 1000
"""Most objects that are frozen because the interpreter has frozen them: Python 3.12 starts with about 400. A
program that freezes its objects has many times as many."""
MIN_MOVED = 10_000
"""Fewest young objects that are moved when a pause ends. A collection looks at fewer within milliseconds."""


class Closable(Protocol):
    """An object that has a thread: `close` asks it to end and returns at once, `join` waits for its end."""

    def close(self, drain_s: float) -> None: ...

    def join(self, timeout_s: float | None = None) -> None: ...


class ProcessState:
    """State of this process alone; a forked child begins with a new object."""

    def __init__(self, num_forks: int) -> None:
        self.num_forks = num_forks
        # Reentrant: the garbage collector may run within a locked section, and an engine's finaliser in it.
        self.lock: threading.RLock = threading.RLock()
        self.open: WeakSet[Closable] = WeakSet()
        self.num_pauses = 0  # blocks of `without_collection`, of an enabled collector


_state = ProcessState(0)


def num_forks() -> int:
    """The number of forks between the process that imported this module and the current one."""
    return _state.num_forks


def life_cycle_lock() -> threading.RLock:
    """The lock of every engine's transitions between closed, starting, open and closing. No one waits while
    holding it."""
    return _state.lock


def close_at_exit(each: Closable) -> None:
    """Have an object closed before the interpreter exits, if it still exists then. It may have been closed
    before: closing twice must do no harm."""
    _state.open.add(each)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the collection of cyclic garbage, in all threads, for a block that makes many objects to keep,
    such as an import of torch: the collector would look at them again and again, a tenth of the time. Blocks
    of several threads may overlap. A collector that is disabled stays so.

    Objects that were made in the block, and those of other threads, count as old when the last block ends:
    the next collections of young objects would look at all of them, which takes a tenth of a second each.
    """
    state = _state
    with state.lock:
        is_pause = gc.isenabled() or state.num_pauses > 0
        state.num_pauses += is_pause
        gc.disable()
    try:
        yield
    finally:
        with state.lock:
            state.num_pauses -= is_pause
            if is_pause and not state.num_pauses:
                _count_as_old()
                gc.enable()


def _count_as_old() -> None:
    """Move all objects to the collector's oldest generation, without looking at them. Nothing is moved if few
    are young, or if the program has frozen objects, which would be thawed."""
    has_many_young = gc.get_count()[0] >= MIN_MOVED
    if has_many_young and gc.get_freeze_count() <= MAX_BUILTIN_FROZEN:  # counted one by one, so asked last
        gc.freeze()
        gc.unfreeze()


def close_all() -> None:
    """Close all open engines, and wait for their ends for `EXIT_TIMEOUT_S` seconds at most."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    open_ones = list(_state.open)
    for each in open_ones:
        each.close(0.0)
    for each in open_ones:
        each.join(max(0.0, deadline - time.monotonic()))


def begin_child() -> None:
    """Called in a forked child: no engine of the parent is open there."""
    global _state
    if _state.num_pauses:  # of threads that the child does not have
        gc.enable()
    _state = ProcessState(_state.num_forks + 1)


atexit.register(close_all)
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=begin_child)


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
