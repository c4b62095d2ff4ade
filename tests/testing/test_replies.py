"""Scripted replies: their order, tool calls, errors and delays."""

from __future__ import annotations

import math

import anyio
import pytest

from drift_sdk import (
    Completion,
    ConfigError,
    Engine,
    EngineClosed,
    EngineConfig,
    ExecutorError,
    PromptTooLong,
    QueueFull,
    Regex,
    RequestError,
    SamplingParams,
    ToolCall,
)
from drift_sdk.testing import (
    EOS_TOKEN_ID,
    Reply,
    ScriptedModel,
    ScriptedSyncEngine,
    scripted_engine,
    scripted_sync_engine,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "Weather in Paris?"}
CALL = ToolCall(name="weather", arguments={"city": "Paris"})
LONG = EngineConfig(max_model_len=256, kv_cache_tokens=256, block_size=16, max_num_seqs=4)


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_reply_that_ends_inside_a_grammar_is_an_error(tokens_per_step: int, ignore_eos: bool) -> None:
    """And no completion: its text would be no sentence of the grammar."""

    async def main() -> None:
        options = {"grammar": Regex("[0-9]{3}|[0-9]{5}"), "ignore_eos": ignore_eos}
        async with scripted_engine(["123", "12345", "1234", ""], tokens_per_step=tokens_per_step) as engine:
            if ignore_eos:
                await engine.generate("x")
            else:
                assert (await engine.generate("x", **options)).text == "123"
            assert (await engine.generate("x", **options)).text == "12345"
            for length in (4, 0):
                with pytest.raises(RequestError, match=f"ends inside it, after {length} tokens") as caught:
                    await engine.generate("x", **options)
                assert caught.value.field == "grammar"
            assert engine.is_open

    anyio.run(main)


def parts(completion: Completion) -> tuple[str, list[tuple[str, dict[str, object]]], str]:
    calls = [(call.name, call.arguments) for call in completion.tool_calls]
    return completion.text, calls, completion.reasoning


async def test_tool_loop_of_two_turns() -> None:
    async with scripted_engine([CALL, "It is sunny."]) as engine:
        messages = [USER]
        asked = await engine.chat(messages, tools=[TOOL])
        assert parts(asked) == ("", [("weather", {"city": "Paris"})], "")
        messages += [asked.message(), {"role": "tool", "content": "sunny"}]
        assert parts(await engine.chat(messages, tools=[TOOL])) == ("It is sunny.", [], "")


async def test_request_beyond_the_last_reply_raises_at_the_call() -> None:
    async with scripted_engine(["one", "two"]) as engine:
        assert [(await engine.generate("x")).text for _ in range(2)] == ["one", "two"]
        with pytest.raises(AssertionError, match="request 3 of a script of 2 replies"):
            engine.generate("x")
        assert engine.is_open


async def test_preempted_requests_keep_their_replies() -> None:
    replies = [letter * 150 for letter in "abcd"]
    async with scripted_engine(replies, config=LONG) as engine:
        await engine.pause()  # until all can run at once
        streams = [
            engine.generate("the same prompt, long enough for a block", max_tokens=None) for _ in replies
        ]
        for stream in streams:
            await stream.accepted()
        await engine.resume()
        assert [(await stream).text for stream in streams] == replies
        assert engine.stats().num_preemptions > 0


async def test_preempted_requests_keep_the_replies_of_a_function() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return f"{len(prompts)}{prompt[-1]}" * 70

    config = LONG.replace(max_num_seqs=4)
    async with scripted_engine(reply, config=config) as engine:
        await engine.pause()  # until all can run at once
        streams = [
            engine.generate(f"a prompt that is longer than a block {i}", max_tokens=None) for i in range(4)
        ]
        for stream in streams:
            await stream.accepted()
        await engine.resume()
        texts = [(await stream).text for stream in streams]
        assert engine.stats().num_preemptions > 0
    assert len(prompts) == 4
    for index, text in enumerate(texts):
        assert text == text[:2] * 70
        assert text[1] == str(index)


async def test_cancellation_and_priority_do_not_move_replies() -> None:
    config = EngineConfig(max_model_len=256, kv_cache_tokens=4096, max_num_seqs=1)
    async with scripted_engine(["a" * 50, "b", "c", "d"], config=config, step_s=0.0005) as engine:
        first, second = engine.generate("x"), engine.generate("x")
        second.cancel()
        third, fourth = engine.generate("x"), engine.generate("x", SamplingParams(priority=-1))
        assert (await fourth).text == "d"
        assert (await third).text == "c"
        assert (await first).text == "a" * 50


async def test_each_sample_takes_a_reply() -> None:
    async with scripted_engine(["a", "b", "c", "d"]) as engine:
        samples = await engine.samples("x" * 40, 3)
        assert [sample.text for sample in samples] == ["a", "b", "c"]
        assert (await engine.generate("x" * 40)).text == "d"


async def test_requests_after_sleep_and_restart_go_on_with_the_list() -> None:
    engine = scripted_engine(["a", "b", "c"])
    async with engine:
        assert (await engine.generate("x")).text == "a"
        await engine.sleep()
        stream = engine.generate("x")
        await engine.wake()
        assert (await stream).text == "b"
    async with engine:
        assert (await engine.generate("x")).text == "c"


async def test_reply_of_a_function_is_kept_over_sleep() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return str(len(prompts)) * 50

    async with scripted_engine(reply) as engine:
        await engine.pause()
        stream = engine.generate("x")
        await stream.accepted()
        await engine.sleep()
        await engine.wake()
        await engine.resume()
        assert (await stream).text == "1" * 50
    assert prompts == ["x"]


async def test_function_sees_the_rendered_prompt_once() -> None:
    seen: list[str] = []

    def reply(prompt: str) -> object:
        seen.append(prompt)
        return CALL if "sunny" not in prompt else ["It ", "is."]

    async with scripted_engine(reply) as engine:
        assert (await engine.chat([USER], tools=[TOOL])).tool_calls
        assert (
            await engine.chat([USER, {"role": "tool", "content": "sunny"}], tools=[TOOL])
        ).text == "It is."
        assert (await engine.generate([104, EOS_TOKEN_ID, 255])).tool_calls == ()
    assert [prompt.count("Weather in Paris?") for prompt in seen] == [1, 1, 0]
    assert seen[2] == "h<eos>\ufffd"


async def test_scripted_replies_in_an_engine_around_the_model() -> None:
    model = ScriptedModel(lambda prompt: prompt.upper())
    async with Engine("any", model.config, open_model=model) as engine:
        assert (await engine.generate("abc")).text == "ABC"
    model = ScriptedModel(["one", "two"])
    async with Engine("any", model.config, open_model=model) as engine:
        assert [(await engine.generate("x")).text for _ in range(2)] == ["one", "two"]
        with pytest.raises(ExecutorError, match="request 3"):
            await engine.generate("x")


@pytest.mark.parametrize("error", [RequestError("no"), PromptTooLong("long"), RequestError])
async def test_request_error_is_raised_by_its_stream_alone(error: Exception | type[Exception]) -> None:
    kind = error if isinstance(error, type) else type(error)
    async with scripted_engine(["one", error, "three"]) as engine:
        first, second, third = (engine.generate("x") for _ in range(3))
        with pytest.raises(kind) as raised:
            await second
        assert isinstance(error, type) or raised.value is error
        assert [(await first).text, (await third).text] == ["one", "three"]
        assert engine.stats().num_failed == 1


async def test_queue_full_is_raised_by_the_call() -> None:
    async with scripted_engine([QueueFull("full"), "then", QueueFull]) as engine:
        with pytest.raises(QueueFull, match="full"):
            engine.generate("x")
        assert (await engine.generate("x")).text == "then"
        with pytest.raises(QueueFull):
            engine.samples("x", 1)


async def test_errors_of_the_function_are_replies() -> None:
    def reply(prompt: str) -> object:
        if prompt == "long":
            raise PromptTooLong("too long")
        return prompt if prompt == "fine" else 7

    async with scripted_engine(reply) as engine:
        with pytest.raises(PromptTooLong, match="too long"):
            await engine.generate("long")
        with pytest.raises(ConfigError, match="reply=7: expected a text, a ToolCall"):
            await engine.generate("other")
        assert (await engine.generate("fine")).text == "fine"


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_failure_of_the_executor_comes_after_the_last_token(tokens_per_step: int) -> None:
    script = ["a" * 3000, Reply("abcdef", raises=OSError("the bus fell off"))]
    async with scripted_engine(script, tokens_per_step=tokens_per_step) as engine:
        await engine.pause()  # so that the first is not over before the second begins
        other, stream = engine.generate("x", max_tokens=None), engine.generate("x")
        for each in (other, stream):
            await each.accepted()
        await engine.resume()
        text = ""
        with pytest.raises(ExecutorError, match="the bus fell off"):
            async for chunk in stream:
                text += chunk.text
        assert text == "abcdef"
        with pytest.raises(ExecutorError):
            await other
        with pytest.raises(ExecutorError):
            engine.generate("x")


async def test_function_that_raises_another_error_fails_the_executor() -> None:
    async with scripted_engine(lambda prompt: 1 // 0) as engine:
        with pytest.raises(ExecutorError, match="ZeroDivisionError"):
            await engine.generate("x")


async def test_logprobs_have_the_scripted_token_alone() -> None:
    async with scripted_engine("a") as engine:
        for num_top, top in ((0, ()), (1, ("a",)), (5, ("a",))):
            completion = await engine.generate("x", max_tokens=1, logprobs=num_top)
            (entry,) = completion.logprobs
            assert (entry.text, entry.logprob, entry.top_texts) == ("a", 0.0, top)


async def test_delays_come_before_the_first_token_and_between_tokens() -> None:
    async with scripted_engine([Reply("abc", first_token_s=0.03), Reply("abc", token_s=0.02)]) as engine:
        timing = (await engine.generate("x")).timing
        assert timing.first_token_s >= 0.03
        timing = (await engine.generate("x")).timing
        assert timing.decode_s >= 0.06  # three tokens after the first, the last being the end of sequence


async def test_timeout_meets_a_slow_first_token() -> None:
    async with scripted_engine(Reply("abc", first_token_s=0.5)) as engine:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.005):
                await engine.generate("x")
        assert engine.is_open


@pytest.mark.parametrize(
    "given, field",
    [
        (7, "reply"),
        ([7], "reply"),
        ({"texts": "x"}, "reply"),
        ({"text": 7}, "text"),
        ({"reasoning": None}, "reasoning"),
        ({"tool_calls": ["x"]}, "tool_calls"),
        ({"raises": "x"}, "raises"),
        ({"raises": UnicodeDecodeError}, "raises"),
        ({"first_token_s": -1.0}, "first_token_s"),
        ({"token_s": float("nan")}, "token_s"),
        (lambda: "x", "reply"),
        (lambda one, two: "x", "reply"),
        (str, "reply"),
        (KeyboardInterrupt, "reply"),
        ("\ud800", "text"),
        ({"reasoning": "\ud800"}, "reasoning"),
    ],
)
def test_wrong_replies_are_rejected(given: object, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}="):
        scripted_engine(given)


@pytest.mark.parametrize(
    "given, config, message",
    [
        (CALL, EngineConfig(tool_format=None), "none with EngineConfig.tool_format=None"),
        (
            ["a", [CALL, "text"]],
            EngineConfig(tool_format="pythonic"),
            "no text or reasoning before tool calls",
        ),
        ({"reasoning": "hm"}, None, "reasoning_format"),
        (ToolCall(name="f", arguments={"x": {1, 2}}), None, "arguments that are JSON"),
    ],
)
async def test_replies_that_the_format_cannot_express_are_rejected_at_the_start(
    given: object, config: EngineConfig | None, message: str
) -> None:
    engine = scripted_engine(given, config=config)
    with pytest.raises(ConfigError, match=message):
        await engine.start()
    with pytest.raises(EngineClosed):
        engine.generate("x")


@pytest.mark.parametrize(
    "field, value",
    [("step_s", -1), ("step_s", "a"), ("step_s", math.nan), ("tokens_per_step", 0), ("tokens_per_step", 1.5)],
)
def test_scripted_engine_rejects_wrong_speeds(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field}=.*: expected"):
        scripted_engine("a", **{field: value})


async def test_template_that_cannot_be_compiled_is_a_wrong_value_of_the_config() -> None:
    with pytest.raises(ConfigError, match="^chat_template='{% if %}': expected a Jinja template: "):
        await scripted_engine("a", config=EngineConfig(max_model_len=512, chat_template="{% if %}")).start()


def test_scripted_engine_for_code_without_an_event_loop() -> None:
    replies = [
        CALL,
        "It is sunny.",
        QueueFull("full"),
        PromptTooLong("long"),
        Reply("Half", raises=OSError()),
    ]
    with scripted_sync_engine(replies) as engine:
        assert engine.chat([USER], tools=[TOOL]).result().tool_calls[0].arguments == {"city": "Paris"}
        assert "".join(chunk.text for chunk in engine.chat([USER])) == "It is sunny."
        with pytest.raises(QueueFull, match="full"):
            engine.generate("x")
        with pytest.raises(PromptTooLong, match="long"):
            engine.generate("x").result()
        with pytest.raises(ExecutorError):
            engine.generate("x").result()
    assert isinstance(engine, ScriptedSyncEngine) and len(engine.executors) == 1
    config = EngineConfig(max_model_len=64, kv_cache_tokens=1024)
    with scripted_sync_engine(lambda prompt: prompt.upper(), config=config) as engine:
        assert [found.text for found in engine.map(["a", "b"])] == ["A", "B"]
        assert engine.max_model_len == 64
