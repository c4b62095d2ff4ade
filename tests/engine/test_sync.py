"""SyncEngine: an engine in code without an event loop."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from interrupts import one_interrupt
from loops import WAIT_S, on_every_loop, run
from loops import until as until_on_loop

from drift_sdk import (
    EngineClosed,
    EngineConfig,
    Job,
    ModelLoadError,
    PromptTooLong,
    RequestError,
    SamplingParams,
    SyncEngine,
)
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.driver.loops import LoopPoster
from drift_sdk.events import Progress
from drift_sdk.sync import SyncStream
from drift_sdk.testing import NextToken, ScriptedModel

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
TEXT = "Grüße, 世界!"
SUPPORT = Path(__file__).parent.parent / "support"


SMALL = EngineConfig(max_model_len=64, kv_cache_tokens=1024)
LARGE = EngineConfig(max_model_len=2**17, kv_cache_tokens=2**20)  # answers without end take two minutes


def sync_engine(reply: str | NextToken = TEXT, config: EngineConfig = SMALL, **options: object) -> SyncEngine:
    return SyncEngine("scripted", config, open_model=ScriptedModel(reply, config=config, **options))


def until(condition) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def sync_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("drift-")]


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    with sync_engine() as engine:
        yield engine


def test_stream_gives_chunks_and_the_completion(engine: SyncEngine) -> None:
    num_before = engine.stats().num_submitted
    stream = engine.generate("x")
    assert stream.accepted() == 1
    chunks = list(stream)
    completion = stream.result()
    assert stream.accepted() == completion.usage.prompt_tokens == 1
    assert "".join(chunk.text for chunk in chunks) == completion.text == TEXT
    assert chunks[-1].finish_reason == "stop" and list(stream) == []
    assert engine.generate("x", SamplingParams(stop="ß"), request_id="mine").result().text == "Grü"
    assert engine.chat([USER], max_tokens=2, request_id="mine").result().request_id == "mine"
    assert engine.count_tokens([USER]) == engine.chat([USER]).result().usage.prompt_tokens
    wrong: dict[str, Any] = {"tool": []}
    with pytest.raises(RequestError, match=r"^tool=\[\]: unknown argument \(did you mean tools\?\)"):
        engine.count_tokens([USER], **wrong)
    with pytest.raises(RequestError, match=r"^tool=\[\]: unknown argument \(did you mean tools\?\)"):
        engine.chat([USER], **wrong)
    assert engine.is_open and engine.stats().num_submitted == num_before + 4


def test_properties_are_those_of_the_model(engine: SyncEngine) -> None:
    assert engine.max_model_len == 64
    assert engine.default_params == SamplingParams()
    assert engine.tokenizer.encode("ab") == [97, 98]


def test_errors_are_raised_where_the_caller_waits(engine: SyncEngine) -> None:
    with pytest.raises(RequestError, match="max_tokens=0"):
        engine.generate("x", max_tokens=0)
    stream = engine.generate("x" * 64)
    for wait in (stream.accepted, stream.result, stream.__next__):
        with pytest.raises(PromptTooLong):
            wait()
    assert engine.generate("x").result().text == TEXT


def test_samples_are_streams_of_one_prompt(engine: SyncEngine) -> None:
    streams = engine.samples("x", 3, seed=5)
    assert [stream.result().seed for stream in streams] == [5, 6, 7]
    streams = engine.samples([USER], 2, tools=TOOLS, template_args={"a": 1}, request_id="two")
    assert [stream.result().request_id for stream in streams] == ["two-0", "two-1"]


def test_map_reads_its_prompts_in_the_calling_thread(engine: SyncEngine) -> None:
    readers: set[int] = set()

    def prompts(number: int) -> Iterator[object]:
        for index in range(number):
            readers.add(threading.get_ident())
            yield Job(key=str(index), prompt="x" * (64 if index == 2 else 1))

    results = list(engine.map(prompts(5), errors="yield", max_concurrent=2, max_tokens=4))
    assert [result.key for result in results] == list("01234")
    assert [type(result.error) for result in results].count(PromptTooLong) == 1
    assert [c.text for c in engine.map(prompts(2), ordered=False)] == [TEXT] * 2
    assert readers == {threading.get_ident()}
    found = engine.map(prompts(5))
    with pytest.raises(PromptTooLong):
        list(found)
    with pytest.raises(RequestError, match="max_concurrent"):
        engine.map([], max_concurrent=0)


def torn() -> Iterator[str]:
    yield "x"
    raise ValueError("the file is torn")


def test_map_raises_an_error_of_its_prompts_after_the_results(engine: SyncEngine) -> None:
    found = engine.map(torn())
    assert next(found).text == TEXT
    with pytest.raises(ValueError, match="torn"):
        next(found)


def test_leaving_a_map_or_a_block_cancels() -> None:
    with sync_engine(lambda *_: 65, LARGE, step_s=0.001) as engine:
        found = engine.map([USER["content"]] * 3, max_concurrent=3, ordered=False, max_tokens=40)
        next(found)
        found.close()
        with engine.generate("x", max_tokens=None) as stream:
            assert next(stream).text
        assert stream.result().finish_reason == "cancelled"
        other = engine.generate("x", max_tokens=None, request_id="other")
        assert engine.cancel("other") and not engine.cancel("another")
        assert other.result().finish_reason == "cancelled"
        until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)


def test_threads_share_the_engine(engine: SyncEngine) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda number: engine.generate(f"x{number}").result().text, range(40)))
    assert texts == [TEXT] * 40


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_blocking_calls_are_rejected_in_an_event_loop(loop: str, engine: SyncEngine) -> None:
    stream = engine.generate("x")
    other = sync_engine()

    async def main() -> None:
        for call in (
            other.start,
            other.close,
            lambda: engine.generate("x"),
            lambda: engine.chat([USER]),
            lambda: engine.count_tokens("x"),
            lambda: next(engine.map(["x"])),
            stream.result,
            lambda: next(stream),
        ):
            with pytest.raises(RuntimeError, match="use Engine and await"):
                call()
        assert engine.is_open

    run(loop, main)
    assert stream.result().text == TEXT


def test_closed_engine_rejects_calls_and_can_be_started_again() -> None:
    engine = sync_engine()
    engine.close()
    calls = (
        lambda: engine.generate("x"),
        lambda: engine.count_tokens("x"),
        lambda: engine.max_model_len,
        lambda: engine.default_params,
        lambda: engine.tokenizer,
        engine.stats,
    )
    for call in calls:
        with pytest.raises(EngineClosed, match="is not open"):
            call()
    num_threads = len(sync_threads())
    for _ in range(2):
        with engine:
            engine.start()
            stream = engine.generate("x")
            assert stream.result().text == TEXT
        engine.close()
        assert not engine.is_open and len(sync_threads()) == num_threads
        with pytest.raises(EngineClosed):
            engine.generate("x")
        assert stream.result().text == TEXT
    assert engine.cancel("x") is False


def read_text(stream: SyncStream) -> str:
    stream.accepted()
    with stream:
        text = "".join(chunk.text for chunk in stream)
    assert stream.result(timeout=0.0).text == text and list(stream) == []
    return text


def test_requests_that_have_ended_are_read_after_close() -> None:
    engine = sync_engine(step_s=0.001)
    with engine:
        read, unread, failed = engine.generate("x"), engine.generate("x"), engine.generate("x" * 64)
        assert read.result().text == unread.result().text == TEXT
        drained = engine.generate("x")
        engine.close(drain=WAIT_S)
        with ThreadPoolExecutor(1) as pool:
            assert list(pool.map(read_text, (read, unread, drained))) == [TEXT] * 3
        for wait in (failed.accepted, failed.result, failed.__next__):
            with pytest.raises(PromptTooLong):
                wait()
        engine.start()  # on another event loop
        assert read.result().text == drained.result().text == TEXT and list(read) == []


def test_request_that_ends_before_a_wait_is_read_after_close() -> None:
    """Another thread closes the engine when this one is about to wait."""
    with sync_engine(step_s=0.001) as engine:
        stream = engine.generate("x")
        call = stream._call

        def close_and_call(function, *arguments):
            engine.close(drain=WAIT_S)
            return call(function, *arguments)

        stream._call = close_and_call
        assert stream.result().text == TEXT


def test_request_that_has_not_ended_raises_after_close() -> None:
    with sync_engine(lambda *_: 65, LARGE, step_s=0.001) as engine:
        stream = engine.generate("x", max_tokens=None)
        assert next(stream).text
    with pytest.raises(EngineClosed):
        list(stream)
    with pytest.raises(EngineClosed):
        stream.result()


def test_close_leaves_an_engine_open_that_was_started_again_meanwhile() -> None:
    """By another thread, between the end of the engine and the end of its event loop."""
    with sync_engine() as engine:
        loop = engine._loop
        call = loop.call

        def call_and_start_again(function, *arguments):
            result = call(function, *arguments)
            loop.call = call
            engine.close()
            engine.start()
            return result

        loop.call = call_and_start_again
        engine.close()
        assert engine.generate("x").result().text == TEXT


def test_closing_ends_waits_of_other_threads() -> None:
    with sync_engine(lambda *_: 65, LARGE, step_s=0.001) as engine, ThreadPoolExecutor(3) as pool:
        streams = [engine.generate("x", max_tokens=None) for _ in range(2)]
        waits = [pool.submit(stream.result) for stream in streams]
        mapped = pool.submit(lambda: list(engine.map(["x"] * 3, max_tokens=None)))
        next(streams[0])
        engine.close()
        for wait in (*waits, mapped):
            with pytest.raises(EngineClosed):
                wait.result(timeout=WAIT_S)


@on_every_loop
def test_callbacks_of_an_event_loop_are_not_blocked(engine: SyncEngine, loop: str) -> None:
    stream = engine.generate("x", max_tokens=1)

    async def main() -> None:
        errors: list[Exception] = []

        def block() -> None:
            for call in (engine.start, engine.close, stream.result, partial(engine.generate, "x")):
                try:
                    call()
                except Exception as error:
                    errors.append(error)

        LoopPoster.current().post(block)
        await until_on_loop(lambda: len(errors) == 4)
        assert {type(error) for error in errors} == {RuntimeError}
        assert all("would block the event loop" in str(error) for error in errors)

    run(loop, main)
    assert engine.is_open


def test_engine_whose_event_loop_has_failed_can_be_closed_and_started() -> None:
    for reopen in (SyncEngine.start, SyncEngine.close):
        with sync_engine() as engine:
            loop = engine._loop
            loop.post(sys.exit)
            loop._thread.join(WAIT_S)
            assert not engine.is_open
            with pytest.raises(EngineClosed):
                engine.generate("x")
            reopen(engine)
            engine.start()
            assert engine.is_open and engine.generate("x").result().text == TEXT
        assert not engine.is_open and not engine._engine.is_open


def test_failed_start_leaves_no_thread() -> None:
    def missing(report, limits=None) -> LoadedModel:
        raise ModelLoadError("no such model")

    num_threads = len(sync_threads())
    engine = SyncEngine("missing", open_model=missing)
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="no such model"):
            engine.start()
        assert not engine.is_open and len(sync_threads()) == num_threads


def waits_in(*functions: FunctionType) -> bool:
    """True while the main thread waits for the engine's event loop in one of these functions."""
    frame = sys._current_frames()[threading.main_thread().ident]
    running = set()
    while frame is not None:
        running.add(frame.f_code)
        frame = frame.f_back
    return Future.result.__code__ in running and not running.isdisjoint(each.__code__ for each in functions)


@pytest.fixture
def interrupt_in() -> Iterator[Callable[..., None]]:
    """A function that interrupts the main thread, as Ctrl-C does, where that waits in one of the functions
    given: what the main thread has made before has a name by then, and `pytest.raises` is entered."""
    with one_interrupt() as interrupt:

        def interrupt_in(*functions: FunctionType) -> None:
            until(lambda: waits_in(*functions))
            interrupt()

        yield interrupt_in


WAITS = (SyncStream.result, SyncStream.__next__, SyncEngine._results)


@pytest.mark.parametrize("how", ["result", "iterate", "map", "count"])
def test_keyboard_interrupt_closes_the_engine(interrupt_in: Callable[..., None], how: str) -> None:
    def endless(prompt_ids, output_ids, seed) -> int:
        if len(output_ids) == 5 and bytes(prompt_ids) == b"x":
            interrupt_in(*WAITS)
        time.sleep(0.001)
        return 65

    engine = sync_engine(endless, LARGE)
    with pytest.raises(KeyboardInterrupt), engine:
        if how == "count":
            threading.Thread(target=interrupt_in, args=[SyncEngine.count_tokens]).start()
            while True:
                engine.count_tokens("y")
        stream = engine.generate("x", max_tokens=None) if how != "map" else None
        if how == "result":
            stream.result()
        elif how == "iterate":
            for _ in stream:
                pass
        else:
            list(engine.map(["x", "y"], max_tokens=None))
    assert not engine.is_open
    with pytest.raises(EngineClosed):
        engine.generate("x")


def test_interrupted_wait_cancels_its_request_and_keeps_the_engine(
    interrupt_in: Callable[..., None],
) -> None:
    def endless(prompt_ids, output_ids, seed) -> int:
        if len(output_ids) == 5 and bytes(prompt_ids) == b"x":
            interrupt_in(SyncStream.result)
        time.sleep(0.001)
        return 65

    with sync_engine(endless, LARGE) as engine:
        stream = engine.generate("x", max_tokens=None)
        with pytest.raises(KeyboardInterrupt):
            stream.result()
        assert stream.result().finish_reason == "cancelled"
        assert engine.generate("y", max_tokens=3).result().text == "AAA"


def test_keyboard_interrupt_ends_a_start(interrupt_in: Callable[..., None]) -> None:
    model = ScriptedModel(TEXT)

    def slow(report, limits=None) -> LoadedModel:
        interrupt_in(SyncEngine.start)
        ends_at = time.monotonic() + WAIT_S
        while time.monotonic() < ends_at:
            report("load weights", 0.5)  # raises when the engine is closed
            time.sleep(0.001)
        return model(report, limits)

    num_threads = len(sync_threads())
    engine = SyncEngine("scripted", open_model=slow)
    with pytest.raises(KeyboardInterrupt):
        engine.start()
    assert not engine.is_open and len(sync_threads()) == num_threads


def test_result_with_a_timeout_leaves_the_request_running() -> None:
    may_end = threading.Event()

    def held(prompt_ids, output_ids, seed) -> int:
        if len(output_ids) == 3:
            assert may_end.wait(WAIT_S)
        return 65

    with sync_engine(held) as engine:
        stream = engine.generate("x", max_tokens=5, request_id="mine")
        for seconds in (0, 0.01):
            with pytest.raises(TimeoutError, match=f"request mine has not ended within {seconds} s"):
                stream.result(seconds)
        first = next(stream).text
        with pytest.raises(TimeoutError):
            stream.result(timeout=0.01)
        may_end.set()
        completion = stream.result(timeout=WAIT_S)
        assert (completion.text, completion.finish_reason) == ("AAAAA", "length")
        assert stream.result(0) is completion  # it has ended: there is nothing to wait for
        assert first + "".join(chunk.text for chunk in stream) == "AAAAA"
        for wrong in (-1, float("nan"), float("inf"), True, "1"):
            with pytest.raises(RequestError, match="timeout="):
                stream.result(wrong)


def test_interrupted_wait_with_a_timeout_cancels_its_request(interrupt_in: Callable[..., None]) -> None:
    def endless(prompt_ids, output_ids, seed) -> int:
        if len(output_ids) == 5:
            interrupt_in(SyncStream.result)
        time.sleep(0.001)
        return 65

    with sync_engine(endless, LARGE) as engine:
        stream = engine.generate("x", max_tokens=None)
        with pytest.raises(KeyboardInterrupt):
            stream.result(WAIT_S)
        assert stream.result(WAIT_S).finish_reason == "cancelled"


def test_error_of_a_request_comes_before_its_timeout(engine: SyncEngine) -> None:
    with pytest.raises(PromptTooLong):
        engine.generate("x" * 64).result(timeout=WAIT_S)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, ValueError])
def test_exceptions_of_on_progress_do_not_end_the_thread(raised: type[BaseException]) -> None:
    def fail(progress: Progress) -> None:
        raise raised

    model = ScriptedModel(TEXT)
    with SyncEngine("scripted", model.config, open_model=model, on_progress=fail) as engine:
        assert engine.generate("x").result().text == TEXT


def test_dropped_engine_is_closed_with_a_warning() -> None:
    num_threads = len(sync_threads())
    with pytest.warns(ResourceWarning, match="garbage-collected without being closed"):
        engine = sync_engine()
        engine.start()
        del engine
        gc.collect()
    until(lambda: len(sync_threads()) == num_threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_and_exit_with_an_open_engine() -> None:
    """The child finds the engine closed and can start it; an engine that is left open does not delay the
    exit."""
    command = [sys.executable, str(SUPPORT / "sync_child.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (4, "")


def test_engine_of_an_object_that_is_deleted_at_the_exit() -> None:
    """Its threads have ended then, and are not waited for."""
    command = [sys.executable, str(SUPPORT / "deleted_at_exit.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\ndeleted\n", "")
