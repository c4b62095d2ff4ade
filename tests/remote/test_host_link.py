"""Engines in child processes that are silent or stopped: every call can be cancelled or ends by itself."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from letters import letters, tokens_of
from loops import WAIT_S, run, until
from slow_cases import slow_after

from drift_sdk import ConfigError, EngineClosed, EnginePool, ProcessEngine
from drift_sdk.remote import connection, remote_engine
from drift_sdk.remote.remote_engine import PROGRAM, ProcessChannel
from drift_sdk.testing import ScriptedModel

SUPPORT = Path(__file__).parents[1] / "support"
HANGING = """
import os, pickle, signal, socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
end.recv(8)
def answer():
    data = pickle.dumps((0, None, pickle.dumps(None)))
    end.sendall(len(data).to_bytes(8, "big") + data)
{then}
while end.recv(65536): pass
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
HANGS = {
    "silent": "",
    "stopped": STOP,
    "silent when it has opened": "answer()",
    "stopped when it has opened": f"answer(); {STOP}",
}
every_hang = pytest.mark.parametrize("hang", HANGS)


def engine_of(**options: Any) -> ProcessEngine:
    model = ScriptedModel(letters, **options)
    return ProcessEngine("scripted", model.config, open_model=model)


def new_children(before: set[psutil.Process]) -> set[psutil.Process]:
    return set(psutil.Process().children()) - before


@pytest.fixture(autouse=True)
def earlier() -> Iterator[set[psutil.Process]]:
    """Children of other tests. Those of the test have ended when it ends; were they to hang, they are killed
    so that the test fails."""
    before = set(psutil.Process().children())
    has_ended, left = threading.Event(), set[psutil.Process]()

    def watch() -> None:
        while not has_ended.wait(WAIT_S):
            left.update(new_children(before))
            for child in left:
                child.kill()

    watching = threading.Thread(target=watch)
    watching.start()
    yield before
    has_ended.set()
    watching.join()
    left |= new_children(before)
    for child in left:
        child.kill()
    assert not left


def hang_at_start(patch: pytest.MonkeyPatch, hang: str) -> None:
    """Have all children that start hang in this way."""
    patch.setattr("drift_sdk.remote.remote_engine.PROGRAM", HANGING.format(then=HANGS[hang]))


async def hung(before: set[psutil.Process], hang: str) -> None:
    """Wait until a child has been started; one that stops has stopped."""
    await until(lambda: len(new_children(before)) == 1)
    if STOP in HANGS[hang]:
        stopped = psutil.STATUS_STOPPED
        await until(lambda: all(child.status() == stopped for child in new_children(before)))


async def check_serves(engine: ProcessEngine) -> None:
    async with engine:
        assert (await engine.generate("a", max_tokens=9, seed=1)).token_ids == tokens_of("a", 1, 9)


@pytest.mark.parametrize("loop", slow_after(1, ["asyncio", "trio", "uvloop"]))
def test_cancelled_start_ends_the_child_and_leaves_nothing(
    loop: str, earlier: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_of()
        await check_serves(engine)
        gc.collect()  # what earlier tests left open is closed here, or at any time from here on
        num_open = psutil.Process().num_fds()
        for hang in HANGS:
            with monkeypatch.context() as patch:
                hang_at_start(patch, hang)
                for _ in range(2):
                    with anyio.CancelScope() as scope:
                        async with anyio.create_task_group() as tasks:
                            tasks.start_soon(engine.start)
                            await hung(earlier, hang)
                            scope.cancel()
                    assert scope.cancelled_caught, hang
                    assert not new_children(earlier) and psutil.Process().num_fds() <= num_open, hang
                    assert not engine.is_open and engine.pid is None, hang
                    with pytest.raises(EngineClosed, match="start"):
                        engine.generate("a")
            await check_serves(engine)

    run(loop, main)


@pytest.mark.parametrize("hang", ["silent", "stopped when it has opened"])
async def test_native_cancellation_and_timeouts_of_asyncio_end_the_child(
    hang: str, earlier: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()

    async def enter() -> None:
        async with engine:
            raise AssertionError("not reached")

    with monkeypatch.context() as patch:
        hang_at_start(patch, hang)
        for start in (engine.start, enter):
            task = asyncio.create_task(start())
            await hung(earlier, hang)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not new_children(earlier)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(start(), 0.05)
            assert not new_children(earlier)
    await check_serves(engine)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("hang", ["silent", "stopped when it has opened"])
def test_start_that_one_of_two_tasks_cancels_goes_on_for_the_other(
    loop: str, hang: str, earlier: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        hang_at_start(monkeypatch, hang)
        engine = engine_of()
        scopes = [anyio.CancelScope(), anyio.CancelScope()]
        ended: list[int] = []

        async def start(index: int) -> None:
            with scopes[index]:
                await engine.start()
            ended.append(index)

        async with anyio.create_task_group() as tasks:
            for index in range(2):
                tasks.start_soon(start, index)
            await hung(earlier, hang)
            scopes[0].cancel()
            await until(lambda: ended == [0])
            assert len(new_children(earlier)) == 1
            scopes[1].cancel()
        assert ended == [0, 1] and not new_children(earlier)

    run(loop, main)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@every_hang
def test_close_ends_a_start_that_hangs(
    loop: str, hang: str, earlier: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        hang_at_start(monkeypatch, hang)
        engine = engine_of()

        async def start() -> None:
            with pytest.raises(EngineClosed, match="while it was starting"):
                await engine.start()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            await hung(earlier, hang)
            await engine.aclose()
            assert not new_children(earlier)

    run(loop, main)


class HangsAt:
    """Has the children of some starts hang, by number from 0."""

    def __init__(self, patch: pytest.MonkeyPatch, numbers: set[int], hang: str) -> None:
        self.number = 0
        start_child = remote_engine.start_child

        def start(end: Any) -> Any:
            hangs, self.number = self.number in numbers, self.number + 1
            program = HANGING.format(then=HANGS[hang]) if hangs else PROGRAM
            patch.setattr(remote_engine, "PROGRAM", program)
            return start_child(end)

        patch.setattr(remote_engine, "start_child", start)


@pytest.mark.parametrize("loop", slow_after(1, ["asyncio", "trio"]))
def test_pool_of_which_one_child_hangs_at_its_start(
    loop: str, earlier: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engines = [engine_of() for _ in range(3)]
        pool = EnginePool(engines)
        for case in itertools.product(["silent", "stopped when it has opened"], ["cancel", "close"]):
            await begin(pool, engines, *case)
        async with pool:
            assert all(engine.is_open for engine in engines)

    async def begin(pool: EnginePool, engines: list[ProcessEngine], hang: str, how: str) -> None:
        ended: list[str] = []

        async def start() -> None:
            try:
                async with pool:
                    raise AssertionError("not reached")
            except EngineClosed:
                ended.append("close")
            except anyio.get_cancelled_exc_class():
                ended.append("cancel")
                raise

        with monkeypatch.context() as patch:
            HangsAt(patch, {1}, hang)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(start)
                await until(lambda: sum(engine.is_open for engine in engines) == 2)
                if how == "cancel":
                    tasks.cancel_scope.cancel()
                else:
                    await pool.aclose()
                    assert not new_children(earlier)
        assert ended == [how] and not new_children(earlier)
        assert not any(engine.is_open for engine in engines)

    run(loop, main)


async def test_pool_whose_start_fails_does_not_wait_for_a_child_that_hangs(
    earlier: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_at_start(monkeypatch, "silent")
    engine = engine_of()
    unpicklable: Any = lambda report, limits=None: None  # noqa: E731
    failing = ProcessEngine("scripted", engine.config, open_model=unpicklable)
    with pytest.raises(ConfigError, match="open_model="):
        await EnginePool([engine, failing]).start()
    assert not engine.is_open and not new_children(earlier)


@pytest.mark.parametrize("loop", slow_after(1, ["trio", "asyncio"]))
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_restart_of_a_replica_whose_child_hangs(
    loop: str, how: str, earlier: set[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engines = [engine_of() for _ in range(2)]
        pool = EnginePool(engines)
        ended: list[str] = []

        async def restart(scope: anyio.CancelScope) -> None:
            with scope:
                try:
                    await pool.restart(1)
                except EngineClosed:
                    ended.append("close")
            if scope.cancelled_caught:
                ended.append("cancel")

        async with pool:
            with monkeypatch.context() as patch:
                hang_at_start(patch, "silent")
                async with anyio.create_task_group() as tasks:
                    pid, scope = engines[1].pid, anyio.CancelScope()
                    tasks.start_soon(restart, scope)
                    await until(lambda: len({child.pid for child in new_children(earlier)} - {pid}) == 2)
                    if how == "cancel":
                        scope.cancel()
                    else:
                        await pool.aclose()
                        assert not new_children(earlier)
            assert ended == [how]
            if how == "cancel":
                assert [each.state for each in pool.replicas()] == ["open", "closed"]
                await pool.restart(1)
                assert (await pool.generate("a", max_tokens=9, seed=1)).token_ids == tokens_of("a", 1, 9)

    run(loop, main)


async def test_pool_that_closes_between_the_halves_of_a_restart_has_no_replica_started_again() -> None:
    engines = [engine_of() for _ in range(2)]
    pool = EnginePool(engines)
    await pool.start()
    aclose, num_starts = engines[1].aclose, 0

    async def close_the_pool_too(drain: float = 0.0) -> None:
        engines[1].aclose = aclose  # type: ignore[method-assign]
        await pool.aclose()

    async def count() -> None:
        nonlocal num_starts
        num_starts += 1

    engines[1].aclose, engines[1].start = close_the_pool_too, count  # type: ignore[method-assign]
    with pytest.raises(EngineClosed, match="meanwhile"):
        await pool.restart(1)
    assert num_starts == 0


@pytest.mark.parametrize("loop", slow_after(1, ["trio", "asyncio"]))
def test_stopped_child_is_ended_when_it_does_not_close(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the task that closes it is cancelled, and if the engine is one of a pool."""
    monkeypatch.setattr(connection, "CLOSE_S", 0.05)

    async def main() -> None:
        engines = [engine_of(step_s=0.005) for _ in range(2)]
        pool = EnginePool(engines)
        for is_cancelled in (False, True):
            await pool.start()
            stream = engines[0].generate("a", max_tokens=None)
            await anext(stream)
            assert engines[0].pid is not None
            os.kill(engines[0].pid, signal.SIGSTOP)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pool.aclose)
                    await until(lambda: not engines[0].is_open)
                    if is_cancelled:
                        scope.cancel()
            assert not any(engine.is_open for engine in engines)
            with pytest.raises(EngineClosed):
                await stream

    run(loop, main)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_calls_of_a_stopped_child_are_cancelled_at_once(loop: str) -> None:
    async def main() -> None:
        async with engine_of() as engine:
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            for call in (engine.pause, partial(engine.count_tokens, "a"), engine.generate("a").completion):
                with anyio.move_on_after(0.05) as scope:
                    await call()
                assert scope.cancelled_caught
            os.kill(engine.pid, signal.SIGCONT)
            await check_goes_on(engine)

    run(loop, main)


async def check_goes_on(engine: ProcessEngine) -> None:
    """An engine serves, and is not paused."""
    with anyio.fail_after(WAIT_S):
        assert (await engine.generate("a", max_tokens=9, seed=1)).token_ids == tokens_of("a", 1, 9)


async def test_start_waits_for_requests_that_are_drained() -> None:
    engine = engine_of(step_s=0.002)
    await engine.start()
    pid = engine.pid
    stream = engine.generate("a", max_tokens=100, seed=1)
    await anext(stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.aclose, WAIT_S)
        await until(lambda: not engine.is_open)
        tasks.start_soon(engine.start)
        assert (await stream).token_ids == tokens_of("a", 1, 100)
    assert engine.is_open and engine.pid != pid
    await engine.aclose()


async def test_child_that_does_not_die_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process hangs in the system, in a driver, say."""
    monkeypatch.setattr("drift_sdk.remote.remote_engine.DIE_S", 0.05)
    engine = engine_of()
    await engine.start()
    assert engine._link is not None and isinstance(engine._link.channel, ProcessChannel)
    process = engine._link.channel._process
    with monkeypatch.context() as patch:
        patch.setattr(process, "poll", lambda: None)
        await engine.aclose()
    assert not engine.is_open and f"process {process.pid} does not end" in caplog.text
    assert process.wait(WAIT_S) == -signal.SIGKILL


def test_kill_does_not_need_the_end_of_the_socket(earlier: set[psutil.Process]) -> None:
    """A fork of the child may have its end of the socket and outlive it."""
    program = "import os, sys, time; os.fork() or time.sleep(WAIT); time.sleep(WAIT)"

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("drift_sdk.remote.remote_engine.PROGRAM", program.replace("WAIT", str(WAIT_S)))
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(engine_of().start)
                    await until(lambda: len(new_children(earlier)) == 1)
                    (child,) = new_children(earlier)
                    await until(lambda: len(child.children()) == 1)
                    (fork,) = child.children()
                    scope.cancel()
            assert not new_children(earlier) and fork.is_running()
            fork.kill()

    run("asyncio", main)


@pytest.mark.parametrize("loop", slow_after(1, ["asyncio", "trio"]))
@every_hang
def test_interrupted_program_ends_its_child(loop: str, hang: str) -> None:
    """Ctrl-C, while the program starts an engine."""
    program = HANGING.format(then=HANGS[hang])
    command = [sys.executable, str(SUPPORT / "interrupted_start.py"), loop, program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGINT)
        try:
            _, errors = parent.communicate(timeout=WAIT_S)
        finally:
            is_left = child.is_running()
            if is_left:
                child.kill()
    assert parent.returncode == 130 and not is_left, errors


@pytest.mark.parametrize("hang", ["stopped", "stopped when it has opened"])
def test_exit_ends_a_child_that_hangs_at_its_start(hang: str) -> None:
    command = [sys.executable, str(SUPPORT / "leaving_start.py"), HANGING.format(then=HANGS[hang])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=WAIT_S, check=False
    )
    pid = int(done.stdout)
    is_left = psutil.pid_exists(pid)
    if is_left:
        os.kill(pid, signal.SIGKILL)
    assert (done.returncode, done.stderr, is_left) == (3, "", False)
