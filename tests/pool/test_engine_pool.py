"""The pool over scripted engines: routing, failure, replay, drains, and the face of an engine."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from letters import letters, outcome, outcomes, tokens_of
from loops import WAIT_S, on_every_loop, run, until

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
    Job,
    ModelLoadError,
    NGram,
    PartialVerification,
    QueueFull,
    ReplicaFailed,
    RequestError,
    Routing,
    SamplingParams,
    Speculation,
    TokenStream,
)
from drift_sdk.driver.loops import num_forks
from drift_sdk.events import EngineStarted, RequestFinished
from drift_sdk.pool import pool_state
from drift_sdk.testing import Reply, ScriptedModel, scripted_engine

LONG = "The same beginning of every prompt. " * 40
REPLAY = Routing(replay=True)
SLOW_S = 0.005
"""Seconds of a step, of engines whose answers must not end before a test does it: 4,096 tokens take 20 s."""


def pool_of(
    number: int, reply: Any = letters, *, routing: Routing | None = None, **options: Any
) -> EnginePool:
    return EnginePool([scripted_engine(reply, **options) for _ in range(number)], routing)


def break_after(engine: BaseEngine, num_steps: int) -> None:
    """Have the engine's executor fail after so many further steps."""
    executor: Any = engine.executors[-1]  # type: ignore[attr-defined]  # of the test's engine
    collect, left = executor.collect, [num_steps]

    def collect_or_fail() -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the device is gone")

        return collect()

    executor.collect = collect_or_fail


def check_nothing_is_left(pool: EnginePool) -> None:
    assert not pool._state.traffic._live
    assert all((load.num_requests, load.num_tokens) == (0, 0) for load in pool._state.router.loads)


@on_every_loop
def test_pool_serves_with_the_face_of_an_engine(loop: str) -> None:
    async def main() -> None:
        async with pool_of(2, lambda prompt: f"to {prompt}") as pool:
            assert (await pool.generate("a", request_id="mine")).text == "to a"
            assert (await pool.chat([{"role": "user", "content": "b"}])).text == "to user: b\nassistant: "
            found = await pool.samples("c", 3)
            assert [each.text for each in found] == ["to c"] * 3
            assert len({each.request_id for each in found}) == 3
            assert [each.text async for each in pool.map(["d", Job(key=1, prompt="e")])] == ["to d", "to e"]
            assert await pool.count_tokens("four") == 4
            assert (pool.executor, pool.max_model_len, pool.is_open) == ("scripted", 4096, True)
            assert pool.tokenizer.encode("a") == [97]
            assert pool.stats().num_stopped == 7
            assert "drift_requests_submitted_total{" not in pool.metrics_text()
            assert "drift_requests_submitted_total 7.0" in pool.metrics_text()
            assert sum(pool.metrics().histograms.request.counts) == 7
            assert "replicas=2 of 2 open" in repr(pool)
            assert "2 of 2 open" in pool._repr_html_()
            check_nothing_is_left(pool)
        assert not pool.is_open
        with pytest.raises(EngineClosed, match="was closed"):
            pool.generate("a")

    run(loop, main)


async def test_500_requests_end_once_each_and_leave_nothing() -> None:
    numbers = random.Random(7)
    pool = pool_of(3, config=EngineConfig(max_num_seqs=32, max_model_len=512, kv_cache_tokens=8192))
    async with pool:
        streams, cancelled = [], set()
        for index in range(500):
            prompt = f"{LONG[: 700 * (index % 2)]}prompt {index % 50}"
            streams.append(pool.generate(prompt[:300], max_tokens=1 + index % 20, seed=index))
            if numbers.random() < 0.1:
                streams[-1].cancel()
                cancelled.add(index)
            if index % 25 == 0:
                await anyio.lowlevel.checkpoint()
        found = await outcomes(streams)
        for index, (tokens, completion) in enumerate(found):
            prompt = f"{LONG[: 700 * (index % 2)]}prompt {index % 50}"[:300]
            assert isinstance(completion, Completion)
            assert completion.token_ids == tokens
            expected = tokens_of(prompt, index, 1 + index % 20)
            if index in cancelled:
                assert expected[: len(tokens)] == tokens
            else:
                assert (tokens, completion.finish_reason) == (expected, "length")
        stats = pool.stats()
        assert stats.num_submitted == 500
        assert stats.num_length_limited + stats.num_cancelled == 500
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert all(each.num_routed > 50 for each in pool.replicas())
        check_nothing_is_left(pool)


async def test_beginnings_are_computed_once_with_affinity() -> None:
    """Eight conversations with long beginnings: each stays where its beginning is in the prefix cache."""

    async def cached_tokens(routing: Routing) -> int:
        async with pool_of(4, routing=routing) as pool:
            for turn in range(5):
                prompts = [f"{index}" * 1500 + f"turn {turn}" for index in range(8)]
                numbers = random.Random(turn)
                numbers.shuffle(prompts)
                for prompt in prompts:
                    await pool.generate(prompt, max_tokens=2)
            return pool.stats().num_cached_tokens

    with_affinity, without = await cached_tokens(Routing()), await cached_tokens(Routing(affinity=None))
    assert with_affinity == 8 * 4 * ((1500 + len("turn ")) // 16 * 16)
    assert without < with_affinity


async def hold(pool: EnginePool, prompts: Sequence[str], **options: Any) -> list[TokenStream]:
    """Submit prompts to replica 0 alone, paused, and wait until they are accepted."""
    for index in range(1, len(pool.engines)):
        await pool.drain(index)
    await pool.pause()
    streams = [pool.generate(prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
    for stream in streams:
        await stream.accepted()
    for index in range(1, len(pool.engines)):
        pool.restore(index)
    return streams


async def test_failed_replica_ends_started_streams_and_moves_others() -> None:
    """Four slots: four streams have got tokens when the replica fails, two wait."""
    config = EngineConfig(max_num_seqs=4, max_model_len=256, kv_cache_tokens=4096)
    async with pool_of(2, config=config) as pool:
        streams = await hold(pool, ["a", "b", "c", "d", "e", "f"], max_tokens=30)
        break_after(pool.engines[0], 12)
        await pool.resume()
        found = await outcomes(streams)
        for index, (tokens, end) in enumerate(found):
            expected = tokens_of("abcdef"[index], index, 30)
            if index < 4:
                assert isinstance(end, ReplicaFailed)
                assert isinstance(end.__cause__, ExecutorError)
                assert (end.replica, end.num_tokens) == (0, len(tokens))
                assert 0 < len(tokens) < 30
                assert expected[: len(tokens)] == tokens
            else:
                assert isinstance(end, Completion)
                assert (tokens, end.token_ids) == (expected, expected)
        first, second = pool.replicas()
        assert first.engine is not None
        assert (first.engine.num_running, first.engine.num_blocks, first.engine.num_failed) == (0, 0, 6)
        assert pool.stats().num_free_slots == 4 and pool.stats().num_failed == 6
        assert pool.metrics().stats.num_generated_tokens == pool.stats().num_generated_tokens
        assert (first.state, first.num_lost, first.num_moved, first.num_replayed) == ("closed", 6, 2, 0)
        assert (second.state, second.num_routed) == ("open", 2)
        assert pool.is_open
        assert (await pool.generate("g", max_tokens=3, seed=1)).token_ids == tokens_of("g", 1, 3)
        check_nothing_is_left(pool)


async def test_200_killed_streams_continue_with_the_tokens_of_an_undisturbed_run() -> None:
    pool = EnginePool([scripted_engine(letters), scripted_engine(letters, tokens_per_step=3)], REPLAY)
    async with pool:
        prompts = [f"prompt {index}" for index in range(200)]
        streams = await hold(pool, prompts, max_tokens=24, logprobs=None)
        break_after(pool.engines[0], 10)
        await pool.resume()
        found = await outcomes(streams)
        for index, (tokens, end) in enumerate(found):
            assert isinstance(end, Completion), end
            assert tokens == end.token_ids == tokens_of(prompts[index], index, 24)
            assert end.text == bytes(tokens).decode()
        first = pool.replicas()[0]
        assert (first.num_replayed, first.num_moved, first.num_lost) == (200, 0, 200)
        check_nothing_is_left(pool)


async def test_replay_of_a_drawn_seed_has_the_same_tokens() -> None:
    async with pool_of(2, routing=REPLAY) as pool:
        await pool.drain(1)
        stream = pool.generate("a", max_tokens=200)
        first = await anext(stream)
        pool.restore(1)
        await pool.restart(0)
        tokens, end = await outcome(stream)
        assert isinstance(end, Completion)
        assert first.token_ids + tokens == end.token_ids == tokens_of("a", end.seed, 200)


async def test_replay_with_other_tokens_is_an_error() -> None:
    other = scripted_engine(lambda prompt_ids, output_ids, seed: 65 + len(output_ids) % 26)
    pool = EnginePool([scripted_engine(letters), other], REPLAY)
    async with pool:
        (stream,) = await hold(pool, ["a"], max_tokens=30)
        break_after(pool.engines[0], 10)
        await pool.resume()
        tokens, end = await outcome(stream)
        assert tokens == tokens_of("a", 0, 30)[: len(tokens)]
        assert isinstance(end, ExecutorError)
        assert "other tokens" in str(end)
        await until(lambda: pool.engines[1].stats().num_running == 0)
        check_nothing_is_left(pool)


async def test_replay_is_refused_for_replicas_of_different_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["NVIDIA H200", "NVIDIA A100"])
    monkeypatch.setattr("drift_sdk.base_engine.device_name", lambda device: next(names))
    pool = pool_of(2, routing=REPLAY)
    with pytest.raises(ConfigError, match=r"replica 1 differs: device: 'NVIDIA H200' and 'NVIDIA A100'"):
        await pool.start()
    assert not any(engine.is_open for engine in pool.engines)


async def test_replay_is_refused_for_replicas_whose_tokens_depend_on_other_requests() -> None:
    partial = PartialVerification()
    config = EngineConfig(speculation=Speculation(draft=NGram(), partial_verification=partial))
    replicas = [scripted_engine("a", config=config) for _ in range(2)]
    with pytest.raises(ConfigError, match="replay=True: expected False with partial_verification"):
        await EnginePool(replicas, REPLAY).start()
    assert not any(engine.is_open for engine in replicas)


async def test_request_that_makes_replicas_fail_does_not_end_all() -> None:
    def reply(prompt: str) -> Any:
        return Reply(raises=RuntimeError("poison")) if prompt == "poison" else "fine"

    async with pool_of(5, reply) as pool:
        with pytest.raises(ReplicaFailed, match="the last of 3 that failed"):
            await pool.generate("poison")
        assert [each.state for each in pool.replicas()].count("closed") == 3
        assert (await pool.generate("a")).text == "fine"


async def test_pool_fails_with_its_last_replica() -> None:
    async with pool_of(1) as pool:
        (stream,) = await hold(pool, ["a"], max_tokens=30)
        break_after(pool.engines[0], 5)
        await pool.resume()
        tokens, end = await outcome(stream)
        assert tokens
        assert isinstance(end, ExecutorError)
        assert not pool.is_open
        with pytest.raises(ExecutorError, match="the device is gone"):
            pool.generate("a")
        await pool.restart(0)
        assert (await pool.generate("a", max_tokens=3, seed=0)).token_ids == tokens_of("a", 0, 3)


async def test_map_goes_on_after_the_failure_of_a_replica() -> None:
    async with pool_of(2) as pool:
        break_after(pool.engines[0], 6)
        prompts = [f"p{index}" for index in range(40)]
        found = [
            result
            async for result in pool.map(prompts, max_tokens=8, seed=0, max_concurrent=8, errors="yield")
        ]
        assert [result.key for result in found] == list(range(40))
        lost = [result for result in found if result.error is not None]
        assert 0 < len(lost) <= 8
        assert all(isinstance(result.error, ReplicaFailed) for result in lost)
        for result in found:
            if result.completion is not None:
                assert result.completion.token_ids == tokens_of(f"p{result.key}", 0, 8)


async def test_samples_survive_a_failure_and_keep_their_ids() -> None:
    async with pool_of(2, routing=REPLAY) as pool:
        await pool.drain(1)
        await pool.pause()
        samples = pool.samples("a", 3, seed=5, max_tokens=30, request_id="group")
        with pytest.raises(RequestError, match="no live request has"):
            pool.generate("b", request_id="group-1")
        assert await samples.accepted() == 1
        pool.restore(1)
        break_after(pool.engines[0], 8)
        await pool.resume()
        found = await samples
        assert [each.token_ids for each in found] == [tokens_of("a", 5 + index, 30) for index in range(3)]
        assert [each.request_id for each in found] == ["group-0", "group-1", "group-2"]
        check_nothing_is_left(pool)


async def test_cancel_by_id_reaches_a_moved_request() -> None:
    async with pool_of(2, routing=REPLAY, step_s=SLOW_S) as pool:
        (stream,) = await hold(pool, ["a"], max_tokens=None, request_id="mine")
        break_after(pool.engines[0], 5)
        await pool.resume()
        await until(lambda: pool.engines[1].stats().num_running == 1)
        assert pool.cancel("mine")
        tokens, end = await outcome(stream)
        assert isinstance(end, Completion)
        assert (end.finish_reason, end.token_ids) == ("cancelled", tokens)
        assert not pool.cancel("mine")
        check_nothing_is_left(pool)


async def test_full_queues_reject_at_the_call_and_others_take_over() -> None:
    config = EngineConfig(max_num_seqs=1, max_queued_requests=0, max_model_len=256, kv_cache_tokens=1024)
    async with pool_of(2, config=config, step_s=10 * SLOW_S) as pool:
        streams = [pool.generate("a", max_tokens=None) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        assert [each.num_requests for each in pool.replicas()] == [1, 1]
        with pytest.raises(QueueFull):
            pool.generate("b")
        assert pool.stats().num_rejected == pool.metrics().stats.num_rejected == 1
        for stream in streams:
            stream.cancel()
        await outcomes(streams)
        check_nothing_is_left(pool)


async def test_drain_waits_for_requests_and_keeps_new_ones_away() -> None:
    async with pool_of(2, step_s=SLOW_S) as pool:
        stream = pool.generate("a", max_tokens=None)
        index = next(each.index for each in pool.replicas() if each.num_requests)
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(pool.drain(index))
            for _ in range(3):
                await pool.generate("b", max_tokens=2)
            assert not drained.done()
            assert pool.replicas()[index].state == "drained"
            stream.cancel()
        await stream
        assert pool.replicas()[1 - index].num_routed == 3
        await pool.drain(1 - index)
        assert not pool.is_open
        with pytest.raises(EngineClosed, match="drained"):
            pool.generate("c")
        pool.restore(index)
        assert (await pool.generate("c", max_tokens=2)).finish_reason == "length"


async def test_forked_child_begins_without_the_requests_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pool_of(2, step_s=SLOW_S) as pool:
        stream = pool.generate("a", max_tokens=None, request_id="mine")
        await anext(stream)
        of_parent = pool._last_state
        with monkeypatch.context() as child, anyio.fail_after(WAIT_S):
            child.setattr(pool_state, "num_forks", lambda: num_forks() + 1)
            for index in range(2):
                await pool.drain(index)
                pool.restore(index)
            assert [(each.num_requests, each.num_routed) for each in pool.replicas()] == [(0, 0)] * 2
            assert not pool.cancel("mine")
            answer = await pool.generate("b", max_tokens=3, seed=1)
            assert answer.token_ids == tokens_of("b", 1, 3)
        pool._last_state = of_parent
        assert pool.cancel("mine") and (await stream).finish_reason == "cancelled"
        check_nothing_is_left(pool)


async def test_cancelled_drain_puts_the_replica_back() -> None:
    async with pool_of(1, step_s=SLOW_S) as pool:
        stream = pool.generate("a", max_tokens=None)
        with anyio.move_on_after(0.01):
            await pool.drain(0)
        assert pool.replicas()[0].state == "open"
        stream.cancel()
        await stream


async def test_cancelled_pause_leaves_no_replica_paused() -> None:
    """One replica is paused at once; the other is in a step that does not end before."""
    is_in_step, may_end = threading.Event(), threading.Event()

    def held(*arguments: Any) -> int:
        is_in_step.set()
        assert may_end.wait(WAIT_S)
        return letters(*arguments)

    pool = EnginePool([scripted_engine(letters), scripted_engine(held)])
    async with pool:
        await pool.drain(0)
        slow = pool.generate("a", max_tokens=3)
        await until(is_in_step.is_set)
        pool.restore(0)
        with anyio.move_on_after(0.01) as scope:
            await pool.pause()
        assert scope.cancelled_caught
        may_end.set()
        with anyio.fail_after(WAIT_S):
            assert (await pool.generate("b", max_tokens=2)).finish_reason == "length"
            await slow


async def test_restarted_replica_of_a_paused_pool_is_paused() -> None:
    async with pool_of(2) as pool:
        await pool.pause()
        await pool.restart(0)
        stream = pool.generate("a", max_tokens=2)
        await stream.accepted()
        assert all(len(engine._driver._pauses) == 1 for engine in pool.engines)  # type: ignore[attr-defined]  # all are local
        await pool.resume()
        assert (await stream).finish_reason == "length"
        await pool.sleep()
        await pool.wake()
        assert (await pool.generate("a", max_tokens=2)).finish_reason == "length"


async def test_replicas_that_are_started_again_are_as_the_others() -> None:
    """Paused in a paused pool, asleep in one that sleeps."""
    async with pool_of(2) as pool:
        for begin, end, name in (("pause", "resume", "is_paused"), ("sleep", "wake", "is_asleep")):
            await getattr(pool, begin)()
            await pool.restart(0)
            assert all(getattr(engine.stats(), name) for engine in pool.engines)
            await pool.engines[1].aclose()
            await pool.start()
            assert all(getattr(engine.stats(), name) for engine in pool.engines)
            stream = pool.generate("a", max_tokens=2)
            await stream.accepted()
            await getattr(pool, end)()
            assert not any(getattr(engine.stats(), name) for engine in pool.engines)
            assert (await stream).finish_reason == "length"
        await pool.sleep()
        await pool.aclose()
        await pool.start()
        assert not pool.stats().is_asleep


def held(
    pause: Callable[[], Awaitable[Callable[[], None]]], is_asked: anyio.Event, may_answer: anyio.Event
) -> Callable[[], Awaitable[Callable[[], None]]]:
    """A `pause` that sets `is_asked`, and answers when `may_answer` is set."""

    async def pause_held() -> Callable[[], None]:
        undo = await pause()
        is_asked.set()
        await may_answer.wait()
        return undo

    return pause_held


def is_running(engine: BaseEngine) -> bool:
    return not engine.stats().is_paused


async def test_replica_that_is_paused_late_does_not_remain_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is restarted while the pool is being paused, and that is cancelled or ended meanwhile."""
    async with pool_of(2) as pool:
        for ends_by_resume in (False, True):
            for index in range(2):
                engine, is_asked, may_answer = pool.engines[index], anyio.Event(), anyio.Event()
                await engine.aclose()
                undo = await pool._pause()
                with monkeypatch.context() as patch:
                    patch.setattr(engine, "_pause", held(engine._pause, is_asked, may_answer))
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(pool.restart(index))
                        await is_asked.wait()
                        undo()
                        if ends_by_resume:
                            await pool.resume()
                        may_answer.set()
                await until(partial(is_running, engine))


async def test_replica_is_out_of_service_while_one_of_two_drains_waits() -> None:
    async with pool_of(1, step_s=SLOW_S) as pool:
        stream = pool.generate("a", max_tokens=None)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(pool.drain(0))
            second = tasks.create_task(pool.drain(0))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            assert pool.replicas()[0].state == "drained"
            stream.cancel()
        assert second.done() and pool.replicas()[0].state == "drained"
        with anyio.move_on_after(0.0):
            await pool.drain(0)
        assert pool.replicas()[0].state == "drained"
        pool.restore(0)
        assert pool.replicas()[0].state == "open"


async def test_restored_replica_is_in_service_although_a_drain_ends_later() -> None:
    async with pool_of(1, step_s=SLOW_S) as pool:
        stream = pool.generate("a", max_tokens=None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pool.drain(0))
            await asyncio.sleep(0)
            pool.restore(0)
            assert pool.replicas()[0].state == "open"
            stream.cancel()
        assert pool.replicas()[0].state == "open"


async def test_wrong_and_unusual_prompts_have_the_outcome_that_an_engine_gives() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = EngineConfig(chat_template=template)
    question = {"role": "user", "content": "x"}
    async with EnginePool([scripted_engine("ok", config=config)]) as pool:
        items: tuple[Any, ...] = ([1], {1}, {"a": 1})
        for item in items:
            with pytest.raises(RequestError, match="prompt"):
                await pool.generate([5] * 63 + [item])
        assert (await pool.chat([{**question, "number": 10**5000}])).text == "ok"
        assert (await pool.chat([question], template_args={"x": 10**5000})).text == "ok"


@pytest.mark.parametrize("seed", range(3))
async def test_races_of_pause_drain_restart_and_close_end_every_stream(seed: int) -> None:
    numbers = random.Random(seed)
    pool = pool_of(3, routing=REPLAY)
    await pool.start()
    streams: list[TokenStream] = []

    async def submit() -> None:
        for index in range(60):
            try:
                streams.append(pool.generate(f"p{index}", max_tokens=20, seed=index))
            except EngineClosed:
                return

            await anyio.lowlevel.checkpoint()

    async def disturb(act: Callable[[], Any]) -> None:
        for _ in range(4):
            await anyio.sleep(numbers.random() * 0.005)
            try:
                result = act()
                if result is not None:
                    await result
            except (EngineClosed, DriftError):
                continue

    async def pause_and_resume() -> None:
        await pool.pause()
        await pool.resume()

    async def drain_and_restore() -> None:
        index = numbers.randrange(3)
        with anyio.move_on_after(0.01):
            await pool.drain(index)
        pool.restore(index)

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit)
            tasks.start_soon(disturb, pause_and_resume)
            tasks.start_soon(disturb, drain_and_restore)
            tasks.start_soon(disturb, lambda: pool.restart(numbers.randrange(3)))
        await pool.resume()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.aclose, 0.02)
            tasks.start_soon(pool.aclose)
        for stream in streams:
            tokens, end = await outcome(stream)
            index = int(stream.request_id.removeprefix("req-"))
            assert tokens_of(f"p{index}", index, 20)[: len(tokens)] == tokens
            assert isinstance(end, Completion | EngineClosed | ReplicaFailed)
    assert not any(engine.is_open for engine in pool.engines)
    check_nothing_is_left(pool)


async def test_failing_start_closes_all_replicas() -> None:
    model = ScriptedModel("a")

    def fail(report: Any, limits: Any = None) -> Any:
        raise ModelLoadError("no such file")

    pool = EnginePool([Engine("m", open_model=ScriptedModel("a")), Engine("m", open_model=fail)])
    with pytest.raises(ModelLoadError, match="no such file"):
        await pool.start()
    assert not any(engine.is_open for engine in pool.engines)
    assert model.executors == []


async def test_start_is_shared_and_restarts_failed_replicas() -> None:
    pool = pool_of(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.start)
        tasks.start_soon(pool.start)
    assert pool.is_open
    break_after(pool.engines[0], 0)
    await pool.drain(1)
    with pytest.raises(DriftError):
        await pool.generate("a", max_tokens=2)
    pool.restore(1)
    await until(lambda: not pool.engines[0].is_open)
    await pool.start()
    assert all(engine.is_open for engine in pool.engines)
    await pool.aclose()


async def test_restart_after_close_is_refused() -> None:
    pool = pool_of(2)
    async with pool:
        async with anyio.create_task_group() as tasks:

            async def restart() -> None:
                with pytest.raises(EngineClosed):
                    await pool.restart(0)

            tasks.start_soon(restart)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(pool.aclose)
    assert not any(engine.is_open for engine in pool.engines)


def test_streams_of_an_ended_loop_are_dropped() -> None:
    pool = pool_of(2, step_s=0.001)

    async def leave() -> None:
        await pool.start()
        stream = pool.generate("a", max_tokens=None)
        await stream.accepted()
        stream._is_cancelled = True  # as if it had outlived the loop: no cancellation by the collector

    async def look() -> None:
        await until(lambda: not pool._state.traffic._live)
        check_nothing_is_left(pool)
        await pool.aclose()

    asyncio.run(leave())
    asyncio.run(look())


def test_on_devices_makes_an_engine_for_each_device() -> None:
    pool = EnginePool.on_devices("m", EngineConfig(max_num_seqs=4), devices=["cuda:0", "cuda:1", "cpu"])
    assert [engine.config.device for engine in pool.engines] == ["cuda:0", "cuda:1", "cpu"]
    assert all(engine.config.max_num_seqs == 4 for engine in pool.engines)


async def test_events_of_all_replicas_come_one_at_a_time() -> None:
    found: list[Any] = []

    def open_model(report: Any, limits: Any = None) -> Any:
        return ScriptedModel("a")(report, limits)

    pool = EnginePool([Engine("m", on_event=found.append, open_model=ScriptedModel("a")) for _ in range(2)])
    async with pool:
        await pool.generate("a")
        await pool.generate("b")
    assert sum(isinstance(event, EngineStarted) for event in found) == 2
    assert sum(isinstance(event, RequestFinished) for event in found) == 2


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([], r"replicas=\[\]: expected 1 to 1024 engines"),
        (["ab"], r"replicas\[0\]='ab': expected an engine"),
        ([Engine("a"), Engine("b")], r"replicas\[1\].model='b': expected that of the others, 'a'"),
        (
            [Engine("a"), Engine("a", EngineConfig(max_num_seqs=2))],
            r"replicas\[1\].config.max_num_seqs=2: expected 256",
        ),
    ],
)
def test_wrong_replicas_are_refused(replicas: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnginePool(replicas)


async def test_wrong_arguments_are_refused() -> None:
    engine = Engine("a")
    with pytest.raises(ConfigError, match=r"replicas\[1\]=.*given once"):
        EnginePool([engine, engine])
    with pytest.raises(ConfigError, match="routing=3"):
        EnginePool([engine], 3)  # type: ignore[arg-type]  # refused
    with pytest.raises(ConfigError, match="devices='cpu'"):
        EnginePool.on_devices("m", devices="cpu")
    for index in (-1, 1, True, "0"):
        with pytest.raises(RequestError, match="index="):
            await EnginePool([engine]).drain(index)  # type: ignore[arg-type]  # refused
    with pytest.raises(EngineClosed, match="not open"):
        EnginePool([engine]).generate("a", SamplingParams())


async def cancelled(call: Coroutine[Any, Any, None]) -> None:
    """Begin a call and cancel it."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_pool_that_was_closed_by_a_cancelled_task_begins_again() -> None:
    pool = pool_of(2)
    async with pool:
        await pool.drain(0)
        await pool.sleep()
        await cancelled(pool.aclose())
        await pool.start()
        assert [each.state for each in pool.replicas()] == ["open", "open"]
        assert not pool.stats().is_asleep
        assert (await pool.generate("a", max_tokens=2)).finish_reason == "length"


async def test_cancelled_sleep_forgets_what_the_caches_held() -> None:
    async with pool_of(2) as pool:
        await pool.generate(LONG, max_tokens=1)
        assert any(load.prefixes._hashes for load in pool._state.router.loads)
        await cancelled(pool.sleep())
        assert not any(load.prefixes._hashes for load in pool._state.router.loads)


async def test_request_that_a_drain_has_not_seen_goes_to_another_replica() -> None:
    """Another thread drains the replica after it was chosen."""
    async with pool_of(2) as pool:
        order = pool._state.router.order

        def drained_meanwhile(*arguments: Any) -> list[int]:
            thread = threading.Thread(target=lambda: asyncio.run(pool.drain(0)))
            thread.start()
            thread.join()
            return sorted(order(*arguments))

        pool._state.router.order = drained_meanwhile  # type: ignore[method-assign]
        stream = pool.generate("a", max_tokens=2)
        assert [each.num_requests for each in pool.replicas()] == [0, 1]
        assert (await stream).finish_reason == "length"
        check_nothing_is_left(pool)
