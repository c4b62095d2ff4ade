"""Mapping over many prompts and jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from loops import on_every_loop, run, until

from drift_sdk import (
    EngineClosed,
    EngineConfig,
    ExecutorError,
    Job,
    JobDone,
    JobFailed,
    JobResult,
    PromptTooLong,
    QueueFull,
    RequestError,
    SamplingParams,
    ToolCall,
)
from drift_sdk.driver.prompts import ModelText, PreparedPrompt, TextPrompt
from drift_sdk.jobs import MAX_AHEAD, MAX_AHEAD_UNORDERED
from drift_sdk.testing import EOS_TOKEN_ID, scripted_engine

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


def counting(prompt_ids, output_ids, seed) -> int:
    """A next token that depends on all tokens before it, so that a lost or repeated one changes the
    output."""
    return (sum(prompt_ids) + sum(output_ids) * 31 + len(output_ids)) % 250


class LongAndShort:
    """A model that answers "long" with a text that goes on until `num_awaited` other prompts have been
    answered, or, should they not be, to the end of the context."""

    def __init__(self, num_awaited: int) -> None:
        self.num_awaited = num_awaited
        self.num_answered = 0

    def __call__(self, prompt_ids, output_ids, seed) -> int:
        if bytes(prompt_ids) != b"long":
            self.num_answered += len(output_ids)
            return EOS_TOKEN_ID if output_ids else ord("s")

        if self.num_answered >= self.num_awaited:
            return EOS_TOKEN_ID

        time.sleep(0.001 if len(output_ids) < 2000 else 0.02)  # for the event loop on a busy machine
        return ord("l")


def test_prompt_that_the_queue_has_no_room_for_any_more_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in another process learns of room late, so that its streams may end with QueueFull."""
    prepare, refused = TextPrompt.prepare, set()

    def refuse_once(prompt: TextPrompt, model: ModelText) -> PreparedPrompt:
        if prompt.text not in refused:
            refused.add(prompt.text)
            raise QueueFull("full")

        return prepare(prompt, model)

    async def main() -> None:
        monkeypatch.setattr(TextPrompt, "prepare", refuse_once)
        async with scripted_engine(counting) as engine:
            prompts = [f"prompt {number}" for number in range(5)]
            found = [each async for each in engine.map(prompts, max_tokens=3, max_concurrent=3)]
            assert refused == set(prompts)
            expected = [await engine.generate(prompt, max_tokens=3) for prompt in prompts]
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]

    run("asyncio", main)


@on_every_loop
def test_map_keeps_order_and_bounds(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(counting, step_s=0.0005) as engine:
            taken = []

            def prompts():
                for index in itertools.count():
                    taken.append(index)
                    yield f"prompt {index}"

            params = SamplingParams(max_tokens=4)
            found = []
            completions = engine.map(prompts(), params, max_concurrent=3)
            async for completion in completions:
                assert len(taken) - len(found) <= 3 * MAX_AHEAD
                found.append(completion.token_ids)
                if len(found) == 20:
                    break
            await completions.aclose()
            await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
            alone = [(await engine.generate(f"prompt {i}", params)).token_ids for i in range(20)]
            assert found == alone
            assert [c async for c in engine.map([], params)] == []
            with pytest.raises(RequestError, match="prompt"):
                async for _ in engine.map(["x", 7], params):
                    pass
            with pytest.raises(RequestError, match="max_concurrent"):
                engine.map([], max_concurrent=0)

    run(loop, main)


@on_every_loop
@pytest.mark.parametrize("num_others", [0, 5])
def test_map_waits_for_room_in_the_queue(loop: str, num_others: int) -> None:
    """The queue is full with its own requests, or with those of others."""

    async def main() -> None:
        config = EngineConfig(max_num_seqs=1, max_queued_requests=4, max_model_len=64, kv_cache_tokens=256)
        async with scripted_engine(counting, config=config, step_s=0.0005) as engine:
            params = SamplingParams(max_tokens=4)
            others = [engine.generate("other", params) for _ in range(num_others)]
            found = [c.token_ids async for c in engine.map([f"prompt {i}" for i in range(30)], params)]
            alone = [(await engine.generate(f"prompt {i}", params)).token_ids for i in range(30)]
            assert found == alone
            assert engine.stats().num_rejected == 0
            for other in others:
                await other

    run(loop, main)


@on_every_loop
def test_map_yields_completions_before_an_error(loop: str) -> None:
    def prompts():
        yield from ("a", "b", "c")
        raise ValueError("the file is torn")

    async def main() -> None:
        async with scripted_engine("ok", step_s=0.001) as engine:
            for given, error in ((prompts(), ValueError), (["a", "b", "c", 7, "d"], RequestError)):
                texts: list[str] = []
                with pytest.raises(error) as caught:
                    async for completion in engine.map(given):
                        texts.append(completion.text)  # noqa: PERF401 - the error comes last
                assert texts == ["ok"] * 3
                notes = ["the prompt of map() with the key 3"] if error is RequestError else []
                assert getattr(caught.value, "__notes__", []) == notes
            await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)

    run(loop, main)


def test_map_raises_engine_closed_when_the_engine_closes() -> None:
    """Even while it waits for room in a queue that is always full."""

    async def main() -> None:
        config = EngineConfig(max_num_seqs=1, max_queued_requests=0, max_model_len=512, kv_cache_tokens=512)
        engine = scripted_engine(counting, config=config, step_s=0.001)
        await engine.start()
        other = engine.generate("x", ENDLESS)
        await anext(other)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.aclose)
            with anyio.fail_after(120), pytest.raises(EngineClosed):
                async for _ in engine.map(["a"]):
                    pass
        with pytest.raises(EngineClosed):
            await other

    run("asyncio", main)


@on_every_loop
def test_cancelling_a_map_frees_its_requests(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine(counting, step_s=0.001) as engine:
            with anyio.move_on_after(0.05) as scope:
                completions = engine.map(["a", "b", "c"], ENDLESS)
                async for _ in completions:
                    pass
            assert scope.cancelled_caught
            await completions.aclose()
            await until(lambda: engine.stats().num_running == 0)

    run(loop, main)


def numbered(taken: list[int], *, first: str = "short") -> Iterator[str]:
    """Endless prompts; `taken` lists the indices of those that have been read."""
    for index in itertools.count():
        taken.append(index)
        yield first if index == 0 else "short"


@on_every_loop
def test_ordered_map_fills_places_behind_a_long_request_up_to_its_bound(loop: str) -> None:
    num_ahead = 2 * MAX_AHEAD
    script = LongAndShort(num_ahead - 1)

    async def main() -> None:
        async with scripted_engine(script) as engine:
            taken: list[int] = []
            completions = engine.map(numbered(taken, first="long"), max_tokens=None, max_concurrent=2)
            assert (await anext(completions)).finish_reason == "stop"
            assert script.num_answered == num_ahead - 1
            assert len(taken) == num_ahead
            for _ in range(num_ahead):
                assert (await anext(completions)).text == "s"
            await completions.aclose()

    run(loop, main)


@on_every_loop
def test_unordered_map_yields_as_requests_end(loop: str) -> None:
    num_others = 40
    script = LongAndShort(num_others)

    async def main() -> None:
        async with scripted_engine(script) as engine:
            prompts = ["long", *["short"] * num_others]
            completions = engine.map(prompts, max_tokens=None, max_concurrent=2, ordered=False)
            found = [completion.text[:1] async for completion in completions]
            assert sorted(found) == ["l", *["s"] * num_others]
            assert found.index("l") >= num_others - 1  # the last two may be found ended together

    run(loop, main)


@on_every_loop
def test_unordered_map_bounds_what_a_slow_reader_has_not_read(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("s") as engine:
            taken: list[int] = []
            completions = engine.map(numbered(taken), max_concurrent=3, ordered=False)
            for num_read in range(1, 20):
                assert (await anext(completions)).text == "s"
                await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
                assert len(taken) - num_read < 3 * MAX_AHEAD_UNORDERED
            await completions.aclose()

    run(loop, main)


LONG_PROMPT = "x" * 64
MIXED = [
    "plain",
    Job(key="a", prompt="own", params=SamplingParams(max_tokens=1)),
    Job(key=("b", 2), messages=[{"role": "user", "content": "hi"}]),
    Job(key="long", prompt=LONG_PROMPT),
    7,
    Job(key="bytes", prompt=b"x"),
    Job(key="no messages", messages=[]),
    Job(key="params", prompt="x", params={"max_tokens": 3}),
    [1, 2],
]
EXPECTED = {
    0: "fine",
    "a": "f",
    ("b", 2): "fine",
    "long": PromptTooLong,
    4: RequestError,
    "bytes": RequestError,
    "no messages": RequestError,
    "params": RequestError,
    8: "fine",
}


def outcome(result: JobResult) -> object:
    assert isinstance(result, JobResult) and isinstance(
        result, JobDone if result.error is None else JobFailed
    )
    assert (result.completion is None) != (result.error is None)
    return type(result.error) if result.completion is None else result.completion.text


@on_every_loop
@pytest.mark.parametrize("ordered", [True, False])
def test_map_yields_errors_with_their_keys(loop: str, ordered: bool) -> None:
    async def main() -> None:
        config = EngineConfig(max_model_len=64, kv_cache_tokens=256)
        async with scripted_engine("fine", config=config) as engine:
            results = [
                result
                async for result in engine.map(MIXED, max_concurrent=2, ordered=ordered, errors="yield")
            ]
            assert {result.key: outcome(result) for result in results} == EXPECTED
            assert len(results) == len(EXPECTED)
            if ordered:
                assert [result.key for result in results] == list(EXPECTED)

    run(loop, main)


async def test_jobs_take_the_options_of_chat() -> None:
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    user, begun = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "I have beg"}
    forced = Job(key="forced", messages=[user], tools=[weather], tool_choice="get_weather")
    continued = Job(key="continued", messages=[user, begun], continue_final=True)

    def reply(prompt: str) -> str | ToolCall:
        return "un." if prompt.endswith("I have beg") else ToolCall(name="get_weather", arguments={})

    async with scripted_engine(reply) as engine:
        results = {
            result.key: result.completion
            async for result in engine.map([forced, continued], errors="yield", ordered=False)
        }
    assert [call.name for call in results["forced"].tool_calls] == ["get_weather"]
    assert results["continued"].text == "un."
    for fields in ({"tool_choice": "none"}, {"continue_final": True}):
        with pytest.raises(RequestError, match="without messages"):
            Job(key=1, prompt="x", **fields)


class Unreadable(Sequence[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: object) -> Any:
        raise OSError("disk")


@pytest.mark.parametrize("ordered", [True, False])
async def test_prompt_whose_methods_raise_is_an_error_of_its_job(ordered: bool) -> None:
    prompts = ["a", Unreadable(), "b"]
    async with scripted_engine("fine") as engine:
        results = [result async for result in engine.map(prompts, ordered=ordered, errors="yield")]
        assert {each.key: outcome(each) for each in results} == {0: "fine", 1: RequestError, 2: "fine"}
        (error,) = [each.error for each in results if each.error is not None]
        assert isinstance(error.__cause__, OSError) and "OSError('disk')" in str(error)

        with pytest.raises(RequestError, match="disk"):
            async for _ in engine.map(prompts, ordered=ordered):
                pass


async def test_unordered_map_raises_the_first_error() -> None:
    async with scripted_engine("fine", config=EngineConfig(max_model_len=64, kv_cache_tokens=256)) as engine:
        found: list[str] = []
        with pytest.raises(PromptTooLong) as caught:
            async for completion in engine.map(["a", "b", LONG_PROMPT, "c"], ordered=False):
                found.append(completion.text)  # noqa: PERF401 - the error comes last
        assert caught.value.__notes__ == ["the prompt of map() with the key 2"]
        assert found == ["fine"] * len(found)
        await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)


@pytest.mark.parametrize("error", [EngineClosed, ExecutorError])
async def test_map_raises_errors_of_the_engine_even_if_errors_are_yielded(error: type[Exception]) -> None:
    def failing(prompt_ids, output_ids, seed) -> int:
        if error is ExecutorError and len(output_ids) == 5:
            raise ValueError("the device caught fire")
        return ord("a")

    engine = scripted_engine(failing, step_s=0.001)
    async with engine:
        results = engine.map(numbered([]), ENDLESS, errors="yield")
        async with anyio.create_task_group() as tasks:
            if error is EngineClosed:
                tasks.start_soon(engine.aclose)
            with pytest.raises(error):
                await anext(results)


async def test_map_raises_an_error_of_its_prompts_after_all_results() -> None:
    def prompts() -> Iterator[object]:
        yield from MIXED
        raise ValueError("the file is torn")

    async with scripted_engine("fine", config=EngineConfig(max_model_len=64, kv_cache_tokens=256)) as engine:
        found: list[object] = []
        with pytest.raises(ValueError, match="torn"):
            async for result in engine.map(prompts(), errors="yield"):
                found.append(result.key)  # noqa: PERF401 - the error comes last
        assert found == list(EXPECTED)


async def test_options_of_a_map_apply_to_jobs_without_their_own_params() -> None:
    async with scripted_engine("fine text") as engine:
        jobs = [Job(key=0, prompt="x"), Job(key=1, prompt="x", params=SamplingParams(max_tokens=2)), "x"]
        found = [c.text async for c in engine.map(jobs, SamplingParams(max_tokens=3), stop="e")]
        assert found == ["fin", "fi", "fin"]
        assert [c.text async for c in engine.map(jobs, max_tokens=4)] == ["fine", "fi", "fine"]
        with pytest.raises(RequestError, match="max_tokens=0"):
            engine.map(jobs, max_tokens=0)


@pytest.mark.parametrize(
    "arguments",
    [{"ordered": 1}, {"ordered": None}, {"errors": "ignore"}, {"errors": None}, {"errors": True}],
)
async def test_map_rejects_wrong_arguments_at_the_call(arguments: dict[str, object]) -> None:
    async with scripted_engine("fine") as engine:
        (name,) = arguments
        with pytest.raises(RequestError, match=f"^{name}="):
            engine.map(["x"], **arguments)


@on_every_loop
@pytest.mark.parametrize("ordered", [True, False])
def test_endless_wrong_prompts_do_not_hold_up_the_event_loop(loop: str, ordered: bool) -> None:
    async def main() -> None:
        async with scripted_engine("fine") as engine, anyio.create_task_group() as group:
            turns: list[int] = []

            async def other_task() -> None:
                while len(turns) < 5:
                    await anyio.lowlevel.checkpoint()
                    turns.append(num_results)
                group.cancel_scope.cancel()

            num_results = 0
            group.start_soon(other_task)
            async for result in engine.map(itertools.repeat(5), ordered=ordered, errors="yield"):  # type: ignore[arg-type]
                num_results += 1
                assert isinstance(result.error, RequestError) and num_results < 50_000

    run(loop, main)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "prompt=None: expected a prompt or messages$"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            "prompt='x': .*, not both$",
        ),
        ({"prompt": "x", "tools": []}, "tools="),
        ({"prompt": "x", "template_args": {}}, "template_args="),
        ({"prompt": "x", "tools": np.array([1, 2])}, "tools="),
        ({"prompt": "x", "continue_final": 0}, "continue_final="),
    ],
)
def test_job_takes_either_a_prompt_or_messages(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Job(key=1, **arguments)
    assert caught.value.field == message.partition("=")[0]
