"""Anthropic's Messages: fields, content blocks, and the events of a stream."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_calls import Reply as Found
from asgi_calls import call

import drift_sdk.openai
from drift_sdk import EngineConfig, JsonSchema, SamplingParams, ToolCall
from drift_sdk.openai.messages import InputMessage, MessagesBody, messages_of
from drift_sdk.openai.wire import convert, read
from drift_sdk.testing import Reply, scripted_engine

PATH = "/v1/messages"
THINKING = EngineConfig(max_model_len=4096, kv_cache_tokens=65_536, reasoning_format="think")
PLAIN = THINKING.replace(reasoning_format=None)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BASE = {"messages": ASKED, "max_tokens": 300}
TOOLS: list[dict[str, Any]] = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
CALLS = tuple(ToolCall(name=name, arguments={"a": 1}) for name in "fg")


async def ask(reply: Any, config: EngineConfig = THINKING, *, path: str = PATH, **fields: Any) -> Found:
    async with scripted_engine(reply, config=config) as engine:
        body = {**(BASE if path == PATH else {"messages": ASKED}), **fields}
        return await call(drift_sdk.openai.app(engine), path, body)


def text_of(found: Found) -> str:
    return "".join(block["text"] for block in found.json["content"] if block["type"] == "text")


def params_of(**fields: Any) -> SamplingParams:
    body = read({**BASE, **fields}, MessagesBody)
    return body.params(SamplingParams(temperature=0.6), is_forced=False)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, {"temperature": 0.0, "top_p": 0.5, "top_k": 3}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ("a", "b")}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": 1}}}},
            {"grammar": JsonSchema({"const": 1})},
        ),
        ({"metadata": {"user_id": "x"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}, {}),
        ({"context_management": {"edits": []}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, {"thinking_budget": 64}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (dict.fromkeys(["system", "stop_sequences", "thinking", "tools", "container"]), {}),
    ],
)
def test_fields_become_parameters(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    assert params_of(**fields) == SamplingParams(temperature=0.6, max_tokens=300).replace(**changes)


def test_blocks_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "q", **cached}, {"type": "text", "text": "r"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ", "citations": None},
                {"type": "text", "text": "look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}, **cached},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}]},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Well"},
    ]

    def called(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages = convert(given, list[InputMessage])
    found, places = messages_of([{"type": "text", "text": "Be brief.", **cached}], messages)
    assert places["messages[4].content"] == "messages[2].content[1].content"
    assert places["messages[5].content[0]"] == "messages[2].content[2]"
    assert found == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [called("t1", "f", {"a": 1}), called("t2", "g", {})],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Well"},
    ]


WRONG_FORMAT = {"type": "json_schema", "schema": {"type": 5}}
IMAGE = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
SEARCHED = [*ASKED, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "x"}]}]
UNNAMED = [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("messages", {"messages": []}),
        ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("messages[0].content[0]={", {"messages": [IMAGE], "system": "x"}),
        ("images are not supported", {"messages": [IMAGE]}),
        ("messages[1].content[0].type", {"messages": SEARCHED}),
        ("messages[1].content[0].name", {"messages": UNNAMED}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tool_choice", {"tool_choice": {"type": "tool", "name": "h"}, "tools": TOOLS}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}, "tools": TOOLS}),
        ("thinking.type", {"thinking": {"type": "between_tools"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": -1}}),
        (
            "output_config.format",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
        ),
        ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
        ("context_management", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        ("temprature", {"temprature": 1}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_cannot_be_honoured_is_named(said: str, fields: dict[str, Any], is_streamed: bool) -> None:
    found = await ask("x", **fields, stream=is_streamed)
    assert (found.status, found.json["type"]) == (400, "error")
    assert found.error["type"] == "invalid_request_error" and said in found.error["message"]


async def test_a_stream_builds_the_answer_that_is_given_whole() -> None:
    reply = Reply("Let me see.", CALLS, "hm, well")
    whole = (await ask(reply, tools=TOOLS)).json
    events = (await ask(reply, tools=TOOLS, stream=True)).events
    start, *blocks, delta, stop = events
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    built: list[dict[str, Any]] = []
    for event in blocks:
        if event["type"] == "content_block_start":
            assert event["index"] == len(built)
            built.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            kind = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
            name = kind[event["delta"]["type"]]
            built[event["index"]]["json" if name == "partial_json" else name] += event["delta"][name]
        else:
            assert event == {"type": "content_block_stop", "index": len(built) - 1}
    assert [block["type"] for block in built] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *uses = whole["content"]
    assert (thinking["thinking"], text["text"]) == (built[0]["thinking"], built[1]["text"])
    assert (thinking["thinking"], text["text"]) == ("hm, well", "Let me see.")
    assert [(use["name"], use["input"]) for use in uses] == [("f", {"a": 1}), ("g", {"a": 1})]
    assert [block["json"] for block in built[2:]] == ['{"a": 1}'] * 2
    assert whole["stop_reason"] == delta["delta"]["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens"] == delta["usage"]["output_tokens"]
    for usage in (whole["usage"], delta["usage"]):
        assert usage["output_tokens_details"] == {"thinking_tokens": len("hm, well")}
    assert start["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("reason", "sequence", "fields"),
    [
        ("end_turn", None, {}),
        ("max_tokens", None, {"max_tokens": 3}),
        ("stop_sequence", "text", {"stop_sequences": ["none", "text"]}),
        ("model_context_window_exceeded", None, {"messages": [{"role": "user", "content": "x" * 4070}]}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_says_why_it_ended(
    reason: str, sequence: str | None, fields: dict[str, Any], is_streamed: bool
) -> None:
    found = await ask("a long text", **fields, stream=is_streamed)
    ended = found.events[-2]["delta"] if is_streamed else found.json
    assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, sequence)


async def test_the_assistants_last_message_is_continued() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<new>{% endif %}"
    )
    config = PLAIN.replace(chat_template=template)
    begun = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    assert text_of(await ask(lambda prompt: prompt, config, messages=begun)) == "<user>hi<assistant>It is"
    counted = await ask("x", config, path=f"{PATH}/count_tokens", messages=begun)
    assert counted.json == {"input_tokens": len("<user>hi<assistant>It is")}


@pytest.mark.parametrize(
    ("thinking", "effort", "shown"),
    [
        (None, None, " "),
        ({"type": "enabled", "budget_tokens": 1024}, None, "True "),
        ({"type": "disabled"}, None, "False "),
        ({"type": "adaptive"}, "max", " max"),
    ],
)
async def test_thinking_and_effort_reach_the_template(thinking: Any, effort: Any, shown: str) -> None:
    config = PLAIN.replace(chat_template="[{{ enable_thinking }} {{ reasoning_effort }}]")
    found = await ask(lambda prompt: prompt, config, thinking=thinking, output_config={"effort": effort})
    assert text_of(found) == f"[{shown}]"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_thinking_can_be_omitted(is_streamed: bool) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    found = await ask(Reply("Paris.", reasoning="secret"), thinking=thinking, stream=is_streamed)
    assert b"secret" not in found.body and b'"thinking"' in found.body and b"end_turn" in found.body


async def test_tools_are_chosen() -> None:
    config = PLAIN.replace(chat_template="{% if tools %}tools{% endif %}{{ messages[0].content }}")
    hidden = await ask(lambda prompt: prompt, config, tools=TOOLS, tool_choice={"type": "none"})
    assert text_of(hidden) == "hi"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    found = await ask(Reply("", CALLS), tools=TOOLS, tool_choice=one)
    assert [block["name"] for block in found.json["content"]] == ["f"]
    for choice, names in (({"type": "tool", "name": "g"}, ["g"]), ({"type": "any"}, ["f", "g"])):
        calls = CALLS[1:] if choice["type"] == "tool" else CALLS
        found = await ask(Reply("", calls), tools=TOOLS, tool_choice=choice)
        assert [block["name"] for block in found.json["content"]] == names


async def test_errors_of_unknown_routes_have_the_shape_of_the_protocol() -> None:
    found = await ask("x", path=f"{PATH}/batches")
    assert (found.status, found.json["type"], found.error["type"]) == (404, "error", "not_found_error")
