"""An event loop in a thread of its own: calls that are interrupted, and calls at its end."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from interrupts import one_interrupt
from loops import WAIT_S, run

from drift_sdk import EngineClosed
from drift_sdk.driver import loops
from drift_sdk.driver.loops import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("looping")
    yield thread
    thread.stop()


async def nothing() -> None: ...


def main_thread_waits() -> bool:
    """True while the main thread waits for a call."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code is not Future.result.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_call_interrupted_before_it_has_begun_is_cancelled(thread: LoopThread) -> None:
    ended: list[int] = []
    may_go_on = threading.Event()

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(1)

    def interrupt_where_it_waits(interrupt: Callable[[], None]) -> None:
        while not main_thread_waits():
            time.sleep(0.001)
        interrupt()

    thread.post(lambda: [may_go_on.wait(WAIT_S)])
    with one_interrupt() as interrupt:
        interrupter = threading.Thread(target=interrupt_where_it_waits, args=(interrupt,))
        with pytest.raises(KeyboardInterrupt):
            interrupter.start()
            thread.call(wait)
        interrupter.join()
    may_go_on.set()
    thread.stop()
    assert ended == [1]


def test_spawned_call_is_not_waited_for_and_its_error_is_logged(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()

    async def fail() -> None:
        await asyncio.to_thread(may_end.wait, WAIT_S)
        raise ValueError("wrong")

    thread.spawn(fail)
    assert not caplog.records
    may_end.set()
    thread.stop()
    (record,) = caplog.records
    assert record.exc_info is not None and str(record.exc_info[1]) == "wrong"


def test_stop_waits_for_calls_and_rejects_later_ones(thread: LoopThread) -> None:
    is_rejected = threading.Event()

    async def last() -> int:
        thread.abandon()
        await asyncio.sleep(0)  # it is stopped now
        with pytest.raises(EngineClosed):
            await asyncio.to_thread(thread.call, nothing)
        is_rejected.set()
        return 5

    assert thread.call(last) == 5
    thread.stop()
    assert is_rejected.is_set()
    for use in (thread.call, thread.spawn):
        with pytest.raises(EngineClosed):
            use(nothing)
    thread.post(is_rejected.clear)
    assert is_rejected.is_set()


def test_call_that_the_loop_does_not_come_to_is_rejected(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was posted when the loop was about to end."""
    post = thread._poster.post
    lost: list[Any] = []

    class Lossy:
        def post(self, function: Any, *arguments: Any) -> None:
            if arguments:
                lost.append(function)
            else:
                post(function)

    monkeypatch.setattr(thread, "_poster", Lossy())
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(thread.call, nothing)
        while not lost:
            time.sleep(0.001)
        thread.stop()
        with pytest.raises(EngineClosed):
            call.result(WAIT_S)


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3)])
def test_error_of_a_call_is_raised_and_the_loop_goes_on(thread: LoopThread, error: BaseException) -> None:
    async def fail() -> None:
        raise error

    async def cancel() -> None:
        raise asyncio.CancelledError

    with pytest.raises(type(error)) as caught:
        thread.call(fail)
    assert caught.value is error
    with pytest.raises(CancelledError):
        thread.call(cancel)
    thread.call(nothing)
    assert not thread._calls


def test_failure_of_the_loop_itself_ends_its_calls(caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread("failing")
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(thread.call, anyio.sleep_forever) for _ in range(2)]
        while len(thread._tasks) < 2:
            time.sleep(0.001)
        failure = SystemExit(3)
        thread.post(lambda: raising(failure))
        for call in calls:
            with pytest.raises(EngineClosed):
                call.result(WAIT_S)
    thread._thread.join(WAIT_S)
    assert thread.has_failed
    with pytest.raises(EngineClosed) as caught:
        thread.call(nothing)
    assert caught.value.__cause__ is failure
    (record,) = [record for record in caplog.records if record.name == "drift_sdk"]
    assert record.getMessage() == "an event loop of the engine failed"
    thread.stop()


def raising(error: BaseException) -> None:
    raise error


def test_calls_from_trio_run_on_asyncio(thread: LoopThread) -> None:
    async def sleep() -> bool:
        await anyio.lowlevel.checkpoint()
        return asyncio.get_running_loop().is_running()

    async def main() -> None:
        assert await anyio.to_thread.run_sync(thread.call, sleep)

    run("trio", main)


def test_failing_start_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(main: Any) -> None:
        main.close()
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio, "run", fail)
    with pytest.raises(OSError, match="too many open files"):
        LoopThread()


def test_loop_whose_start_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Future[Any]):
        num_waits = 0

        def result(self, timeout: float | None = None) -> Any:
            self.num_waits += 1
            if self.num_waits == 1:
                raise KeyboardInterrupt

            return super().result(timeout)

    monkeypatch.setattr(loops, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        LoopThread("interrupted")
    for thread in threading.enumerate():
        if thread.name == "interrupted":
            thread.join(WAIT_S)
            assert not thread.is_alive()
