"""Events of an engine: which there are, in which order, and what their function may do."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import anyio
import msgspec
import pytest

from drift_sdk import (
    ConfigError,
    Engine,
    EngineConfig,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    SyncEngine,
)
from drift_sdk.driver import callbacks
from drift_sdk.driver.callbacks import EventSender
from drift_sdk.events import (
    EngineFailed,
    EngineStarted,
    EngineStopped,
    Event,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestFirstToken,
    RequestPreempted,
    RequestQueued,
    RequestRejected,
)
from drift_sdk.testing import ScriptedModel

PARAMS = SamplingParams(max_tokens=64)


def scripted(on_event: Any, reply: Any = "Hello!", **fields: Any) -> Engine:
    config = EngineConfig(**{"max_model_len": 64, "kv_cache_tokens": 256, **fields})
    model = ScriptedModel(reply, config=config)
    return Engine("scripted", model.config, on_event=on_event, open_model=model)


def kinds_of(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


def test_request_from_its_call_to_its_end() -> None:
    events: list[Event] = []
    threads: set[threading.Thread] = set()

    def on_event(event: Event) -> None:
        events.append(event)
        threads.add(threading.current_thread())

    async def main() -> None:
        begin = time.time()
        async with scripted(on_event) as engine:
            stream = engine.generate("hi", PARAMS)
            completion = await stream
            with pytest.raises(PromptTooLong):
                await engine.generate("x" * 100, PARAMS)
        assert kinds_of(events) == [
            *(EngineStarted, RequestQueued, RequestAdmitted, RequestFirstToken, RequestFinished),
            *(RequestQueued, RequestFailed, EngineStopped),
        ]
        started, queued, admitted, _, finished, _, failed, _ = events
        assert started.executor == "scripted" and started.seconds >= 0
        assert {event.request_id for event in events[1:5]} == {stream.request_id} == {queued.request_id}
        assert (admitted.num_tokens, admitted.num_cached) == (2, 0)
        assert (finished.finish_reason, finished.usage) == ("stop", completion.usage)
        assert (finished.timing, finished.speculation) == (completion.timing, None)
        assert isinstance(failed.error, PromptTooLong)
        times = [event.time for event in events]
        assert times == sorted(times) and begin <= times[0] and times[-1] <= time.time()

    anyio.run(main)
    (thread,) = threads
    assert thread.name == "drift-events" and not thread.is_alive()


def test_preempted_request_is_admitted_again() -> None:
    events: list[Event] = []
    reply = lambda prompt, output, seed: 65  # noqa: E731 - never ends by itself

    async def main() -> None:
        config = {"kv_cache_tokens": 64, "block_size": 16, "max_num_seqs": 2}
        async with scripted(events.append, reply, **config) as engine:
            await engine.pause()
            streams = [engine.generate("x" * 20, PARAMS.replace(max_tokens=40)) for _ in range(2)]
            for stream in streams:
                await stream.accepted()  # so that both run at once
            await engine.resume()
            for stream in streams:
                await stream
            assert engine.stats().num_preemptions >= 1
        num_preemptions = kinds_of(events).count(RequestPreempted)
        assert kinds_of(events).count(RequestAdmitted) == 2 + num_preemptions
        first = next(index for index, event in enumerate(events) if isinstance(event, RequestPreempted))
        again = next(event for event in events[first:] if isinstance(event, RequestAdmitted))
        assert again.request_id == events[first].request_id and again.num_tokens > 20

    anyio.run(main)


def test_rejected_and_cancelled_requests() -> None:
    events: list[Event] = []

    async def main() -> None:
        async with scripted(events.append, max_num_seqs=1, max_queued_requests=1) as engine:
            await engine.pause()
            streams = [engine.generate("a", PARAMS), engine.generate("b", PARAMS)]
            with pytest.raises(QueueFull):
                engine.generate("c", PARAMS)
            streams[1].cancel()
            await engine.resume()
            for stream in streams:
                await stream
        rejected = next(event for event in events if isinstance(event, RequestRejected))
        assert isinstance(rejected.error, QueueFull)
        of = {
            name: kinds_of([e for e in events if getattr(e, "request_id", "") == name])
            for name in (streams[0].request_id, streams[1].request_id, rejected.request_id)
        }
        whole = [RequestQueued, RequestAdmitted, RequestFirstToken, RequestFinished]
        assert list(of.values()) == [whole, [RequestQueued, RequestFinished], [RequestRejected]]
        reasons = [event.finish_reason for event in events if isinstance(event, RequestFinished)]
        assert sorted(reasons) == ["cancelled", "stop"]

    anyio.run(main)


def test_failing_engine() -> None:
    events: list[Event] = []

    def fails(*_: Any) -> int:
        raise ZeroDivisionError("a fault of the device")

    def does_not_open(report: Any, limits: Any = None) -> Any:
        raise ModelLoadError("broken")

    async def main() -> None:
        engine = scripted(events.append, fails)
        await engine.start()
        with pytest.raises(Exception, match="a fault of the device"):
            await engine.generate("hi", PARAMS)
        await engine.aclose()
        assert kinds_of(events) == [
            *(EngineStarted, RequestQueued, RequestAdmitted, EngineFailed, RequestFailed, EngineStopped)
        ]
        assert isinstance(events[3].error, ZeroDivisionError)

        events.clear()
        with pytest.raises(ModelLoadError):
            await Engine("broken", on_event=events.append, open_model=does_not_open).start()
        assert kinds_of(events) == [EngineFailed]

    anyio.run(main)


def test_slow_function_delays_no_token() -> None:
    """It blocks at the first event until all requests have ended."""
    is_over = threading.Event()
    events: list[Event] = []

    def on_event(event: Event) -> None:
        is_over.wait(60)
        events.append(event)

    async def main() -> None:
        async with scripted(on_event) as engine:
            for _ in range(3):
                assert (await engine.generate("hi", PARAMS)).text == "Hello!"
            assert events == []
            is_over.set()
        assert kinds_of(events).count(RequestFinished) == 3

    anyio.run(main)


def test_function_that_raises_is_called_on_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        raise ValueError("a fault of the host")

    async def main() -> None:
        with caplog.at_level(logging.ERROR, "drift_sdk"):
            async with scripted(on_event) as engine:
                assert (await engine.generate("hi", PARAMS)).text == "Hello!"

    anyio.run(main)
    assert len(events) == 6
    (record,) = caplog.records
    assert "on_event raised an exception" in record.message
    assert record.exc_info is not None and "a fault of the host" in str(record.exc_info[1])


def test_events_are_sent_after_a_failure_of_their_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Waiting(queue.SimpleQueue[Any]):
        """Has no memory for the first event that is taken."""

        has_failed = False

        def get(self, *arguments: Any, **options: Any) -> Any:
            if not self.has_failed:
                self.has_failed = True
                raise MemoryError
            return super().get(*arguments, **options)

    found: list[Any] = []
    sender = EventSender(found.append)
    sender._waiting = Waiting()
    sender.open()
    sender.stopped()
    sender.close()
    assert [type(event) for event in found] == [EngineStopped]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_events_that_nobody_takes_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that never returns neither fills the memory nor keeps the engine open."""
    monkeypatch.setattr(callbacks, "MAX_WAITING", 4)
    monkeypatch.setattr(callbacks, "CLOSE_TIMEOUT_S", 0.05)
    is_over = threading.Event()

    async def main() -> None:
        with caplog.at_level(logging.WARNING, "drift_sdk"):
            async with scripted(lambda event: is_over.wait(60)) as engine:
                for _ in range(3):
                    await engine.generate("hi", PARAMS)

    try:
        anyio.run(main)
    finally:
        is_over.set()
    too_slow, abandoned = [record.message for record in caplog.records]
    assert too_slow.startswith("on_event is too slow: 4 events wait")
    assert abandoned.startswith("on_event did not return within")


def test_events_of_samples_and_of_an_engine_that_blocks() -> None:
    events: list[Event] = []

    async def main() -> None:
        async with scripted(events.append) as engine:
            samples = engine.samples("hi", 3, PARAMS)
            await samples
        for stream in samples:
            mine = [event for event in events if getattr(event, "request_id", "") == stream.request_id]
            assert kinds_of(mine) == [RequestQueued, RequestAdmitted, RequestFirstToken, RequestFinished]

    anyio.run(main)
    events.clear()
    model = ScriptedModel("Hello!")
    with SyncEngine("scripted", model.config, on_event=events.append, open_model=model) as engine:
        assert engine.generate("hi", request_id="mine").result().text == "Hello!"
        assert engine.metrics().stats.num_stopped == 1
    assert {event.request_id for event in events[1:-1]} == {"mine"}
    assert kinds_of(events)[0::5] == [EngineStarted, EngineStopped]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            RequestQueued(time=1.5, request_id="req-0"),
            '{"type":"RequestQueued","time":1.5,"request_id":"req-0"}',
        ),
        (
            RequestFailed(time=1.5, request_id="req-0", error=ValueError("why")),
            '{"type":"RequestFailed","time":1.5,"request_id":"req-0","error":"why"}',
        ),
    ],
)
def test_encoded_event_names_its_type(event: Event, line: str) -> None:
    assert msgspec.json.encode(event, enc_hook=str).decode() == line


def test_wrong_function_is_rejected() -> None:
    async def coroutine_function(event: Event) -> None: ...

    for wrong in (7, "print", coroutine_function):
        with pytest.raises(ConfigError, match=r"on_event=.*: expected a function that takes an Event"):
            Engine("folder", on_event=wrong)
