"""Streams of a scripted model on asyncio, uvloop and trio."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import anyio
import pytest
from loops import WAIT_S, num_tasks, on_every_loop, run, until, with_checkpoints

from drift_sdk import (
    Chunk,
    EngineClosed,
    EngineConfig,
    ExecutorError,
    PromptTooLong,
    QueueFull,
    RequestError,
    SamplingParams,
    TokenStream,
)
from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.prompts import ModelText
from drift_sdk.driver.requests import Request
from drift_sdk.stream import updates_of
from drift_sdk.testing import EOS_TOKEN_ID, ScriptedEngine, scripted_engine

TEXT = "Grüße, 世界! 🎉 That is all."
ENDLESS = SamplingParams(max_tokens=None)


def endless(prompt_ids, output_ids, seed) -> int:
    return ord("a") + len(output_ids) % 26


def is_idle(engine: ScriptedEngine) -> bool:
    stats, limits = engine.stats(), engine.executors[-1].limits
    return (
        stats.num_running == stats.num_waiting == 0
        and stats.num_free_slots == limits.max_num_seqs
        and stats.num_free_blocks == limits.num_blocks
    )


@on_every_loop
def test_chunks_join_to_the_completion(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(TEXT) as engine:
            stream = engine.generate("hi", SamplingParams(logprobs=0))
            chunks = [chunk async for chunk in stream]
            completion = await stream
            assert "".join(chunk.text for chunk in chunks) == completion.text == TEXT
            assert tuple(t for chunk in chunks for t in chunk.token_ids) == completion.token_ids
            assert completion.token_ids == (*TEXT.encode(), EOS_TOKEN_ID)
            assert tuple(e for chunk in chunks for e in chunk.logprobs or ()) == completion.logprobs
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].finish_reason == completion.finish_reason == "stop"
            assert completion.stop_reason == EOS_TOKEN_ID
            assert completion.usage.prompt_tokens == 2
            assert completion.usage.completion_tokens == len(TEXT.encode()) + 1
            assert await stream is completion

    run(loop, main)


@on_every_loop
def test_unread_tokens_are_joined_for_a_slow_reader(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(endless) as engine:
            slow = engine.generate("slow", SamplingParams(max_tokens=500))
            fast = await engine.generate("fast", SamplingParams(max_tokens=500))
            await slow.completion()
            chunks = [chunk async for chunk in slow]
            assert len(chunks) == 1
            assert chunks[0].text == fast.text
            assert isinstance(chunks[0], Chunk)

    run(loop, main)


async def test_stream_cannot_be_copied() -> None:
    async with scripted_engine("fine") as engine:
        stream = engine.generate("x")
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="TokenStream cannot be copied or pickled"):
                duplicate(stream)
        assert (await stream).text == "fine"


@on_every_loop
def test_two_concurrent_iterations_are_rejected(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(endless, step_s=0.01) as engine, engine.generate("x", ENDLESS) as stream:
            has_begun = anyio.Event()
            async with anyio.create_task_group() as tasks:

                async def read() -> None:
                    async for _ in stream:
                        has_begun.set()  # the next wait begins before any other task runs

                tasks.start_soon(read)
                await has_begun.wait()
                with pytest.raises(RuntimeError, match="iterated already"):
                    await anext(stream)
                tasks.cancel_scope.cancel()

    run(loop, main)


@on_every_loop
@pytest.mark.parametrize("other", ["asyncio", "trio"])
@pytest.mark.parametrize("how", ["anext", "await", "completion"])
def test_reading_on_another_event_loop_is_rejected_at_once(loop: str, other: str, how: str) -> None:
    """The request goes on, and its own loop can read it."""

    async def main() -> None:
        async with scripted_engine(TEXT, step_s=0.001) as engine:
            stream = engine.generate("x")
            errors: list[BaseException] = []

            async def read_elsewhere() -> None:
                try:
                    if how == "anext":
                        await anext(stream)
                    elif how == "await":
                        await stream
                    else:
                        await stream.completion()
                except RuntimeError as error:
                    errors.append(error)

            await anyio.to_thread.run_sync(run, other, read_elsewhere)
            (error,) = errors
            assert "belongs to another event loop" in str(error)
            assert (await stream).text == TEXT
            await anyio.to_thread.run_sync(run, other, read_elsewhere)
            assert len(errors) == 2

    run(loop, main)


@on_every_loop
def test_timeouts_between_tokens_lose_no_token_under_async_with(loop: str) -> None:
    is_due = threading.Semaphore(0)

    def on_demand(prompt_ids, output_ids, seed) -> int:
        assert is_due.acquire(timeout=WAIT_S)
        return [*TEXT.encode(), EOS_TOKEN_ID][len(output_ids)]

    async def main() -> None:
        async with scripted_engine(on_demand) as engine, engine.generate("x") as stream:
            text, num_timeouts = "", 0
            while True:
                try:
                    with anyio.fail_after(0.001):
                        text += (await anext(stream)).text
                except TimeoutError:
                    num_timeouts += 1
                    is_due.release()
                except StopAsyncIteration:
                    break
            assert num_timeouts > len(TEXT.encode())
            assert text == TEXT

    run(loop, main)


@on_every_loop
@pytest.mark.parametrize("how", ["anext", "await", "completion"])
def test_cancelled_wait_cancels_a_stream_outside_async_with(loop: str, how: str) -> None:
    async def main() -> None:
        async with scripted_engine(endless, step_s=0.001) as engine:
            stream = engine.generate("x", ENDLESS)
            with anyio.move_on_after(0.02) as scope:
                if how == "anext":
                    async for _ in stream:
                        pass
                elif how == "await":
                    await stream
                else:
                    await stream.completion()
            assert scope.cancelled_caught
            await until(lambda: is_idle(engine))
            assert (await stream).finish_reason == "cancelled"

    run(loop, main)


@on_every_loop
@pytest.mark.parametrize("has_chunk", [False, True])
def test_a_cancelled_task_reads_no_chunk(loop: str, has_chunk: bool) -> None:
    """A task in a cancelled scope, whether a chunk has come or not. Its chunk is read afterwards."""

    async def main() -> None:
        async with (
            scripted_engine(endless, step_s=0.001) as engine,
            engine.generate("x", ENDLESS) as stream,
        ):
            await anext(stream)
            updates = updates_of(stream)
            await until(lambda: updates.has_chunk)
            await engine.pause()
            if not has_chunk:
                await anext(stream)
            assert updates.has_chunk == has_chunk
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anext(stream)
            assert scope.cancelled_caught
            await engine.resume()
            assert (await anext(stream)).text

    run(loop, main)


@on_every_loop
def test_leaving_the_async_with_block_cancels(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(endless, step_s=0.001) as engine:
            async with engine.generate("x", ENDLESS) as stream:
                first = await anext(stream)
            await until(lambda: is_idle(engine))
            completion = await stream
            assert completion.finish_reason == "cancelled"
            assert completion.text.startswith(first.text)
            rest = [chunk async for chunk in stream]
            assert rest[-1].finish_reason == "cancelled"
            assert first.text + "".join(chunk.text for chunk in rest) == completion.text

    run(loop, main)


@on_every_loop
def test_dropping_the_last_reference_cancels_with_a_warning(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(endless, step_s=0.001) as engine:
            with pytest.warns(ResourceWarning, match="garbage-collected before it ended"):
                stream = engine.generate("x", ENDLESS)
                await anext(stream)
                del stream
                gc.collect()
            await until(lambda: is_idle(engine))

    run(loop, main)


@on_every_loop
def test_cancel_from_another_thread_is_idempotent(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(endless, step_s=0.001) as engine:
            stream = engine.generate("x", ENDLESS)
            await anext(stream)
            threads = [threading.Thread(target=stream.cancel) for _ in range(4)]
            for thread in threads:
                thread.start()
            assert (await stream).finish_reason == "cancelled"
            for thread in threads:
                thread.join()
            await stream.aclose()

    run(loop, main)


@on_every_loop
@pytest.mark.parametrize("is_entered", [False, True])
def test_cancel_at_every_checkpoint(loop: str, is_entered: bool) -> None:
    """A stream cancelled at any of its checkpoints frees its slot and blocks, and the engine goes on. A token
    is generated when those before it have been read, so that the reader waits for each."""
    num_unread: dict[bytes, threading.Semaphore] = {}  # by prompt: a step of the one before may be in flight

    def paced(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        semaphore = num_unread.get(bytes(prompt_ids))
        if semaphore is not None:
            assert semaphore.acquire(timeout=WAIT_S)
        return [*TEXT.encode(), EOS_TOKEN_ID][len(output_ids)]

    async def read(stream: TokenStream, semaphore: threading.Semaphore) -> None:
        async for chunk in stream:
            semaphore.release(len(chunk.token_ids))
        await stream

    async def consume(engine: ScriptedEngine, prompt: str) -> None:
        semaphore = num_unread[prompt.encode()] = threading.Semaphore(1)
        try:
            if is_entered:
                async with engine.generate(prompt) as stream:
                    await read(stream, semaphore)
            else:
                await read(engine.generate(prompt), semaphore)
        finally:
            semaphore.release(2)  # a step may wait, and another be in flight

    async def main() -> None:
        async with scripted_engine(paced) as engine:
            tasks_before = num_tasks()
            for nth in itertools.count(1):
                counter = itertools.count(1)
                with anyio.CancelScope() as scope:

                    def on_checkpoint(
                        nth: int = nth, counter: itertools.count = counter, scope: anyio.CancelScope = scope
                    ) -> None:
                        if next(counter) == nth:
                            scope.cancel()

                    await with_checkpoints(consume(engine, f"prompt {nth}"), on_checkpoint)
                await until(lambda: is_idle(engine))
                assert num_tasks() == tasks_before
                if not scope.cancelled_caught:
                    break
                if nth % 8 == 0:
                    assert (await engine.generate("control")).text == TEXT
            assert nth > len(TEXT.encode())
            assert (await engine.generate("after")).text == TEXT

    run(loop, main)


@on_every_loop
def test_blocked_event_loop_does_not_stop_the_steps(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(endless, step_s=0.005) as engine:
            async with engine.generate("x", ENDLESS) as stream:
                await anext(stream)
                before = engine.executors[0].num_steps
                while engine.executors[0].num_steps - before <= 60:
                    time.sleep(0.01)  # noqa: ASYNC251 - the event loop is to be blocked
                assert len((await anext(stream)).token_ids) > 50

    run(loop, main)


@on_every_loop
def test_stop_strings_end_generation_and_cut_the_text(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("one two three four") as engine:
            stopped = await engine.generate("x", SamplingParams(stop=("three", "fur")))
            assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("one two ", "stop", "three")
            assert stopped.token_ids == tuple(b"one two three")
            kept = await engine.generate("x", SamplingParams(stop="three", include_stop=True))
            assert kept.text == "one two three"
            by_id = await engine.generate("x", SamplingParams(stop_token_ids=(ord("w"),)))
            assert (by_id.text, by_id.stop_reason) == ("one t", ord("w"))
            held = await engine.generate("x", SamplingParams(stop="four!"))
            assert held.text == "one two three four"
            await until(lambda: is_idle(engine))

    run(loop, main)


def test_stop_string_may_end_with_a_part_of_a_character() -> None:
    """U+FFFD stands for a part of a character when no more tokens come."""
    part = "é".encode()[0]

    def reply(prompt_ids, output_ids, seed) -> int:
        return [97, 98, part, EOS_TOKEN_ID][len(output_ids)]

    async def main() -> None:
        async with scripted_engine(reply) as engine:
            for stop, expected in (("\ufffd", "ab"), ("b\ufffd", "a")):
                for options in ({}, {"max_tokens": 3}, {"max_tokens": 3, "min_tokens": 1}, {"logprobs": 0}):
                    found = await engine.generate("x", stop=stop, **options)
                    assert (found.text, found.finish_reason, found.stop_reason) == (expected, "stop", stop)
                    assert found.token_ids == (97, 98, part)
                    assert found.logprobs is None or len(found.logprobs) == 3
            for options in ({"stop": "\ufffd", "min_tokens": 3}, {"stop": "x"}):
                found = await engine.generate("x", max_tokens=3, **options)
                assert (found.text, found.finish_reason, found.stop_reason) == ("ab\ufffd", "length", None)
            found = await engine.generate("x", stop="b\ufffd", include_stop=True, max_tokens=3)
            assert (found.text, found.stop_reason) == ("ab\ufffd", "b\ufffd")

    run("asyncio", main)


@on_every_loop
@pytest.mark.parametrize("tokens_per_step", [2, 5])
def test_tokens_behind_a_stop_string_are_left_out(loop: str, tokens_per_step: int) -> None:
    async def main() -> None:
        async with scripted_engine("one two three four", tokens_per_step=tokens_per_step) as engine:
            completion = await engine.generate("x", SamplingParams(stop="two", logprobs=0))
            assert completion.text == "one "
            assert completion.token_ids == tuple(b"one two")
            assert len(completion.logprobs) == len(completion.token_ids)
            assert (await engine.generate("x", SamplingParams(max_tokens=6))).text == "one tw"
            await until(lambda: is_idle(engine))

    run(loop, main)


@on_every_loop
def test_ignore_eos_and_length_limits(loop: str) -> None:
    async def main() -> None:
        config = EngineConfig(max_model_len=64, kv_cache_tokens=256)
        async with scripted_engine("ab", config=config) as engine:
            full = await engine.generate("x" * 10, SamplingParams(max_tokens=None, ignore_eos=True))
            assert full.finish_reason == "length"
            assert full.usage.completion_tokens == 54
            longest = engine.generate("x" * 63)
            assert (await longest).usage.completion_tokens == 1
            for prompt in ("x" * 64, [1] * 200):
                with pytest.raises(PromptTooLong, match="at most 63 tokens") as caught:
                    await engine.generate(prompt)
                assert caught.value.field == "prompt"

    run(loop, main)


@on_every_loop
def test_wrong_prompts_fail_only_their_own_requests(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("fine") as engine:
            for prompt in (7, None, b"bytes", {1, 2}):
                with pytest.raises(RequestError, match="prompt="):
                    engine.generate(prompt)
            with pytest.raises(RequestError, match="params="):
                engine.generate("x", {"max_tokens": 3})
            with pytest.raises(RequestError, match="messages="):
                engine.chat("hi")
            for ids in ([], [-1], [257], ["a"], [True]):
                with pytest.raises(RequestError, match=r"^prompt(\[0\])?="):
                    await engine.generate(ids)
            with pytest.raises(RequestError, match="messages"):
                await engine.chat([])
            assert (await engine.generate("x")).text == "fine"
            assert (await engine.chat([{"role": "user", "content": "hi"}])).text == "fine"
            await until(lambda: is_idle(engine))

    run(loop, main)


@on_every_loop
def test_later_changes_of_arguments_have_no_effect(loop: str) -> None:
    """The text threads are slow, so tokenising has not begun when the caller changes its arguments."""

    def echo(prompt_ids, output_ids, seed) -> int:
        return prompt_ids[len(output_ids)] if len(output_ids) < len(prompt_ids) else EOS_TOKEN_ID

    template = (
        "{{ messages[0]['content'] }} {{ messages[0]['parts'][0]['text'] }} {{ messages | length }} "
        "{{ tools[0]['function']['name'] }} {{ tools | length }} {{ style['tone'] }}"
    )

    async def main() -> None:
        config = EngineConfig(max_model_len=512, kv_cache_tokens=4096, chat_template=template)
        async with scripted_engine(echo, config=config) as engine:
            await engine.pause()
            prompt = [1, 2, 3]
            generated = engine.generate(prompt)
            prompt[0] = 99
            prompt.append(4)
            message = {"role": "user", "content": "hi", "parts": [{"text": "part"}]}
            messages = [message]
            tools = [{"type": "function", "function": {"name": "look"}}]
            args = {"style": {"tone": "calm"}}
            chat = engine.chat(messages, tools=tools, template_args=args)
            messages.append({"role": "user", "content": "more"})
            message["content"] = message["parts"][0]["text"] = "changed"
            tools[0]["function"]["name"] = "changed"
            tools.clear()
            args["style"]["tone"] = "changed"
            args.clear()
            await engine.resume()
            assert (await generated).token_ids[:3] == (1, 2, 3)
            assert len((await generated).token_ids) == 4
            assert (await chat).text == "hi part 1 look 1 calm"

    with slow_text():
        run(loop, main)


def test_chat_rejects_arguments_that_are_not_plain_data() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]

    async def main() -> None:
        async with scripted_engine("fine") as engine:
            message = {"role": "user", "content": "hi"}
            for field, arguments in (
                ("messages", {"messages": [{**message, "parts": iter("ab")}]}),
                ("messages", {"messages": [{**message, "parts": deep}]}),
                ("tools", {"messages": [message], "tools": [object()]}),
                ("template_args", {"messages": [message], "template_args": {"f": print}}),
                ("template_args", {"messages": [message], "template_args": [1]}),
                ("template_args", {"messages": [message], "template_args": {5: 1}}),
            ):
                with pytest.raises(RequestError, match=f"^{field}=") as caught:
                    engine.chat(**arguments)
                assert caught.value.field == field
                assert len(str(caught.value)) < 500
            assert engine.stats().num_submitted == 0
            assert (await engine.chat([message])).text == "fine"

    run("asyncio", main)


@on_every_loop
def test_requests_may_be_submitted_in_a_callback_of_the_loop(loop: str) -> None:
    """A callback belongs to no task."""

    async def main() -> None:
        async with scripted_engine("fine") as engine:
            found: list[Any] = []
            poster = LoopPoster.current()

            def submit() -> None:
                found.append(engine.generate("a"))
                found.append(engine.chat([{"role": "user", "content": "a"}]))
                found.extend(engine.samples("a", 2))

            if loop == "trio":
                poster.post(submit)
            else:
                # The context of a thread without a loop, as that of a protocol may be.
                Context().run(asyncio.get_running_loop().call_later, 0, submit)
            await until(lambda: len(found) == 4)
            for stream in found:
                assert (await stream).text == "fine"

    run(loop, main)


class Content(bytes):
    """A class of bytes of its own."""


@pytest.mark.parametrize("data", [b"hi", bytearray(b"hi"), memoryview(b"hi"), Content(b"hi")])
async def test_chat_rejects_bytes_wherever_they_are(data: object) -> None:
    message = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "look", "description": data}}
    async with scripted_engine("fine") as engine:
        for field, arguments in (
            ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": data}]}]}),
            ("messages", {"messages": [{**message, "role": data}]}),
            ("messages", {"messages": [{"role": "tool", "content": {"file": (data,)}}]}),
            ("tools", {"messages": [message], "tools": [tool]}),
            ("template_args", {"messages": [message], "template_args": {"file": data}}),
        ):
            with pytest.raises(RequestError, match=rf"^{field}=.*\(found {type(data).__name__}\)$"):
                engine.chat(**arguments)
        with pytest.raises(RequestError, match=r"^messages=.*\(found bytes\)$"):
            engine.chat([{**message, b"key": 1}])


@on_every_loop
def test_queue_full_rejects_requests_beyond_the_limit(loop: str) -> None:
    async def main() -> None:
        sizes = {"max_model_len": 2**17, "kv_cache_tokens": 2**18}  # a request takes two minutes
        config = EngineConfig(max_num_seqs=2, max_queued_requests=3, **sizes)
        async with scripted_engine(endless, config=config, step_s=0.001) as engine:
            streams = [engine.generate("x", ENDLESS) for _ in range(5)]
            with pytest.raises(QueueFull, match="max_queued_requests=3"):
                engine.generate("x")
            await until(lambda: engine.stats().num_running == 2 and engine.stats().num_queued == 3)
            with pytest.raises(QueueFull):
                engine.generate("x")
            streams[0].cancel()
            await until(lambda: engine.stats().num_queued == 2)
            streams.append(engine.generate("x", ENDLESS))
            for stream in streams:
                stream.cancel()
            await until(lambda: is_idle(engine))
            assert (await engine.generate("x", SamplingParams(max_tokens=2))).text == "ab"

    run(loop, main)


@on_every_loop
def test_requests_run_by_priority_then_arrival(loop: str) -> None:
    started: list[int] = []

    def noting(prompt_ids, output_ids, seed) -> int:
        started.append(seed)
        return EOS_TOKEN_ID

    async def main() -> None:
        config = EngineConfig(max_num_seqs=1, max_model_len=512, kv_cache_tokens=4096)
        async with scripted_engine(noting, config=config) as engine:
            await engine.pause()
            streams = [
                engine.generate("x", SamplingParams(priority=priority, seed=index))
                for index, priority in enumerate((1, 0, 2, 0, 1))
            ]
            await until(lambda: engine.stats().num_queued == len(streams))
            await engine.resume()
            for stream in streams:
                await stream
            assert started == [1, 3, 0, 4, 2]

    run(loop, main)


@on_every_loop
def test_closing_ends_running_streams(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine(endless, step_s=0.001)
        async with engine:
            streams = [engine.generate("x", ENDLESS) for _ in range(3)]
            first = await anext(streams[0])
        assert first.text
        with pytest.raises(EngineClosed):
            async for _ in streams[0]:
                pass
        for stream in streams:
            with pytest.raises(EngineClosed):
                await stream
            stream.cancel()
        with pytest.raises(EngineClosed):
            engine.generate("x")

    run(loop, main)


@on_every_loop
def test_aclose_with_drain_lets_requests_finish(loop: str) -> None:
    async def main() -> None:
        engine = scripted_engine(lambda prompt: TEXT if prompt == "short" else "long" * 1000, step_s=0.001)
        await engine.start()
        short, long = engine.generate("short"), engine.generate("long", ENDLESS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.aclose, WAIT_S)
            await until(lambda: not engine.is_open)
            with pytest.raises(EngineClosed):
                engine.generate("late")
            assert (await short).text == TEXT
            long.cancel()
        assert (await long).finish_reason == "cancelled"
        engine = scripted_engine(endless, step_s=0.001)
        await engine.start()
        stream = engine.generate("x", ENDLESS)
        started_at = time.monotonic()
        await engine.aclose(drain=0.1)
        assert time.monotonic() - started_at > 0.08
        with pytest.raises(EngineClosed):
            await stream

    run(loop, main)


@on_every_loop
def test_failed_step_raises_a_new_error_in_every_stream(loop: str) -> None:
    def broken(prompt_ids, output_ids, seed) -> int:
        if len(output_ids) == 5:
            raise ValueError("the device caught fire")
        return 65

    async def main() -> None:
        engine = scripted_engine(broken)
        async with engine:
            await engine.pause()
            streams = [engine.generate("x", ENDLESS) for _ in range(3)]
            await engine.resume()
            errors = []
            for stream in streams:
                with pytest.raises(ExecutorError, match="caught fire") as caught:
                    await stream
                assert isinstance(caught.value.__cause__, ValueError)
                errors.append(caught.value)
            assert len({id(error) for error in errors}) == 3
            with pytest.raises(ExecutorError):
                engine.generate("x")
        assert engine.executors[0].is_closed

    run(loop, main)


@contextmanager
def slow_text() -> Iterator[None]:
    """Delay text threads, so that the caller goes on before they begin."""
    prepare = Request.prepare

    def late(request: Request, model: ModelText) -> None:
        time.sleep(0.05)
        prepare(request, model)

    Request.prepare = late
    try:
        yield
    finally:
        Request.prepare = prepare


def test_generate_outside_a_loop_is_rejected() -> None:
    engine = scripted_engine()

    async def start() -> None:
        await engine.start()

    run("asyncio", start)
    with pytest.raises(RuntimeError, match="no event loop"):
        engine.generate("x")
    run("asyncio", engine.aclose)


@on_every_loop
def test_event_loop_that_ends_frees_its_requests(loop: str) -> None:
    """One engine serves several event loops. The streams of a loop that ends are cancelled."""

    async def main() -> None:
        async with scripted_engine(endless, step_s=0.001) as engine:
            kept = []

            async def elsewhere() -> None:
                stream = engine.generate("x", ENDLESS)
                await anext(stream)
                kept.append(stream)

            for other in ("asyncio", "trio"):
                thread = threading.Thread(target=run, args=(other, elsewhere))
                thread.start()
                await anyio.to_thread.run_sync(thread.join)
            assert len(kept) == 2
            await until(lambda: is_idle(engine))
            for stream in kept:
                stream.cancel()
            assert (await engine.generate("x", SamplingParams(max_tokens=3))).text == "abc"

    run(loop, main)
