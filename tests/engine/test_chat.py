"""Conversations: answers in parts while they are generated, forced tool calls, continued messages."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from chat_families import FAMILIES, TOOLS, WEATHER, Reply, family_tokenizer

from drift_sdk import (
    Chunk,
    Completion,
    EngineConfig,
    JsonSchema,
    Lark,
    RequestError,
    SamplingParams,
    SyncEngine,
)
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.driver.prompts import ChatPrompt, check_forced_calls
from drift_sdk.engine import Engine
from drift_sdk.steps import ExecutorLimits
from drift_sdk.testing import ScriptedModel, scripted_engine
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.tools import ToolSet

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"numbers": [1]}}\n</tool_call>'


WAIT_S = 120  # longest wait for another thread
NUM_LAST = 8  # tokens; more than there are steps in flight


def family_engine(name: str, *raw: str, may_end: threading.Event | None = None, **options: Any) -> Engine:
    """An engine whose model answers with tokens of the family's vocabulary, special ones included. Of several
    answers, a prompt that contains #N gets the one of this number. The last tokens of an answer wait for
    `may_end`."""
    family = FAMILIES[name]
    tokenizer = family_tokenizer(family)
    answers = [[*tokenizer.encode(each, add_special_tokens=False), 256] for each in raw]

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        prompt = bytes(token_id for token_id in prompt_ids if token_id < 256)
        found = re.search(rb"#([0-9]+)", prompt) if len(answers) > 1 else None
        answer = answers[int(found[1])] if found is not None else answers[0]
        if may_end is not None and len(output_ids) >= len(answer) - NUM_LAST:
            assert may_end.wait(WAIT_S)
        return answer[min(len(output_ids), len(answer) - 1)]

    config = EngineConfig(max_model_len=4096, kv_cache_tokens=65_536, chat_template=family.template)
    model = ScriptedModel(next_token, config=config, **options)

    def open_model(report: Any, limits: ExecutorLimits | None = None) -> LoadedModel:
        loaded = model(report, limits)
        text = msgspec.structs.replace(loaded.text, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
        return msgspec.structs.replace(loaded, text=text)

    return Engine("scripted", config, open_model=open_model)


async def read(stream: Any) -> tuple[list[Chunk], Completion]:
    chunks = [chunk async for chunk in stream]
    completion = await stream
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert "".join(chunk.reasoning for chunk in chunks) == completion.reasoning
    assert tuple(call for chunk in chunks for call in chunk.tool_calls) == completion.tool_calls
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == completion.token_ids
    return chunks, completion


@pytest.mark.parametrize("tokens_per_step", [1, 5])
@pytest.mark.parametrize("name", FAMILIES)
async def test_answer_comes_in_parts(name: str, tokens_per_step: int) -> None:
    replies = FAMILIES[name].replies
    raw = [reply.raw for reply in replies]
    async with family_engine(name, *raw, tokens_per_step=tokens_per_step) as engine:
        for number, reply in enumerate(replies):
            params = SamplingParams(max_tokens=1000, logprobs=0)
            message = {"role": "user", "content": f"#{number}"}
            _, completion = await read(engine.chat([message], params, tools=TOOLS))
            found = tuple((call.name, call.arguments) for call in completion.tool_calls)
            assert Reply(reply.raw, completion.reasoning, completion.text, found) == reply
            assert completion.raw_text == reply.raw and completion.finish_reason == "stop"
            expected = [*engine.tokenizer.encode(reply.raw, add_special_tokens=False), 256]
            assert list(completion.token_ids) == expected
            assert completion.logprobs is not None and len(completion.logprobs) == len(expected)
            num_thought = len(engine.tokenizer.encode(reply.reasoning, add_special_tokens=False))
            most = num_thought + len("\n\n\n\n") if num_thought else 0  # white space around it is not shown
            assert num_thought <= completion.usage.reasoning_tokens <= most


async def test_generate_does_not_split() -> None:
    for name, reply in (
        ("hermes", FAMILIES["hermes"].replies[2]),
        ("harmony", FAMILIES["harmony"].replies[1]),
    ):
        async with family_engine(name, reply.raw) as engine:
            _, completion = await read(engine.generate("x", SamplingParams(max_tokens=1000)))
            assert completion.text == completion.raw_text
            assert completion.reasoning == "" and completion.tool_calls == ()
            shown = reply.raw
            for special in FAMILIES[name].special:  # special tokens add no text
                shown = shown.replace(special, "")
            assert completion.text == shown


async def test_tool_calls_are_found_only_if_tools_were_given() -> None:
    async with scripted_engine(f"I look. {CALL}") as engine:
        (call,) = (await engine.chat([USER], tools=TOOLS)).tool_calls
        assert (call.name, call.arguments, call.index, len(call.id)) == ("add", {"numbers": [1]}, 0, 9)
        for stream in (
            engine.chat([USER]),
            engine.chat([USER], tools=[]),
            engine.chat([USER], tools=TOOLS, tool_choice="none"),
        ):
            completion = await stream
            assert (completion.text, completion.tool_calls) == (f"I look. {CALL}", ())


async def test_answer_cut_by_max_tokens_keeps_what_there_is() -> None:
    raw = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
    async with family_engine("hermes", raw) as engine:
        for length in range(1, len(raw) + 1, 3):
            params = SamplingParams(max_tokens=length)
            _, completion = await read(engine.chat([USER], params, tools=TOOLS))
            assert completion.finish_reason == "length" and completion.raw_text == raw[:length]
            expected = AnswerFormats(tools="hermes", reasoning="think").splitter(ToolSet.of(TOOLS))
            part = expected.push(raw[:length]) + expected.flush()
            assert (completion.reasoning, completion.text) == (part.reasoning, part.text)
            assert len(completion.tool_calls) == (length >= len(raw) - len("\n</tool_call>"))
        cut = await engine.chat([USER], SamplingParams(max_tokens=len(raw) - 20), tools=TOOLS)
        assert (cut.reasoning, cut.text) == ("Hm.", raw[len("<think>\nHm.\n</think>\n\n") : -20])


async def test_stop_string_and_cancel_end_the_parts() -> None:
    raw = f"<think>\nHm. Stop</think>I look.\n{CALL}"
    async with family_engine("hermes", raw) as engine:
        params = SamplingParams(stop=("Stop",), max_tokens=1000)
        completion = await engine.chat([USER], params, tools=TOOLS)
        assert (completion.reasoning, completion.text, completion.stop_reason) == ("Hm.", "", "Stop")
        params = SamplingParams(stop=("look", "</tool_call>"), max_tokens=1000)
        assert (await engine.chat([USER], params, tools=TOOLS)).text == "I "
    may_end = threading.Event()
    async with family_engine("hermes", raw, may_end=may_end) as engine:
        stream = engine.chat([USER], SamplingParams(max_tokens=1000), tools=TOOLS)
        reasoning = ""
        while len(reasoning) < 3:
            reasoning += (await anext(stream)).reasoning
        stream.cancel()
        may_end.set()
        completion = await stream
        assert completion.finish_reason == "cancelled" and completion.reasoning.startswith(reasoning)


async def test_unread_chunks_are_joined_in_all_their_parts() -> None:
    raw = FAMILIES["hermes"].replies[2].raw
    async with family_engine("hermes", raw) as engine:
        stream = engine.chat([USER], SamplingParams(max_tokens=1000), tools=TOOLS)
        completion = await stream
        (chunk,) = [chunk async for chunk in stream]
        assert (chunk.reasoning, chunk.tool_calls) == (completion.reasoning, completion.tool_calls)
        assert len(chunk.tool_calls) == 2


async def test_reasoning_that_the_template_begins_is_recognised() -> None:
    async with family_engine("hermes", "Hm.\n</think>\n\nYes.") as engine:
        completion = await engine.chat([USER], template_args={"thinks": True})
        assert (completion.reasoning, completion.text) == ("Hm.", "Yes.")
        completion = await engine.chat([USER])
        assert (completion.reasoning, completion.text) == ("", "Hm.\nYes.")
        completion = await engine.chat(
            [USER, {"role": "assistant", "content": "<think>\nI"}], continue_final=True
        )
        assert (completion.reasoning, completion.text) == ("Hm.", "Yes.")
        params = SamplingParams(grammar=Lark('start: "Hm.\\n</think>\\n\\nYes."'))
        completion = await engine.chat([USER], params, template_args={"thinks": True})
        assert (completion.reasoning, completion.text) == ("", completion.raw_text)


async def test_formats_of_the_config_take_precedence() -> None:
    raw = "<think>a</think>[TOOL_CALLS]add{}"
    for tools, reasoning, expected in (
        ("mistral", "think", ("a", "", 1)),
        ("mistral", None, ("", "<think>a</think>", 1)),
        (None, "think", ("a", "[TOOL_CALLS]add{}", 0)),
        (None, None, ("", raw, 0)),
        ("auto", "auto", ("", raw, 0)),
    ):
        config = EngineConfig(max_model_len=512, tool_format=tools, reasoning_format=reasoning)
        async with scripted_engine(raw, config=config) as engine:
            found = await engine.chat([USER], tools=TOOLS)
            assert (found.reasoning, found.text, len(found.tool_calls)) == expected
            assert found.raw_text == raw


async def test_answer_that_a_schema_describes_is_parsed_whole() -> None:
    """The JSON looks like a call, which it is only where calls are looked for."""
    value = {"name": "add", "arguments": {"numbers": [1]}}
    async with scripted_engine(json.dumps(value)) as engine:
        params = SamplingParams(grammar=JsonSchema({"type": "object"}))
        for choice in ("auto", "none"):
            tools = TOOLS if choice == "none" else None
            completion = await engine.chat([USER], params, tools=tools, tool_choice=choice)
            assert (completion.parsed, completion.tool_calls) == (value, ())
        assert (await engine.generate("x", params)).parsed == value
        called = await engine.chat([USER], params, tools=TOOLS)
        assert (called.parsed, called.text, len(called.tool_calls)) == (None, "", 1)


@pytest.mark.parametrize("name", ["hermes", "llama"])
async def test_answer_with_a_grammar_and_tools_is_either(name: str) -> None:
    """Calls inside of a value of the schema are found as well, and it is a value all the same."""
    params = SamplingParams(grammar=JsonSchema({"type": "object", "properties": {"a": {"type": "string"}}}))
    call = FAMILIES[name].replies[0].raw if name == "llama" else CALL
    inner = '{"a": "<tool_call>{\'name\': 1}</tool_call>"}'
    async with family_engine(name, call, '{"a": "b"}', inner, "I look.") as engine:
        asks = [{**USER, "content": f"#{number}"} for number in range(4)]
        called = await engine.chat([asks[0]], params, tools=TOOLS)
        assert called.tool_calls and (called.parsed, called.schema, called.text) == (None, None, "")
        for ask, value in ((asks[1], {"a": "b"}), (asks[2], json.loads(inner))):
            answered = await engine.chat([ask], params, tools=TOOLS)
            assert (answered.parsed, answered.tool_calls) == (value, ())
        with pytest.raises(RequestError, match="does not continue the text"):
            await engine.chat([asks[3]], params, tools=TOOLS)


async def test_grammar_describes_the_final_message_of_harmony() -> None:
    final, thought = (
        "<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    )
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"numbers": [1]}'
    value = '{"a": "b"}'
    replies = (final + value, thought + final + value, thought + call, value, thought + value)
    asks = [[{**USER, "content": f"#{number}"}] for number in range(len(replies))]
    params = SamplingParams(grammar=JsonSchema({"type": "object", "properties": {"a": {"type": "string"}}}))
    has_text = threading.Event()
    async with family_engine("harmony", *replies, may_end=has_text) as engine:
        for tools in (None, TOOLS):
            for ask, reasoning in ((asks[0], ""), (asks[1], "Hm.")):
                has_text.clear()
                stream = engine.chat(ask, params, tools=tools)
                async for chunk in stream:
                    if chunk.text:  # while it is generated
                        has_text.set()
                found = await stream
                assert (found.parsed, found.text, found.reasoning) == ({"a": "b"}, value, reasoning)
        called = await engine.chat(asks[2], params, tools=TOOLS)
        assert (called.parsed, called.reasoning, len(called.tool_calls)) == (None, "Hm.", 1)
        for ask, tools in ((asks[2], None), (asks[3], None), (asks[4], TOOLS)):
            with pytest.raises(RequestError, match="does not continue the text"):
                await engine.chat(ask, params, tools=tools)
        begun = [*asks[3], {"role": "assistant", "content": "It is "}]
        assert (await engine.chat(begun, params, continue_final=True)).parsed == {"a": "b"}


async def test_grammar_or_tools_that_cannot_be_compiled_are_named() -> None:
    odd = [{"name": "odd", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}]
    good, broken = SamplingParams(grammar=Lark('start: "fine"')), SamplingParams(grammar=Lark("start: b"))
    async with scripted_engine("fine") as engine:
        assert (await engine.chat([USER], good, tools=TOOLS)).text == "fine"
        for params, tools, field in ((good, odd, "tool_choice"), (broken, TOOLS, "grammar")):
            with pytest.raises(RequestError, match=f"^{field}: ") as caught:
                await engine.chat([USER], params, tools=tools)
            assert caught.value.field == field


async def test_malformed_call_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    raw = "<tool_call>{secret</tool_call>" * 3
    async with family_engine("hermes", raw) as engine:
        stream = engine.chat([USER], tools=TOOLS)
        completion = await stream
        assert (completion.text, completion.tool_calls) == (raw, ())
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and record.getMessage().startswith(
            f"{stream.request_id}: a tool call stays in the text: "
        )
        assert "secret" not in record.getMessage()
        caplog.clear()
        await engine.chat([USER], SamplingParams(max_tokens=12), tools=TOOLS)
        assert caplog.records == []  # the answer was cut, not the call malformed


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_forced_call_is_served(choice: str) -> None:
    for reply in (CALL, f"<think>Hm.</think>\n{CALL}"):
        async with family_engine("hermes", reply) as engine:
            completion = await engine.chat([USER], tools=TOOLS, tool_choice=choice)
            (call,) = completion.tool_calls
            assert (call.name, call.arguments, completion.text) == ("add", {"numbers": [1]}, "")


async def test_forced_call_rejects_every_other_answer() -> None:
    """A scripted model goes its own way: the grammar then fails its request."""
    for reply, choice in (("I look.", "required"), (CALL, "get_weather"), (f"{CALL} Done.", "required")):
        async with family_engine("hermes", reply) as engine:
            with pytest.raises(RequestError, match="does not continue the text"):
                await engine.chat([USER], tools=TOOLS, tool_choice=choice)


@pytest.mark.parametrize(
    ("choice", "tools", "allowed"),
    [
        ("required", None, 'one of "auto", "none", as there are no tools$'),
        ("required", [], 'one of "auto", "none", as there are no tools$'),
        ("required", [{"nam": "add"}], 'one of "auto", "none", as there are no tools with a name$'),
        ("add", None, 'one of "auto", "none", as there are no tools$'),
        ("subtract", TOOLS, 'one of "auto", "none", "required", \'get_weather\', \'add\'$'),
        ("", TOOLS, "one of"),
        (None, TOOLS, "one of"),
        ({"type": "function"}, TOOLS, "one of"),
    ],
)
async def test_wrong_tool_choice_is_rejected_at_the_call(choice: Any, tools: Any, allowed: str) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=allowed) as caught:
            engine.chat([USER], tools=tools, tool_choice=choice)
        assert (caught.value.field, caught.value.value) == ("tool_choice", choice)


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"type": "function", "function": {"name": ""}}])
async def test_function_without_a_name_is_rejected_at_the_call(tool: Any) -> None:
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=r"tools\[1\]=.*: expected \{\"type\": \"function\""):
            engine.chat([USER], tools=[*TOOLS[:1], tool])
        assert (await engine.chat([USER], tools=[{"type": "web_search"}])).text == "fine"


@pytest.mark.parametrize("is_nested", [False, True])
async def test_schema_of_another_protocol_is_rejected_at_the_call(is_nested: bool) -> None:
    function = {"name": "add", "input_schema": {"type": "object"}}
    tool = {"type": "function", "function": function} if is_nested else function
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match="parameters") as caught:
            engine.chat([USER], tools=[*TOOLS[:1], tool])
        assert caught.value.field == "tools[1].input_schema"


async def test_forced_call_has_no_other_grammar_and_needs_a_format() -> None:
    params = SamplingParams(grammar=Lark('start: "a"'))
    async with scripted_engine("a", config=EngineConfig(max_model_len=512, tool_format=None)) as engine:
        with pytest.raises(RequestError, match='expected "auto" or "none" with a grammar'):
            engine.chat([USER], params, tools=TOOLS, tool_choice="required")
        assert (await engine.chat([USER], params, tools=TOOLS)).text == "a"
        with pytest.raises(RequestError, match='expected "auto" or "none" with tool_format=None') as caught:
            await engine.chat([USER], tools=TOOLS, tool_choice="required")
        assert caught.value.field == "tool_choice"


async def test_forced_call_of_a_tool_that_no_grammar_can_follow_is_rejected() -> None:
    tools = [{"name": "odd", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}]
    async with scripted_engine("fine") as engine:
        with pytest.raises(
            RequestError, match="tool_choice: no grammar describes the calls: grammar: Lark"
        ) as caught:
            await engine.chat([USER], tools=tools, tool_choice="odd")
        assert caught.value.field == "tool_choice"
        assert (await engine.chat([USER], tools=tools)).text == "fine"


def test_forced_call_needs_the_host() -> None:
    prompt = ChatPrompt(messages=[USER], tools=TOOLS, tool_choice="required")
    check_forced_calls(prompt, SamplingParams(), needs_no_host=False)
    check_forced_calls(prompt, SamplingParams(num_draft_tokens=0), needs_no_host=True)
    check_forced_calls(ChatPrompt(messages=[USER], tools=TOOLS), SamplingParams(), needs_no_host=True)
    for params in (SamplingParams(), SamplingParams(num_draft_tokens=1)):
        with pytest.raises(RequestError, match="with strict_performance and speculation"):
            check_forced_calls(prompt, params, needs_no_host=True)


async def test_samples_are_split_each_for_itself() -> None:
    async with family_engine("hermes", f"<think>Hm.</think>I look.\n{CALL}") as engine:
        found = [await stream for stream in engine.samples([USER], 3, SamplingParams(max_tokens=1000), TOOLS)]
        assert [(each.reasoning, each.text, len(each.tool_calls)) for each in found] == [
            ("Hm.", "I look.", 1)
        ] * 3
    async with family_engine("hermes", CALL) as engine:
        for stream in engine.samples([USER], 2, tools=TOOLS, tool_choice="add"):
            assert len((await stream).tool_calls) == 1
        with pytest.raises(RequestError, match="tool_choice='required': expected 'auto' with a prompt"):
            engine.samples("x", 2, tool_choice="required")


async def test_forced_call_works_where_the_template_ignores_tools(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(max_model_len=512, chat_template="{{ messages[0].content }}")
    async with scripted_engine(CALL, config=config) as engine:
        assert (await engine.chat([USER], tools=[WEATHER, *TOOLS], tool_choice="add")).tool_calls
        assert [record.getMessage() for record in caplog.records] == [
            "the chat template of scripted ignores tools: the model does not see them"
        ]
        caplog.clear()
    async with scripted_engine("fine", config=config) as engine:
        await engine.chat([USER], tools=TOOLS, tool_choice="none")
        assert caplog.records == []  # no tools are offered


async def test_message_is_continued() -> None:
    prompts: list[bytes] = []

    def record(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        prompts.append(bytes(prompt_ids))
        return 256

    async with scripted_engine(record) as engine:
        begun = [USER, {"role": "assistant", "content": "It is "}]
        await engine.chat(begun, continue_final=True)
        await engine.samples(begun, 1, continue_final=True)
        assert prompts == [b"user: hi\nassistant: It is "] * 2
        assert await engine.count_tokens(begun, continue_final=True) == len(prompts[0])
        with pytest.raises(RequestError, match=r"messages\[-1\]=.*: expected a message of the assistant"):
            await engine.chat([USER], continue_final=True)
        with pytest.raises(RequestError, match="continue_final=1: expected True or False"):
            engine.chat([USER], continue_final=1)  # type: ignore[arg-type]


async def test_message_of_an_answer_goes_back_into_the_conversation() -> None:
    async with family_engine("hermes", f"<think>Hm.</think>{CALL}") as engine:
        asked = await engine.chat([USER], tools=TOOLS)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in asked.tool_calls]
        again = await engine.chat([USER, asked.message(), *results], tools=TOOLS)
        first = len(
            engine.tokenizer.encode(f"<think>\nHm.\n</think>\n\n{CALL}<|im_end|>\n<|im_start|>tool\n1")
        )
        assert again.usage.prompt_tokens - asked.usage.prompt_tokens > first


def test_sync_engine_has_the_same_choices() -> None:
    config = EngineConfig(max_model_len=512, kv_cache_tokens=4096)
    with SyncEngine("scripted", config, open_model=ScriptedModel(CALL, config=config)) as engine:
        assert engine.chat([USER], tools=TOOLS, tool_choice="add").result().tool_calls
        (sample,) = engine.samples([USER], 1, tools=TOOLS, tool_choice="add")
        assert sample.result().tool_calls
        assert not engine.chat([USER], tools=TOOLS, tool_choice="none").result().tool_calls
        begun = [USER, {"role": "assistant", "content": "It is "}]
        num_tokens = len("user: hi\nassistant: It is ")
        (sample,) = engine.samples(begun, 1, continue_final=True)
        for stream in (engine.chat(begun, continue_final=True), sample):
            assert stream.result().usage.prompt_tokens == num_tokens
        assert engine.count_tokens(begun, continue_final=True) == num_tokens
        assert engine.count_tokens([USER], TOOLS, tool_choice="none") == engine.count_tokens([USER])


async def test_call_in_reasoning_counts_if_the_model_ends_its_answer_with_it() -> None:
    raw = f"<think>\nHm.\n{CALL}"
    async with family_engine("hermes", raw) as engine:
        for length in (len(raw), 1000):
            chunks, completion = await read(
                engine.chat([USER], SamplingParams(max_tokens=length), tools=TOOLS)
            )
            is_cut = completion.finish_reason == "length"
            assert is_cut == (length == len(raw))
            assert completion.reasoning == (raw.removeprefix("<think>\n") if is_cut else "Hm.")
            assert len(completion.tool_calls) == len(chunks[-1].tool_calls) == (not is_cut)
            assert "".join(chunk.reasoning for chunk in chunks) == completion.reasoning
