"""Starting and closing an engine: from any task, any number of times, leaving the host process unchanged."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random

import anyio
import anyio.lowlevel
import pytest
from loops import LOOPS, WAIT_S, on_every_loop, run, until

from drift_sdk import (
    ConfigError,
    Engine,
    EngineClosed,
    EngineConfig,
    ExecutorError,
    ModelLoadError,
    Progress,
    RequestError,
    SamplingParams,
    SyncEngine,
)
from drift_sdk.driver.driver import Delivery
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.events import Report
from drift_sdk.steps import ExecutorLimits
from drift_sdk.testing import EOS_TOKEN_ID, ScriptedModel, scripted_engine

# What `import drift_sdk` may load, beside the standard library.
LIGHT_PACKAGES = {"anyio", "drift_sdk", "exceptiongroup", "idna", "msgspec", "sniffio", "typing_extensions"}


@pytest.fixture(autouse=True)
def earlier_threads() -> Iterator[None]:
    """Threads of earlier tests may end during a test."""
    earlier.update(threading.enumerate())
    yield
    earlier.clear()


earlier: set[threading.Thread] = set()


def engine_threads() -> list[str]:
    """The names of the threads that the test's engines have."""
    threads = set(threading.enumerate()) - earlier
    return [thread.name for thread in threads if thread.name.startswith("drift")]


def refuse_engine_threads(patch: pytest.MonkeyPatch) -> None:
    """As in a process that may have no more threads."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "drift-engine":
            raise RuntimeError("can't start new thread")

        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


@on_every_loop
def test_start_without_a_thread_fails_and_can_be_repeated(loop: str) -> None:
    async def main() -> None:
        engine = Engine("scripted", on_event=lambda event: None, open_model=ScriptedModel("ok"))
        with pytest.MonkeyPatch.context() as patch:
            refuse_engine_threads(patch)
            with pytest.raises(ModelLoadError, match="engine cannot be started: can't start new thread"):
                await engine.start()
        assert not engine.is_open and engine_threads() == []
        await engine.aclose()
        async with engine:
            assert (await engine.generate("x")).text == "ok"

    run(loop, main)
    assert engine_threads() == []


def test_blocking_start_without_a_thread_fails_and_can_be_repeated() -> None:
    engine = SyncEngine("scripted", open_model=ScriptedModel("ok"))
    with pytest.MonkeyPatch.context() as patch:
        refuse_engine_threads(patch)
        with pytest.raises(ModelLoadError, match="engine cannot be started: can't start new thread"):
            engine.start()
    assert engine_threads() == []
    with engine:
        assert engine.generate("x").result().text == "ok"
    assert engine_threads() == []


@on_every_loop
def test_start_and_close_are_idempotent_and_shared_by_tasks(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine("ok")
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(engine.start)
        await engine.start()
        assert len(engine.executors) == 1
        assert (await engine.generate("x")).text == "ok"
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(engine.aclose)
        await engine.aclose()
        assert engine.executors[0].is_closed
        assert engine_threads() == []
        for use in (lambda: engine.generate("x"), engine.stats, lambda: engine.tokenizer):
            with pytest.raises(EngineClosed):
                use()
        async with engine:
            assert (await engine.generate("x")).text == "ok"
        assert len(engine.executors) == 2
        assert engine_threads() == []

    run(loop, main)


@on_every_loop
def test_engine_can_be_started_and_closed_by_different_tasks(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine("ok")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.start)
        assert (await engine.generate("x")).text == "ok"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.aclose)
        assert engine_threads() == []

    run(loop, main)


@on_every_loop
def test_closing_while_starting_waits_and_closes(loop: str) -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = gated_engine(gate)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rejected_start, engine)
            await until(lambda: engine_threads() != [])
            with pytest.raises(EngineClosed):
                engine.generate("x")
            tasks.start_soon(engine.aclose)
            await anyio.sleep(0.01)
            assert engine_threads() != []
            gate.set()
        assert engine_threads() == []

    run(loop, main)


@on_every_loop
def test_cancelling_the_start_leaves_no_thread(loop: str) -> None:
    async def main() -> None:
        gate = threading.Event()

        async def enter() -> None:
            async with gated_engine(gate):
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(enter)
            await until(lambda: engine_threads() != [])
            tasks.cancel_scope.cancel()
            gate.set()
        assert engine_threads() == []

    run(loop, main)


@on_every_loop
def test_start_while_closing_waits_and_opens_again(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine("ok", step_s=0.001)
        await engine.start()
        running = engine.generate("x", SamplingParams(max_tokens=None, ignore_eos=True))
        await anext(running)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.aclose, 60.0)
            await until(lambda: not engine.is_open)
            with anyio.move_on_after(0.05) as scope:
                await engine.start()
            assert scope.cancelled_caught  # waiting for the end of closing can be cancelled
            tasks.start_soon(engine.start)
            await anyio.sleep(0.02)
            assert len(engine.executors) == 1
            running.cancel()
        assert engine.is_open
        assert (await engine.generate("x")).text == "ok"
        assert len(engine.executors) == 2
        await engine.aclose()
        assert engine_threads() == []

    run(loop, main)


@on_every_loop
@pytest.mark.parametrize("survivor", [0, 1, None])
def test_cancelled_start_closes_the_engine_only_if_no_other_task_starts_it(
    loop: str, survivor: int | None
) -> None:
    async def main() -> None:
        opening = threading.Event()
        engine = gated_engine(opening)
        scopes = [anyio.CancelScope() for _ in range(3)]
        started: list[int] = []

        async def start(index: int) -> None:
            with scopes[index]:
                await engine.start()
                started.append(index)

        async with anyio.create_task_group() as tasks:
            for index in range(3):
                tasks.start_soon(start, index)
            await until(lambda: engine._driver is not None and engine._driver._num_starters == 3)
            for index in range(3):
                if index != survivor:
                    scopes[index].cancel()
            await anyio.sleep(0.01)
            opening.set()
        assert started == ([] if survivor is None else [survivor])
        assert engine.is_open == (survivor is not None)
        if engine.is_open:
            assert (await engine.generate("x")).text == "ok"
        await engine.aclose()
        assert engine_threads() == []

    run(loop, main)


async def test_start_that_is_destroyed_closes_the_engine() -> None:
    """Its loop has ended, say."""
    opening = threading.Event()
    engine = gated_engine(opening)
    start = engine.start()
    start.send(None)
    await until(lambda: engine._driver is not None)
    start.close()
    opening.set()
    await until(lambda: engine_threads() == [])
    assert not engine.is_open


@on_every_loop
def test_cancelled_start_does_not_wait_for_another_task(loop: str) -> None:
    async def main() -> None:
        opening = threading.Event()
        engine = gated_engine(opening)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.start)
            await until(lambda: engine._driver is not None)
            with anyio.move_on_after(0.01) as scope:
                await engine.start()
            assert scope.cancelled_caught and not engine.is_open
            opening.set()
        assert engine.is_open
        await engine.aclose()

    run(loop, main)


@on_every_loop
def test_failed_start_raises_in_all_tasks_and_spares_a_later_start(loop: str) -> None:
    async def main() -> None:
        model = ScriptedModel("ok")
        is_broken = True

        def open_model(report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
            return (failing_open if is_broken else model)(report, limits)

        engine = Engine("scripted", model.config, open_model=open_model)
        num_failures = 0

        async def start() -> None:
            nonlocal is_broken, num_failures
            try:
                await engine.start()
            except ModelLoadError:
                num_failures += 1
                is_broken = False
                await engine.start()

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(start)
        assert num_failures >= 1
        assert (await engine.generate("x")).text == "ok"
        await engine.aclose()

    run(loop, main)


@on_every_loop
def test_cancelled_aclose_is_completed_and_does_not_block_the_loop(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine("ok")
        await engine.start()
        entered, may_end = threading.Event(), threading.Event()
        was_let: list[bool] = []

        def close_slowly() -> None:
            entered.set()
            was_let.append(may_end.wait(120))

        engine.executors[0].close = close_slowly
        ended: list[bool] = []

        async def close(scope: anyio.CancelScope) -> None:
            with scope:
                await engine.aclose()
            ended.append(scope.cancelled_caught)

        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(close, scope)
            await until(entered.is_set)
            scope.cancel()
            for _ in range(5):
                await anyio.sleep(0.001)
            assert ended == []
            may_end.set()
        assert was_let == [True]
        assert ended == [scope.cancelled_caught]
        assert engine_threads() == []

    run(loop, main)


def test_concurrent_starts_and_closes_all_end() -> None:
    """In any order every call ends, and after the last close no thread is left. How a start ends, depends on
    the machine."""
    num_rounds = int(os.environ.get("DRIFT_TEST_RACES", "10"))
    random = Random(0)

    async def main() -> None:
        engine = scripted_engine("ok", step_s=0.0005)
        num_starts, num_ended = 0, 0

        async def start(cancel_after_s: float | None) -> None:
            nonlocal num_starts, num_ended
            num_starts += 1
            with anyio.move_on_after(cancel_after_s):
                try:
                    await engine.start()
                    assert (await engine.generate("x")).text == "ok"
                except EngineClosed:
                    pass
            num_ended += 1

        async def close(drain_s: float) -> None:
            await engine.aclose(drain_s)

        for _ in range(num_rounds):
            with anyio.fail_after(120):
                async with anyio.create_task_group() as tasks:
                    for _ in range(8):
                        if random.random() < 0.6:
                            tasks.start_soon(start, random.choice([None, 0.0, 0.001, 0.003]))
                        else:
                            tasks.start_soon(close, random.choice([0.0, 0.01]))
                        if random.random() < 0.5:
                            await anyio.sleep(random.choice([0.0, 0.001]))
                await engine.aclose()
            assert not engine.is_open
            assert engine_threads() == []
        assert all(executor.is_closed for executor in engine.executors)
        assert num_starts == num_ended > num_rounds

    for loop in LOOPS:
        run(loop, main)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_native_cancellation_of_start_and_close(loop: str) -> None:
    """anyio's shields do not hold off asyncio's own cancellation."""

    async def main() -> None:
        gate = threading.Event()

        async def enter() -> None:
            async with gated_engine(gate):
                raise AssertionError("not reached")

        task = asyncio.create_task(enter())
        await until(lambda: engine_threads() != [])
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine_threads() == []

        is_awaited = threading.Event()

        def ok(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
            assert is_awaited.wait(WAIT_S)
            return [*b"ok", EOS_TOKEN_ID][len(output_ids)]

        engine = scripted_engine(ok)
        await engine.start()
        stream = engine.generate("x")
        task = asyncio.create_task(engine.aclose(drain=WAIT_S))
        await asyncio.sleep(0.01)
        task.cancel()
        is_awaited.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await stream).text == "ok"
        assert engine_threads() == []

        async with scripted_engine(lambda *_: 65, step_s=0.002) as engine:
            stream = engine.generate("x", SamplingParams(max_tokens=None))
            task = asyncio.create_task(stream.completion())
            await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await stream).finish_reason == "cancelled"

    run(loop, main)


@on_every_loop
def test_failed_start_leaves_no_thread_and_can_be_repeated(loop: str) -> None:
    async def main() -> None:
        model = ScriptedModel("ok")
        openers = [failing_open, failing_open, model]
        engine = Engine(
            "scripted", model.config, open_model=lambda report, limits=None: openers.pop(0)(report, limits)
        )
        for _ in range(2):
            with pytest.raises(ModelLoadError, match=r"no such model"):
                await engine.start()
            assert engine_threads() == []
        async with engine:
            assert (await engine.generate("x")).text == "ok"

    run(loop, main)


@on_every_loop
def test_wrong_model_config_and_drain_are_rejected_by_name(loop: str, tmp_path) -> None:
    async def main() -> None:
        with pytest.raises(ModelLoadError, match="nowhere"):
            await Engine(tmp_path / "nowhere").start()
        with pytest.raises(ConfigError, match="model="):
            Engine(7)
        with pytest.raises(ConfigError, match="config="):
            Engine("x", {"dtype": "auto"})
        with pytest.raises(RequestError, match="drain"):
            await scripted_engine().aclose(drain=-1.0)
        with pytest.raises(RequestError, match="drain=10000000000.0: expected .*1000000"):
            await scripted_engine().aclose(drain=1e10)

    run(loop, main)


@on_every_loop
def test_two_engines_serve_at_once(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("first") as first, scripted_engine("second") as second:
            results: list[str] = []

            async def ask(engine: Engine) -> None:
                results.append((await engine.generate("x")).text)

            async with anyio.create_task_group() as tasks:
                for engine in (first, second) * 5:
                    tasks.start_soon(ask, engine)
            assert sorted(results) == ["first"] * 5 + ["second"] * 5

    run(loop, main)


def test_one_engine_serves_two_loops() -> None:
    async def main() -> None:
        async with scripted_engine("shared", step_s=0.001) as engine:
            texts: list[str] = []

            async def elsewhere() -> None:
                texts.append((await engine.generate("x")).text)
                await engine.start()

            threads = [threading.Thread(target=run, args=(loop, elsewhere)) for loop in ("asyncio", "trio")]
            for thread in threads:
                thread.start()
            texts.append((await engine.generate("x")).text)
            await until(lambda: len(texts) == 3)
            for thread in threads:
                thread.join()
            assert texts == ["shared"] * 3

    run("asyncio", main)


@on_every_loop
def test_host_process_is_left_unchanged(loop: str) -> None:
    def host() -> dict[str, object]:
        return {
            "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "environment": dict(os.environ),
            "policy": asyncio.get_event_loop_policy(),
            "directory": os.getcwd(),
            "switch_interval": sys.getswitchinterval(),
            "excepthooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        }

    async def main() -> None:
        before, threads = host(), set(threading.enumerate())
        async with scripted_engine("ok") as engine:
            await engine.generate("x")
        assert host() == before
        # Idle threads that an earlier test has left may end meanwhile.
        assert set(threading.enumerate()) <= threads

    run(loop, main)


@on_every_loop
def test_dropping_an_open_engine_closes_it_with_a_warning(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine("ok")
        await engine.start()
        with pytest.warns(ResourceWarning, match="garbage-collected without being closed"):
            del engine
            gc.collect()
        await until(lambda: engine_threads() == [])

    run(loop, main)


async def test_engine_can_be_started_and_closed_by_separate_tasks_like_a_fixture(tmp_path) -> None:
    engine = scripted_engine("ok")
    await asyncio.create_task(engine.start())
    assert (await engine.generate("x")).text == "ok"
    assert [chunk.text async for chunk in engine.chat([{"role": "user", "content": "x"}])]
    await asyncio.create_task(engine.aclose())


def test_import_loads_few_modules_and_no_torch() -> None:
    """Measured by the modules loaded, not by the time: the machine may be slow or busy."""
    script = (
        "import sys, threading; before = set(sys.modules); import drift_sdk;"
        "assert threading.active_count() == 1; print(*sorted(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    packages = {name.split(".")[0] for name in loaded}
    assert packages - set(sys.stdlib_module_names) <= LIGHT_PACKAGES
    assert len(loaded) < 400


def test_on_progress_is_called_on_the_event_loop() -> None:
    async def main() -> None:
        thread, seen = threading.current_thread(), []

        def on_progress(progress) -> None:
            assert threading.current_thread() is thread
            seen.append(progress)

        model = ScriptedModel("ok")
        engine = Engine("scripted", model.config, on_progress=on_progress, open_model=model)
        async with engine:
            await anyio.lowlevel.checkpoint()
        assert [progress.stage for progress in seen] == ["ready"]

    run("asyncio", main)


@on_every_loop
@pytest.mark.parametrize("error", [ValueError("in the callback"), BaseException("of another kind")])
def test_exception_of_on_progress_is_logged_once_per_start(
    loop: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        raise error

    model = ScriptedModel("ok")

    def open_model(report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
        for percent in range(10):
            report("load weights", percent / 10)
        return model(report, limits)

    async def main() -> None:
        engine = Engine("scripted", model.config, on_progress=on_progress, open_model=open_model)
        for num_starts in (1, 2):
            async with engine:
                assert (await engine.generate("x")).text == "ok"
            assert len(seen) == num_starts
            records = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert len(records) == num_starts
            assert records[-1].getMessage() == "on_progress raised an exception and is not called again"
            assert records[-1].exc_info[1] is error

    run(loop, main)


def test_on_progress_must_be_an_ordinary_function() -> None:
    async def coroutine_function(progress: Progress) -> None: ...

    class WithCoroutine:
        async def __call__(self, progress: Progress) -> None: ...

    for wrong in (5, "print", coroutine_function, WithCoroutine()):
        with pytest.raises(ConfigError, match="^on_progress=.*: expected a function that takes a Progress"):
            Engine("model", on_progress=wrong)
    with pytest.raises(ConfigError, match="^open_model=5: expected a function"):
        Engine("model", open_model=5)


@pytest.mark.parametrize("kind", [Engine, SyncEngine])
def test_engine_is_neither_pickled_nor_copied(kind: type[Engine] | type[SyncEngine]) -> None:
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=f"{kind.__name__} cannot be copied or pickled: make one in each"):
            copied(kind("model"))


async def test_errors_tell_an_engine_that_was_closed_from_one_never_started() -> None:
    engine = scripted_engine("ok")
    with pytest.raises(
        EngineClosed, match=r"^the engine is not open: start\(\) or its `with` block opens it$"
    ):
        engine.generate("x")
    async with engine:
        pass
    with pytest.raises(EngineClosed, match=r"^the engine was closed: start\(\) opens it again$"):
        engine.generate("x")


async def test_error_while_the_model_is_loaded_says_so() -> None:
    gate = threading.Event()
    engine = gated_engine(gate)
    task = asyncio.create_task(engine.start())
    await until(lambda: engine_threads() != [])
    with pytest.raises(EngineClosed, match="the engine is still starting"):
        engine.generate("x", SamplingParams())
    gate.set()
    await task
    await engine.aclose()


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise ValueError("it has no text")

    __str__ = __repr__


async def test_failure_without_a_text_ends_streams_and_the_engine() -> None:
    def fail(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        raise Unprintable

    engine = scripted_engine(fail)
    await engine.start()
    stream = engine.generate("x")
    with anyio.fail_after(WAIT_S):
        with pytest.raises(ExecutorError, match="the engine failed: <Unprintable>"):
            await stream
        for act in (engine.pause, engine.resume, engine.sleep, engine.wake):
            with pytest.raises(ExecutorError, match="the engine failed: <Unprintable>"):
                await act()
        await engine.aclose()
    assert engine_threads() == []


async def test_closing_ends_when_requests_cannot_be_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("they cannot be ended")

    engine = scripted_engine("Hello!")
    await engine.start()
    monkeypatch.setattr(Delivery, "close", fail)
    with anyio.fail_after(WAIT_S):
        await engine.aclose()
    assert engine_threads() == []
    assert "failed: RuntimeError('they cannot be ended')" in caplog.text


class Refusing(logging.Filter):
    """A filter of a program whose own code fails."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise ValueError("a filter")


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    logger, found = logging.getLogger("drift_sdk"), Refusing()
    level = logger.level
    logger.setLevel(logging.INFO)
    yield found
    logger.removeFilter(found)
    logger.setLevel(level)


async def test_engine_closes_where_logging_raises(refusing: Refusing) -> None:
    engine = scripted_engine("ok")
    await engine.start()
    logging.getLogger("drift_sdk").addFilter(refusing)
    with anyio.fail_after(WAIT_S):
        await engine.aclose()
    assert engine_threads() == []


@pytest.mark.parametrize("act", ["sleep", "wake"])
async def test_commands_end_where_logging_raises(refusing: Refusing, act: str) -> None:
    engine = scripted_engine("ok")
    await engine.start()
    if act == "wake":
        await engine.sleep()
    logging.getLogger("drift_sdk").addFilter(refusing)
    with anyio.fail_after(WAIT_S):
        with pytest.raises(ExecutorError, match="a filter"):
            await getattr(engine, act)()
        await engine.aclose()
    assert engine_threads() == []


async def test_failure_reaches_streams_where_logging_raises(refusing: Refusing) -> None:
    def fail(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        logging.getLogger("drift_sdk").addFilter(refusing)
        raise ZeroDivisionError("a step")

    engine = scripted_engine(fail)
    await engine.start()
    with anyio.fail_after(WAIT_S):
        with pytest.raises(ExecutorError, match="a step"):
            await engine.generate("x")
        await engine.aclose()
    assert engine_threads() == []


async def test_stages_of_starting_are_timed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "drift_sdk")
    model = ScriptedModel("ok")

    def open_in_stages(report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
        time.sleep(0.02)
        report("find", 0.0)
        for fraction in (0.0, 0.5, 1.0):
            report("load weights", fraction)
            time.sleep(0.02)
        return model(report, limits)

    async with Engine("scripted", model.config, open_model=open_in_stages) as engine:
        stages = engine.stats().start_seconds
        assert [stage for stage, _ in stages] == ["imports", "find", "load weights"]
        lengths = dict(stages)
        assert lengths["imports"] >= 0.02 and lengths["load weights"] >= 0.06
        assert lengths["find"] >= 0.0
        await engine.generate("x")
        assert engine.stats().start_seconds == stages

    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    parts = [f"{stage} {length:.2f} s" for stage, length in stages]
    assert said[0] == f"started: {', '.join(parts)}"


async def rejected_start(engine: Engine) -> None:
    with pytest.raises(EngineClosed, match="closed while"):
        await engine.start()


def failing_open(report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
    raise ModelLoadError("no such model: tried everything")


def gated_engine(gate: threading.Event) -> Engine:
    """An engine whose model is opened once `gate` is set."""
    model = ScriptedModel("ok", config=EngineConfig(max_model_len=64, kv_cache_tokens=256))

    def open_behind_gate(report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
        assert gate.wait(WAIT_S)
        return model(report, limits)

    return Engine("scripted", model.config, open_model=open_behind_gate)
