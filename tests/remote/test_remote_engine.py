"""Remote engines whose host is on another loop of this process: streams, faults of the channel, pools."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from letters import letters, outcome, tokens_of
from local_host import LocalHostEngine
from loops import WAIT_S, on_every_loop, run, until
from model_zoo import make_model
from placement import engine_config

from drift_sdk import (
    BaseEngine,
    Completion,
    ConfigError,
    DriftError,
    Engine,
    EngineClosed,
    EngineConfig,
    EnginePool,
    ExecutorError,
    JsonSchema,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    ReplicaFailed,
    RequestError,
    Routing,
    SamplingParams,
    TokenMachine,
    TokenState,
)
from drift_sdk.driver.prompts import TextPrompt
from drift_sdk.remote import connection
from drift_sdk.remote.connection import Connection
from drift_sdk.remote.host import portable
from drift_sdk.testing import scripted_engine

REPLAY = Routing(replay=True)
SLOW_S = 0.005
"""Seconds of a step, of engines whose answers must not end before a test does it: 4,096 tokens take 20 s."""


def engine_of(reply: Any = letters, **options: Any) -> LocalHostEngine:
    return LocalHostEngine(partial(scripted_engine, reply, **options))


def check_nothing_is_left(*engines: LocalHostEngine) -> None:
    """Neither here nor in the hosts."""
    for engine in engines:
        if engine._link is not None:
            assert not engine._link.connection._live
            assert not engine.channels[-1].host._cancels


@on_every_loop
def test_remote_engine_serves_with_the_face_of_an_engine(loop: str) -> None:
    async def main() -> None:
        async with engine_of(lambda prompt: f"to {prompt}") as engine:
            stream = engine.generate("a", request_id="mine")
            assert await stream.accepted() == 1
            assert (await stream).text == "to a"
            assert (await engine.chat([{"role": "user", "content": "b"}])).text == "to user: b\nassistant: "
            assert [each.text for each in await engine.samples("c", 3)] == ["to c"] * 3
            assert [each.text async for each in engine.map(["d", "e"])] == ["to d", "to e"]
            assert await engine.count_tokens("four") == 4
            assert (engine.executor, engine.max_model_len, engine.is_open) == ("scripted", 4096, True)
            assert engine.tokenizer.encode("a") == [97]
            await until(lambda: engine.stats().num_stopped == 7)
            assert "drift_requests_submitted_total 7.0" in engine.metrics_text()
            assert "state=open" in repr(engine) and "open" in engine._repr_html_()
            with pytest.raises(PromptTooLong):
                await engine.generate("x" * 5000)
            await engine.pause()
            held = engine.generate("f")
            await held.accepted()
            assert engine.channels[-1].host._engine._driver._pauses  # type: ignore[attr-defined]
            await engine.resume()
            assert (await held).text == "to f"
            await engine.sleep()
            await engine.wake()
            assert (await engine.generate("g")).text == "to g"
            check_nothing_is_left(engine)
        with pytest.raises(EngineClosed, match="was closed"):
            engine.generate("a")

    run(loop, main)


async def test_500_requests_over_a_faulty_channel_end_once_each() -> None:
    """Every fifth call of either kind does not reach the host, or its answer is lost."""
    numbers = random.Random(3)
    connection_pause, connection.RETRY_PAUSE_S = connection.RETRY_PAUSE_S, 0.001
    try:
        async with engine_of() as engine:
            engine.channels[-1].faults = lambda method: (
                numbers.choice(["before", "after"]) if numbers.random() < 0.2 else None
            )
            streams = []
            for index in range(500):
                streams.append(engine.generate(f"p{index}", max_tokens=1 + index % 20, seed=index))
                if index % 10 == 0:
                    streams[-1].cancel()
                if index % 50 == 0:
                    await anyio.sleep(0.001)
            found = await asyncio.gather(*map(outcome, streams))
            for index, (tokens, end) in enumerate(found):
                assert isinstance(end, Completion)
                expected = tokens_of(f"p{index}", index, 1 + index % 20)
                assert tokens == end.token_ids == expected[: len(tokens)]
                assert end.finish_reason == "cancelled" or tokens == expected
            check_nothing_is_left(engine)
            stats = engine.channels[-1].host._engine.stats()
            assert stats.num_submitted == 500
            assert (stats.num_running, stats.num_waiting) == (0, 0)
    finally:
        connection.RETRY_PAUSE_S = connection_pause


async def test_cancellation_reaches_the_host() -> None:
    async with engine_of(step_s=SLOW_S) as engine:
        stream = engine.generate("a", max_tokens=None, request_id="mine")
        await anext(stream)
        assert engine.cancel("mine")
        tokens, end = await outcome(stream)
        assert isinstance(end, Completion) and end.finish_reason == "cancelled"
        assert not engine.cancel("mine")
        async with engine.generate("a", max_tokens=None) as stream:
            await anext(stream)
        await until(lambda: not engine.channels[-1].host._cancels)
        assert engine.channels[-1].host._engine.stats().num_cancelled == 2


async def test_killed_host_ends_streams_with_an_error_and_can_be_started_again() -> None:
    async with engine_of(step_s=SLOW_S) as engine:
        stream = engine.generate("a", max_tokens=None)
        await anext(stream)
        engine.kill()
        _, end = await outcome(stream)
        assert isinstance(end, ExecutorError)
        assert "the engine's host is lost: killed" in str(end)
        assert not engine.is_open
        with pytest.raises(ExecutorError, match="host is lost"):
            engine.generate("a")
        with pytest.raises(ExecutorError, match="host is lost"):
            await engine.pause()
        await engine.start()
        assert (await engine.generate("a", max_tokens=3, seed=0)).token_ids == tokens_of("a", 0, 3)
        check_nothing_is_left(engine)


async def test_requests_of_a_lost_host_are_counted() -> None:
    """Also those that came or ended after the last statistics that it sent."""
    async with engine_of(step_s=SLOW_S) as engine:
        assert (await engine.generate("a", max_tokens=1)).finish_reason == "length"
        with pytest.raises(PromptTooLong):
            await engine.generate("x" * 5000)
        await until(lambda: engine.stats().num_submitted == 2)
        engine.channels[-1].host._new_metrics = lambda: None  # type: ignore[method-assign]
        lost = [engine.generate("a", max_tokens=None) for _ in range(3)]
        cancelled = engine.generate("a", max_tokens=None)
        for stream in (*lost, cancelled):
            await anext(stream)
        cancelled.cancel()
        await cancelled
        assert (await engine.generate("a", max_tokens=1)).finish_reason == "length"
        engine.kill()
        for stream in lost:
            _, end = await outcome(stream)
            assert isinstance(end, ExecutorError)
        stats = engine.stats()
        assert (stats.num_submitted, stats.num_running, stats.num_free_slots) == (7, 0, 0)
        assert (stats.num_length_limited, stats.num_cancelled, stats.num_failed) == (2, 1, 4)


async def test_unreachable_host_counts_as_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_S", 0.02)
    monkeypatch.setattr(connection, "RETRY_PAUSE_S", 0.001)
    async with engine_of(step_s=SLOW_S) as engine:
        stream = engine.generate("a", max_tokens=None)
        await anext(stream)
        engine.channels[-1].faults = lambda method: "before"
        _, end = await outcome(stream)
        assert isinstance(end, ExecutorError)
        assert "not reached for 0.02 s" in str(end)


async def test_unread_chunks_are_joined_on_the_host() -> None:
    """While the caller's loop is blocked, the host's tokens do not come one by one."""
    async with engine_of(tokens_per_step=1) as engine:
        stream = engine.generate("a", max_tokens=2000, seed=0)
        num_before = engine.channels[-1].num_calls.get("updates", 0)
        host = engine.channels[-1].host._engine
        while host.stats().num_length_limited == 0:
            pass  # the loop is blocked until the host has generated everything
        assert engine.channels[-1].num_calls["updates"] - num_before < 1000
        tokens, end = await outcome(stream)
        assert tokens == tokens_of("a", 0, 2000)


async def test_full_queue_is_rejected_at_the_call() -> None:
    config = EngineConfig(max_num_seqs=2, max_queued_requests=1, max_model_len=256, kv_cache_tokens=1024)
    async with engine_of(config=config, step_s=SLOW_S) as engine:
        streams = [engine.generate("a", max_tokens=None) for _ in range(3)]
        with pytest.raises(QueueFull, match="3 requests are live"):
            engine.generate("b")
        assert engine.stats().num_rejected == 1
        streams.pop().cancel()
        streams.append(engine.generate("c", max_tokens=None))  # the cancelled one has left its place
        assert engine.cancel(streams[-1].request_id)
        last = engine.generate("b", max_tokens=2)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*map(outcome, streams))
        assert (await last).finish_reason == "length"


async def test_request_that_cannot_be_pickled_fails_alone() -> None:
    class LocalPrompt(TextPrompt):
        """Of a class that pickle cannot find."""

    async with engine_of() as engine:
        wrong = engine._submit(LocalPrompt("a"), SamplingParams(max_tokens=3), None)
        good = engine.generate("b", max_tokens=3, seed=0)
        _, end = await outcome(wrong)
        assert isinstance(end, RequestError) and "that can be sent" in str(end)
        assert (await good).token_ids == tokens_of("b", 0, 3)
        with pytest.raises(RequestError, match="that can be sent"):
            await engine._count_tokens(LocalPrompt("a"))
        check_nothing_is_left(engine)


async def test_answer_is_decoded_into_a_type_that_the_host_cannot_import() -> None:
    class Person(msgspec.Struct):
        """Of a program's main module, say."""

        name: str

    async with engine_of('{"name": "Ada"}') as engine:
        completion = await engine.generate("a", max_tokens=None, grammar=JsonSchema(Person))
        assert completion.parsed == Person("Ada") and completion.schema == JsonSchema(Person)
        plain = JsonSchema({"type": "object"})
        assert (await engine.generate("a", max_tokens=None, grammar=plain)).schema == plain
        assert (await engine.generate("a", max_tokens=3, grammar=JsonSchema(Person))).schema is None


async def test_host_that_does_not_close_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSE_S", 0.01)
    engine = engine_of(step_s=SLOW_S)
    await engine.start()
    cut_off = engine.generate("a", max_tokens=None)
    await anext(cut_off)

    async def hang(drain: float) -> None:
        await asyncio.sleep(WAIT_S)

    monkeypatch.setattr(engine.channels[-1].host, "aclose", hang)
    with anyio.fail_after(WAIT_S / 2):
        await engine.aclose()
    assert engine.channels[-1].is_dead
    _, end = await outcome(cut_off)
    assert isinstance(end, EngineClosed)


async def test_host_that_fails_to_close_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    await engine.start()

    async def fail(drain: float) -> None:
        raise ExecutorError("not closed")

    monkeypatch.setattr(engine.channels[-1].host, "aclose", fail)
    with pytest.raises(ExecutorError, match="not closed"):
        await engine.aclose()
    assert engine.channels[-1].is_dead and not engine.is_open
    async with engine:
        assert (await engine.generate("a", max_tokens=9, seed=1)).token_ids == tokens_of("a", 1, 9)


async def test_close_ends_streams_and_is_idempotent() -> None:
    engine = engine_of(step_s=SLOW_S)
    await engine.start()
    await engine.start()
    assert len(engine.channels) == 1
    cut_off = engine.generate("a", max_tokens=None)
    await anext(cut_off)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.aclose, 0.01)
        tasks.start_soon(engine.aclose, 0.01)
    _, end = await outcome(cut_off)
    assert isinstance(end, EngineClosed)
    await engine.aclose()
    await engine.start()
    finishing = engine.generate("b", max_tokens=50, seed=0)
    await engine.aclose(drain=WAIT_S)
    assert (await finishing).token_ids == tokens_of("b", 0, 50)


@on_every_loop
def test_concurrent_starts_and_closes_all_end(loop: str) -> None:
    """In any order every call ends, and after the last close no host is left."""
    numbers = random.Random(5)

    async def main() -> None:
        engine = engine_of(step_s=0.0005)
        ends: list[str] = []

        async def start(cancel_after_s: float | None) -> None:
            with anyio.move_on_after(cancel_after_s) as scope:
                try:
                    await engine.start()
                    ends.append("started")
                    await engine.generate("x", max_tokens=2)
                except EngineClosed:
                    ends.append("closed")
            if scope.cancelled_caught:
                ends.append("cancelled")

        for _ in range(10):
            with anyio.fail_after(WAIT_S):
                async with anyio.create_task_group() as tasks:
                    for _ in range(8):
                        if numbers.random() < 0.6:
                            tasks.start_soon(start, numbers.choice([None, 0.0, 0.002, 0.01]))
                        else:
                            tasks.start_soon(engine.aclose, numbers.choice([0.0, 0.01]))
                        if numbers.random() < 0.5:
                            await anyio.sleep(numbers.choice([0.0, 0.005]))
                await engine.aclose()
            assert not engine.is_open and all(channel.is_dead for channel in engine.channels)
        assert {"started", "closed", "cancelled"} <= set(ends)

    run(loop, main)


async def test_errors_of_starting_are_raised_and_end_the_host() -> None:
    def fail() -> BaseEngine:
        engine = scripted_engine("a")

        def open_model(report: Any, limits: Any = None) -> Any:
            raise ModelLoadError("no such file")

        engine._open_model = open_model
        return engine

    engine = LocalHostEngine(fail)
    with pytest.raises(ModelLoadError, match="no such file"):
        await engine.start()
    assert engine.channels[-1].is_dead
    assert "not started" in repr(engine)


async def test_pool_of_remote_engines_replays_what_a_killed_host_had() -> None:
    engines = [engine_of(step_s=SLOW_S), engine_of(tokens_per_step=3)]
    pool = EnginePool(engines, REPLAY)
    async with pool:
        await pool.drain(1)
        await pool.pause()
        streams = [pool.generate(f"p{index}", max_tokens=400, seed=index) for index in range(40)]
        await asyncio.gather(*(stream.accepted() for stream in streams))
        pool.restore(1)
        await pool.resume()
        first = [await anext(stream) for stream in streams]
        engines[0].kill()
        found = await asyncio.gather(*map(outcome, streams))
        for index, (tokens, end) in enumerate(found):
            assert isinstance(end, Completion)
            assert first[index].token_ids + tokens == end.token_ids == tokens_of(f"p{index}", index, 400)
        stats = pool.replicas()
        assert stats[0].state == "closed"
        assert 0 < stats[0].num_lost == stats[0].num_replayed + stats[0].num_moved
        await pool.restart(0)
        assert pool.replicas()[0].state == "open"
        check_nothing_is_left(*engines)


async def test_pool_of_remote_engines_without_replay_names_the_replica() -> None:
    engines = [engine_of(step_s=SLOW_S), engine_of(step_s=SLOW_S)]
    async with EnginePool(engines) as pool:
        await pool.drain(1)
        stream = pool.generate("a", max_tokens=None)
        await anext(stream)
        pool.restore(1)
        engines[0].kill()
        _, end = await outcome(stream)
        assert isinstance(end, ReplicaFailed)
        assert end.replica == 0
        assert (await pool.generate("b", max_tokens=2)).finish_reason == "length"


async def test_failure_of_the_engine_in_its_host_is_that_of_a_replica() -> None:
    engines = [engine_of(step_s=SLOW_S), engine_of(step_s=SLOW_S)]
    async with EnginePool(engines) as pool:
        await pool.drain(1)
        stream = pool.generate("a", max_tokens=None)
        await anext(stream)
        pool.restore(1)

        def fail() -> Any:
            raise RuntimeError("the device is gone")

        engines[0].channels[-1].host._engine.executors[-1].collect = fail  # type: ignore[attr-defined]
        _, end = await outcome(stream)
        assert isinstance(end, ReplicaFailed) and "the device is gone" in str(end)
        assert [each.state for each in pool.replicas()] == ["closed", "open"]
        assert (await pool.generate("b", max_tokens=2)).finish_reason == "length"
        await pool.start()
        assert [each.state for each in pool.replicas()] == ["open", "open"]
        assert engines[0].channels[0].is_dead and len(engines[0].channels) == 2


def test_requests_of_an_ended_loop_are_cancelled_on_the_host() -> None:
    engine = engine_of(step_s=0.001)

    async def leave() -> None:
        await engine.start()
        stream = engine.generate("a", max_tokens=None)
        await anext(stream)
        stream._is_cancelled = True  # as if it had outlived the loop: no cancellation by the collector

    async def look() -> None:
        await until(lambda: not engine.channels[-1].host._cancels)
        check_nothing_is_left(engine)
        await engine.aclose()

    asyncio.run(leave())
    asyncio.run(look())


def test_errors_that_cannot_be_pickled_become_plain_ones() -> None:
    wrong = ConfigError.of("field", lambda: None, "a value")
    found = portable(wrong)
    assert type(found) is DriftError and "ConfigError: field=" in str(found)
    assert portable(None) is None
    error = QueueFull("full")
    assert portable(error) is error


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="config=3"):
        LocalHostEngine(partial(scripted_engine, "a"), 3)  # type: ignore[arg-type]


async def test_closed_connection_stays_closed_when_a_batch_of_an_open_host_comes() -> None:
    """The batch is read by another thread than that which closes."""
    closing = Connection(None, None, None, None)  # type: ignore[arg-type]

    class Batch:
        news, metrics = (), None

        @property
        def is_open(self) -> bool:
            closing.close()
            return True

    assert closing.is_open
    await closing._hand_out(Batch())  # type: ignore[arg-type]
    assert not closing.is_open


async def test_news_for_a_loop_that_does_not_run_leave_no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that has left its loop, and does not close it."""
    following = Connection(None, None, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(connection, "LOOP_LAG_S", 0.01)
    monkeypatch.setattr(following, "_post", lambda news: [asyncio.Event(), asyncio.Event()])

    class Batch:
        news, metrics, is_open = (), None, True

    before = asyncio.all_tasks()
    await following._hand_out(Batch())  # type: ignore[arg-type]
    assert asyncio.all_tasks() == before


def test_embeddings_and_decisions_are_those_of_the_engine(tmp_path: Path) -> None:
    make_model(3, tmp_path)
    config = engine_config(max_model_len=64, max_num_seqs=1)  # equal batches, equal bits
    prompts, choices = [[5, 6, 7], [8] * 40], [(7, 8), (9,)]

    async def main() -> None:
        async with (
            Engine(tmp_path, config) as engine,
            LocalHostEngine(partial(Engine, tmp_path, config)) as remote,
        ):
            for pooling in ("last", "mean", "all"):
                assert await remote.embed(prompts, pooling=pooling) == await engine.embed(
                    prompts, pooling=pooling
                )
            found = await remote.decide(prompts[1], choices)
            assert found == await engine.decide(prompts[1], choices) and found.logprobs[0] < 0
            machine = TokenMachine((TokenState(allowed=(7,)),))
            assert (await remote.generate([5], max_tokens=2, logits_processors=[machine])).token_ids == (7, 7)
            for options in ({"stop_when": max}, {"logits_processors": [max]}):
                with pytest.raises(RequestError, match="the engine runs in another process"):
                    remote.generate([5], **options)
            check_nothing_is_left(remote)

    anyio.run(main)
