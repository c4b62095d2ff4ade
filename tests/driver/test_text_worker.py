"""Text threads: work that hangs, fails in unusual ways, or belongs to a cancelled request."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from loops import WAIT_S, run, until

from drift_sdk import (
    DriftError,
    EngineClosed,
    EngineConfig,
    PromptTooLong,
    QueueFull,
    Regex,
    RequestError,
    SamplingParams,
)
from drift_sdk.driver import text_worker
from drift_sdk.driver.prompts import ModelText, PreparedPrompt, TextPrompt
from drift_sdk.driver.text_worker import TextWorker
from drift_sdk.testing import scripted_engine


class Stall:
    """Blocks tokenising of prompts that begin with "stall" until `released` is set. `begun` lists all prompts
    whose tokenising has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.begun: list[str] = []
        prepare = TextPrompt.prepare

        def stalling(prompt: TextPrompt, model: ModelText) -> PreparedPrompt:
            self.begun.append(prompt.text)
            if prompt.text.startswith("stall"):
                self.released.wait(60)
            return prepare(prompt, model)

        monkeypatch.setattr(TextPrompt, "prepare", stalling)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    stall = Stall(monkeypatch)
    join_text_threads()  # of earlier tests
    yield stall
    stall.released.set()
    join_text_threads()


def text_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "drift-text"]


def join_text_threads() -> None:
    """Wait for the threads of engines that are closed: they end when their jobs do."""
    for thread in text_threads():
        thread.join(WAIT_S)


def test_cancelled_prompts_do_not_delay_other_requests(stall: Stall) -> None:
    async def main() -> None:
        async with scripted_engine("ok") as engine:
            streams = [engine.generate(f"stall {index}") for index in range(2)]
            await until(lambda: len(stall.begun) == 2)
            streams += [engine.generate(f"stall {index}") for index in range(2, 6)]
            for stream in reversed(streams):
                stream.cancel()
            with anyio.fail_after(120):
                assert (await engine.generate("hi")).text == "ok"
            assert sorted(stall.begun[:2]) == ["stall 0", "stall 1"] and stall.begun[2:] == ["hi"]
            for stream in streams:
                assert (await stream).finish_reason == "cancelled"
            stall.released.set()
            await until(lambda: len(text_threads()) <= text_worker.NUM_PARALLEL + 1)
            assert (await engine.generate("again")).text == "ok"

    run("asyncio", main)


class Clock:
    """The clock of text threads, which a test can put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset_s = 0.0
        monkeypatch.setattr(text_worker, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.offset_s

    def forward(self, worker: TextWorker) -> None:
        """Make all jobs in progress overdue."""
        self.offset_s += text_worker.JOB_TIMEOUT_S
        with worker._changed:
            worker._changed.notify_all()


def test_cancelled_prompts_that_wait_for_a_thread_leave_the_queue(stall: Stall) -> None:
    async def main() -> None:
        config = EngineConfig(max_num_seqs=1, max_queued_requests=3)
        async with scripted_engine("ok", config=config) as engine:
            held = [engine.generate(f"stall {index}") for index in range(4)]
            await until(lambda: len(stall.begun) == 2)
            with pytest.raises(QueueFull):
                engine.generate("hi")
            for stream in held[2:]:
                stream.cancel()
                assert (await stream).finish_reason == "cancelled"
            await until(lambda: engine._has_room)
            more = [engine.generate("hi") for _ in range(2)]
            stall.released.set()
            for stream in (*more, *held[:2]):
                assert (await stream).text == "ok"

    run("asyncio", main)


def test_hanging_text_work_fails_only_its_own_request(stall: Stall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to `MAX_ABANDONED` hanging threads are replaced; after that new requests fail."""
    clock = Clock(monkeypatch)
    most = text_worker.MAX_ABANDONED + text_worker.NUM_PARALLEL

    async def main() -> None:
        config = EngineConfig(max_num_seqs=2, max_queued_requests=2, max_model_len=64, kv_cache_tokens=256)
        async with scripted_engine("ok", config=config) as engine:
            for index in range(most):
                stream = engine.generate(f"stall {index}")
                await until(lambda index=index: len(stall.begun) == 2 * index + 1)
                clock.forward(engine._driver._text_worker)
                with pytest.raises(RequestError, match=r"^prompt: expected text work of at most 60 s"):
                    await stream
                if index < most - 1:
                    assert (await engine.generate("hi")).text == "ok"
            for _ in range(10):
                with pytest.raises(RequestError, match="prompt"):
                    await engine.generate("hi")
            assert len(text_threads()) == most + 1
            stall.released.set()
            await until(lambda: len(text_threads()) <= text_worker.NUM_PARALLEL + 1)
            await until(lambda: not engine._driver._text_worker._in_progress)
            assert (await engine.generate("hi")).text == "ok"

    run("asyncio", main)


def test_plain_prompts_are_served_while_grammars_hang(stall: Stall, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    most = text_worker.MAX_ABANDONED + text_worker.NUM_PARALLEL
    params = SamplingParams(grammar=Regex("ok"))

    async def main() -> None:
        async with scripted_engine("ok") as engine:
            for index in range(most):
                stream = engine.generate(f"stall {index}", params)
                await until(lambda index=index: len(stall.begun) == index + 1)
                clock.forward(engine._driver._text_worker)
                with pytest.raises(RequestError, match=r"^prompt: expected text work of at most"):
                    await stream
            for _ in range(3):
                with pytest.raises(RequestError, match="prompt"):
                    await engine.generate("hi", params)
                with anyio.fail_after(120):
                    assert (await engine.generate("hi")).text == "ok"

            for index in range(text_worker.NUM_PARALLEL):  # plain prompts that hang take the last places
                stream = engine.generate(f"stall plain {index}")
                await until(lambda index=index: f"stall plain {index}" in stall.begun)
                clock.forward(engine._driver._text_worker)
                with pytest.raises(RequestError, match="prompt"):
                    await stream
            with pytest.raises(RequestError, match="prompt"):
                await engine.generate("hi")
            assert len(text_threads()) == most + text_worker.NUM_PARALLEL + 1

            stall.released.set()
            await until(lambda: len(text_threads()) <= 2 * text_worker.NUM_PARALLEL + 1)
            await until(lambda: not engine._driver._text_worker._in_progress)
            assert (await engine.generate("hi")).text == "ok"

    run("asyncio", main)


def test_cancelled_grammars_that_hang_make_room_for_a_waiting_plain_prompt(stall: Stall) -> None:
    most = text_worker.MAX_ABANDONED + text_worker.NUM_PARALLEL
    params = SamplingParams(grammar=Regex("ok"))

    async def main() -> None:
        async with scripted_engine("ok") as engine:
            streams = []
            for index in range(most):
                streams.append(engine.generate(f"stall {index}", params))
                await until(lambda index=index: len(stall.begun) == index + 1)
                if index < text_worker.MAX_ABANDONED:
                    streams[index].cancel()
            waiting = engine.generate("hi")
            for stream in streams:
                stream.cancel()
                assert (await stream).finish_reason == "cancelled"
            with anyio.fail_after(50):  # less than an idle thread waits if it is not told
                assert (await waiting).text == "ok"
            stall.released.set()

    run("asyncio", main)


WORD = "okokokokokok"


class MaskWorker:
    """A text worker and six requests. The mask of "b" hangs until `released`."""

    def __init__(self) -> None:
        self.released, self.has_begun = threading.Event(), threading.Event()
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.worker = TextWorker(self.sent.put)
        self.requests: dict[str, Any] = {
            each: SimpleNamespace(
                request_id=each,
                text_field="grammar",
                is_done=False,
                has_slow_mask=False,
                advance=lambda ids: None,
            )
            for each in "abcdef"
        }
        self.requests["b"].advance = self._hang

    def advance(self) -> None:
        self.worker.advance([(request, (1,)) for request in self.requests.values()])

    def outcomes(self) -> tuple[dict[str, DriftError | None], list[str]]:
        """The errors of all requests, and the requests of each job."""
        errors: dict[str, DriftError | None] = {}
        jobs = []
        while len(errors) < len(self.requests):
            computed = self.sent.get(timeout=WAIT_S)
            errors |= {request.request_id: error for request, error in computed.outcomes}
            jobs.append("".join(request.request_id for request, _ in computed.outcomes))
        return errors, jobs

    def close(self) -> None:
        self.released.set()
        self.worker.close()

    def _hang(self, token_ids: tuple[int, ...]) -> None:
        self.has_begun.set()
        assert self.released.wait(WAIT_S)


@pytest.fixture
def masks() -> Iterator[MaskWorker]:
    masks = MaskWorker()
    yield masks
    masks.close()


@pytest.mark.parametrize("way", ["overdue", "cancelled", "released"])
def test_a_mask_that_hangs_delays_no_other_request_of_its_batch(
    way: str, masks: MaskWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks after a step are two jobs. Those behind one that hangs go on as soon as its request ends."""
    clock = Clock(monkeypatch)
    masks.advance()
    assert masks.has_begun.wait(WAIT_S)
    if way == "overdue":
        clock.forward(masks.worker)
    elif way == "cancelled":
        masks.requests["b"].is_done = True
        masks.worker.abandon(masks.requests["b"])
    else:
        masks.released.set()
    errors, jobs = masks.outcomes()
    error = errors.pop("b")
    assert set(errors.values()) == {None} and (error is None) == (way != "overdue")
    assert sorted(jobs) == (["ace", "bdf"] if way == "released" else ["ace", "b", "df"])


def test_a_request_with_slow_masks_has_a_job_of_its_own(masks: MaskWorker) -> None:
    masks.requests["b"].has_slow_mask = True
    masks.released.set()
    masks.advance()
    assert sorted(masks.outcomes()[1]) == ["adf", "b", "ce"]


def batch_of(*request_ids: str) -> tuple[list[Any], text_worker.MaskBatch]:
    requests: list[Any] = [
        SimpleNamespace(request_id=each, is_done=False, advance=lambda ids: None) for each in request_ids
    ]
    return requests, text_worker.MaskBatch([(request, (1,)) for request in requests])


def test_a_batch_that_has_not_begun_fails_as_a_whole() -> None:
    requests, batch = batch_of("a", "b")
    error = DriftError("no thread")
    computed, rest = batch.end(error)
    assert rest == () and computed.outcomes == tuple((request, error) for request in requests)
    batch.run()  # nothing is left of it
    assert batch.end(None)[0].outcomes == computed.outcomes


def test_errors_of_masks_are_those_of_their_requests() -> None:
    requests, batch = batch_of("a", "b", "c", "d")

    def fail(token_ids: tuple[int, ...]) -> None:
        raise ValueError("odd")

    requests[1].advance = fail
    requests[2].is_done, requests[2].advance = True, fail
    batch.run()
    computed, rest = batch.end(None)
    assert rest == () and [request.request_id for request, _ in computed.outcomes] == ["a", "b", "c", "d"]
    errors = [error for _, error in computed.outcomes]
    assert errors[0] is errors[2] is errors[3] is None and "odd" in str(errors[1])


def test_a_batch_that_ends_between_two_masks_has_one_outcome_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, batch = batch_of("a", "b", "c")
    note, ended = batch._note, []

    def noting(error: DriftError | None) -> None:
        note(error)
        if not ended:
            ended.append(batch.end(RequestError("late")))

    monkeypatch.setattr(batch, "_note", noting)
    batch.run()
    ((computed, rest),) = ended
    assert computed.outcomes == ((requests[0], None),)
    assert [request.request_id for request, _ in rest] == ["b", "c"]


def test_requests_fail_if_no_thread_can_compute_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(worker: TextWorker, steps: object) -> None:
        raise text_worker.out_of_threads("grammar")

    async def main() -> None:
        async with scripted_engine(WORD) as engine:
            monkeypatch.setattr(TextWorker, "advance", fail)
            with pytest.raises(RequestError, match="start a thread"):
                await engine.generate("x", grammar=Regex(WORD))
            assert (await engine.generate("x")).text == WORD

    run("asyncio", main)


def test_closing_does_not_wait_for_hanging_text_work(
    stall: Stall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The outcome of the hanging work is not sent to the engine afterwards."""
    monkeypatch.setattr(text_worker, "CLOSE_TIMEOUT_S", 0.05)

    async def main() -> None:
        engine = scripted_engine("ok")
        await engine.start()
        driver = engine._driver
        streams = [engine.generate(f"stall {index}") for index in range(3)]
        await until(lambda: len(stall.begun) == 2)
        with anyio.fail_after(120):
            await engine.aclose()
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert warning.endswith("busy text threads: prompt of req-0, prompt of req-1")
        for stream in streams:
            with pytest.raises(EngineClosed):
                await stream
        told: list[object] = []
        monkeypatch.setattr(driver._commands, "put", told.append)
        async with engine:
            assert (await engine.generate("hi")).text == "ok"
            stall.released.set()
            await until(lambda: len(text_threads()) <= text_worker.NUM_PARALLEL)
        assert told == []

    run("asyncio", main)


class Panic(BaseException):
    """A BaseException that is not an Exception, like pyo3's PanicException."""


@pytest.mark.parametrize("failure", [SystemExit(3), Panic("library"), KeyboardInterrupt()])
def test_any_exception_on_a_text_thread_fails_only_its_request(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = TextPrompt.prepare

    def failing(prompt: TextPrompt, model: ModelText) -> PreparedPrompt:
        if prompt.text == "bad":
            raise failure
        return prepare(prompt, model)

    monkeypatch.setattr(TextPrompt, "prepare", failing)

    async def main() -> None:
        config = EngineConfig(max_num_seqs=1, max_queued_requests=1, max_model_len=64, kv_cache_tokens=64)
        async with scripted_engine("ok", config=config) as engine:
            for _ in range(5):  # more often than there are threads and places in the queue
                with anyio.fail_after(120), pytest.raises(DriftError) as caught:
                    await engine.generate("bad")
                assert caught.value.__cause__ is failure
            assert (await engine.generate("good")).text == "ok"
            assert engine.stats().num_failed == 5

    run("asyncio", main)


class FailingOnce:
    """Makes a method of the worker raise MemoryError: at its first call on a text thread, or at all of them
    while `is_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, *, always: bool = False) -> None:
        self.num_failed = 0
        self.is_on = True
        original = getattr(TextWorker, method)

        def failing(worker: TextWorker, *arguments: object) -> object:
            if self.is_on and threading.current_thread().name == "drift-text":
                self.is_on = always
                self.num_failed += 1
                raise MemoryError
            return original(worker, *arguments)

        monkeypatch.setattr(TextWorker, method, failing)


FAILURES = ["_abandon_overdue", "_first_with_place", "_keep_one_idle", "_answer", "_next_job"]


@pytest.mark.parametrize("method", FAILURES)
def test_a_text_thread_that_fails_outside_of_a_job_is_replaced(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its job fails, or the next one; no request hangs, neither then nor later."""

    async def main() -> None:
        async with scripted_engine("ok") as engine:
            failing = FailingOnce(monkeypatch, method)
            with anyio.fail_after(120):
                with suppress(DriftError):  # the thread may have failed before there was a job
                    await engine.generate("hi")
                await until(lambda: failing.num_failed == 1)
                for _ in range(text_worker.NUM_PARALLEL + 1):
                    assert (await engine.generate("hi")).text == "ok"
                    assert await engine.count_tokens("hi") == 2
            assert engine.is_open
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
            "a text thread failed"
        ]

    run("asyncio", main)


@pytest.mark.parametrize("method", ["_abandon_overdue", "_first_with_place", "_next_job"])
def test_text_threads_that_always_fail_leave_no_request_waiting(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with scripted_engine("ok") as engine:
            failing = FailingOnce(monkeypatch, method, always=True)
            with anyio.fail_after(120):
                streams = [engine.generate("hi") for _ in range(5)]
                for stream in streams:
                    with pytest.raises(DriftError):
                        await stream
                with pytest.raises(DriftError):
                    await engine.count_tokens("hi")
                failing.is_on = False
                assert (await engine.generate("hi")).text == "ok"
            assert not engine._driver._text_worker._waiting

    run("asyncio", main)


def test_request_is_not_admitted_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has as many threads as the system allows."""

    async def main() -> None:
        config = EngineConfig(max_num_seqs=1, max_queued_requests=0, max_model_len=64, kv_cache_tokens=64)
        async with scripted_engine("ok", config=config) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", fail_to_start)
                for _ in range(3):
                    with pytest.raises(RequestError, match="^prompt: expected a process that can start a th"):
                        engine.generate("x")
            assert (await engine.generate("x")).text == "ok"

    run("asyncio", main)


def test_a_process_out_of_threads_serves_by_those_it_has(
    stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with scripted_engine("ok") as engine:
            assert (await engine.generate("hi")).text == "ok"
            monkeypatch.setattr(threading.Thread, "start", fail_to_start)
            with anyio.fail_after(120):
                for _ in range(3):
                    streams = [engine.generate(f"stall {index}") for index in range(5)]
                    streams[1].cancel()  # its thread is not abandoned: none could take its place
                    stall.released.set()
                    for stream in streams:
                        assert (await stream).finish_reason is not None
                    stall.released.clear()
                assert (await engine.generate("hi")).text == "ok"
            assert len(text_threads()) <= text_worker.NUM_PARALLEL

    run("asyncio", main)


def fail_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_prompt_that_cannot_fit_is_rejected_without_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with scripted_engine("ok") as engine:
            tokenizer = engine.tokenizer
            encoded: list[str] = []
            encode = tokenizer.encode
            monkeypatch.setattr(
                tokenizer,
                "encode",
                lambda text, **options: (encoded.append(text), encode(text, **options))[1],
            )
            for stream in (
                engine.generate("a b" * 100_000),
                engine.chat([{"role": "user", "content": "a b" * 100_000}]),
            ):
                with pytest.raises(PromptTooLong, match="at least .* expected at most 4095 tokens"):
                    await stream
            assert encoded == []
            longest = await engine.generate("x" * 4095, SamplingParams(max_tokens=1))
            assert longest.usage.prompt_tokens == 4095

    run("asyncio", main)
