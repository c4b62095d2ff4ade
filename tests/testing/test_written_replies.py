"""Replies written in the formats of model families, read by the parser of answers."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import BOTH, FAMILIES, TOOLS

from drift_sdk import ConfigError, EngineConfig, ToolCall
from drift_sdk.testing import Reply, scripted_engine
from drift_sdk.testing.replies import AT_START_ONLY, CALLS
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


UNTYPED = ("qwen3_coder", "glm")
"""Formats that write values as text."""


@pytest.mark.parametrize("tool_format", [name for name in TOOL_FORMATS if name not in UNTYPED])
async def test_arguments_of_any_type_keep_their_values(tool_format: str) -> None:
    call = ToolCall(name="get_weather", arguments=VALUES)
    config = EngineConfig(tool_format=tool_format)
    async with scripted_engine(call, config=config, tokens_per_step=16) as engine:
        (found,) = (await engine.chat([USER], tools=TOOLS)).tool_calls
    assert (found.name, found.arguments) == ("get_weather", VALUES)


UNQUOTED = ["pythonic", "magistral", "qwen3_coder", "glm", "gemma4", "deepseek_v3", "deepseek_v31", "harmony"]
"""Families that write the names of tools without quotes."""


@pytest.mark.parametrize(
    ("family", "name", "arguments"),
    [
        *((family, "get weather", {}) for family in UNQUOTED),
        *((family, "", {}) for family in FAMILIES if family != "harmony"),
        ("pythonic", "f", {"a b": 1}),
        ("pythonic", "f", {"": 1}),
        ("pythonic", "f", {"a": {1: 2}}),
        ("qwen3_coder", "f", {"a>b": 1}),
        ("glm", "f", {"a": "x</arg_value>y"}),
        ("glm", "f", {" a": 1}),
        ("glm", "f", {"a</arg_key>": 1}),
        ("gemma4", "f", {"a": 'x<|"|>y'}),
        ("gemma4", "f", {"a": [{" b": 1}]}),
        ("gemma4", "f", {"a:b": 1}),
        ("gemma4", "f", {"a,b": 1}),
        ("gemma4", "f", {"": 1}),
        ("qwen3_coder", "f", {"a": "x</parameter><parameter=b>y"}),
        ("qwen3_coder", "f", {"a": "x</parameter>\n</function>"}),
    ],
)
async def test_calls_that_a_format_cannot_express_are_rejected(
    family: str, name: str, arguments: dict[str, object]
) -> None:
    template, (tool_format, _), _, _ = FAMILIES[family]
    calls = [ToolCall(name="f", arguments={}), ToolCall(name=name, arguments=arguments)]
    config = EngineConfig(chat_template=template, max_model_len=8192, kv_cache_tokens=32_768)
    expected = f"^tool_calls=ToolCall.*: expected calls that the format {tool_format} can express"
    with pytest.raises(ConfigError, match=expected):
        await scripted_engine(calls, config=config).start()
    async with scripted_engine(lambda prompt: calls, config=config) as engine:
        with pytest.raises(ConfigError, match=expected):
            await engine.generate("x")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", [{"a": "\ud800"}, {"a": object()}, {"a": float("nan")}, None, ["a"]])
async def test_arguments_that_are_not_json_are_rejected(family: str, arguments: Any) -> None:
    call = ToolCall(name="f", arguments=arguments)
    config = EngineConfig(chat_template=FAMILIES[family].template)
    with pytest.raises(ConfigError, match="^tool_calls: expected arguments that are JSON"):
        await scripted_engine(call, config=config.replace(max_model_len=8192, kv_cache_tokens=32_768)).start()


async def test_id_of_a_call_is_kept_and_calls_can_be_forced() -> None:
    calls = [
        ToolCall(name="get_weather", arguments=BOTH[0][1], id="call-1"),
        ToolCall(name="add", arguments=BOTH[1][1]),
    ]
    async with scripted_engine(calls, tokens_per_step=4) as engine:
        assert (await engine.chat([USER], tools=TOOLS)).tool_calls[0].id == "call-1"
        (forced,) = (await engine.chat([USER], tools=TOOLS, tool_choice="required")).tool_calls
        assert (forced.name, forced.arguments) == BOTH[1]
