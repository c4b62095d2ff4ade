"""Replies written in the formats of model families, read by the parser of answers."""

from __future__ import annotations

import pytest
from chat_families import BOTH, FAMILIES, TOOLS

from drift_sdk import EngineConfig, ToolCall
from drift_sdk.testing import Reply, scripted_engine
from drift_sdk.testing.written_replies import AT_START_ONLY, CALLS
from drift_sdk.text.answers.tool_formats import TOOL_FORMATS

USER = {"role": "user", "content": "hi"}
VALUES = {"city": "a\"b\\ ]}'é", "days": 3, "exact": True, "other": [None, -1.5, {"k": [False]}]}


def test_every_tool_format_is_written() -> None:
    assert set(CALLS) | {"harmony"} == set(TOOL_FORMATS) | {"harmony"}


@pytest.mark.parametrize("family", FAMILIES)
async def test_replies_are_parsed_as_they_were_given(family: str) -> None:
    template, (tools, reasoning), _, _ = FAMILIES[family]
    text = "" if tools in AT_START_ONLY else "I look."
    thought = "Is it raining?" if reasoning is not None else ""
    calls = [ToolCall(name=name, arguments=arguments) for name, arguments in BOTH]
    # A template that opens reasoning takes a text for reasoning until it is closed.
    first = thought if family == "deepseek_v3" else ""
    replies = [
        Reply("Sunny.", reasoning=first),
        Reply(text, tool_calls=calls, reasoning=thought),
        Reply("Yes.", reasoning=thought),
    ]
    config = EngineConfig(chat_template=template, max_model_len=8192, kv_cache_tokens=32_768)
    async with scripted_engine(replies, config=config, tokens_per_step=16) as engine:
        done = [await engine.chat([USER], tools=TOOLS, max_tokens=None) for _ in replies]
    assert [(each.text, each.reasoning) for each in done] == [
        ("Sunny.", first),
        (text, thought),
        ("Yes.", thought),
    ]
    assert [[(call.name, call.arguments) for call in each.tool_calls] for each in done] == [
        [],
        list(BOTH),
        [],
    ]


@pytest.mark.parametrize("tool_format", [name for name in TOOL_FORMATS if name != "qwen3_coder"])
async def test_arguments_of_any_type_keep_their_values(tool_format: str) -> None:
    call = ToolCall(name="get_weather", arguments=VALUES)
    config = EngineConfig(tool_format=tool_format)
    async with scripted_engine(call, config=config, tokens_per_step=16) as engine:
        (found,) = (await engine.chat([USER], tools=TOOLS)).tool_calls
    assert (found.name, found.arguments) == ("get_weather", VALUES)


async def test_id_of_a_call_is_kept_and_calls_can_be_forced() -> None:
    calls = [
        ToolCall(name="get_weather", arguments=BOTH[0][1], id="call-1"),
        ToolCall(name="add", arguments=BOTH[1][1]),
    ]
    async with scripted_engine(calls, tokens_per_step=4) as engine:
        assert (await engine.chat([USER], tools=TOOLS)).tool_calls[0].id == "call-1"
        (forced,) = (await engine.chat([USER], tools=TOOLS, tool_choice="required")).tool_calls
        assert (forced.name, forced.arguments) == BOTH[1]
