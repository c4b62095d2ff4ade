"""OpenAI's Responses: fields, items, and the events of a stream."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from asgi_calls import Reply as Found
from asgi_calls import call
from openai.types.responses import response_create_params as params

import drift_sdk.openai
from drift_sdk import EngineConfig, JsonSchema, RequestError, SamplingParams, ToolCall
from drift_sdk.openai.responses import ResponsesBody, messages_of
from drift_sdk.openai.wire import read
from drift_sdk.testing import Reply, scripted_engine

PATH = "/v1/responses"
THINKING = EngineConfig(max_model_len=4096, kv_cache_tokens=65_536, reasoning_format="think")
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"
]
CALLS = tuple(ToolCall(name=name, arguments={"a": 1}, id=f"call_{name}") for name in "fg")


async def ask(reply: Any, config: EngineConfig = THINKING, **fields: Any) -> Found:
    async with scripted_engine(reply, config=config) as engine:
        return await call(drift_sdk.openai.app(engine), PATH, {"input": "hi", **fields})


def test_every_field_of_the_client_is_supported_ignored_or_refused() -> None:
    known = {*ResponsesBody.__struct_fields__, *ResponsesBody.sampling_names} - {"sampling"}
    kinds = (params.ResponseCreateParamsNonStreaming, params.ResponseCreateParamsStreaming)
    for name in {name for kind in kinds for name in typing.get_type_hints(kind)}:
        assert sum(name in each for each in (known, ResponsesBody.ignored, ResponsesBody.refused)) == 1, name


def params_of(**fields: Any) -> SamplingParams:
    body = read({"input": "hi", **fields}, ResponsesBody)
    return body.params(SamplingParams(temperature=0.6, top_k=20), is_forced=False)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": -1}, {"top_p": 0.5, "top_k": 0}),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"top_logprobs": 3}, {"logprobs": 3}),
        ({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, {"logprobs": 0}),
        ({"text": {"format": {"type": "json_object"}}}, {"grammar": JsonSchema({"type": "object"})}),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "name": "x", "schema": {"const": 1}, "strict": True}
                }
            },
            {"grammar": JsonSchema({"const": 1})},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        (dict.fromkeys(["temperature", "text", "tools", "tool_choice", "prompt", "background"]), {}),
    ],
)
def test_fields_become_parameters(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    assert params_of(**fields) == SamplingParams(temperature=0.6, top_k=20, max_tokens=None).replace(
        **changes
    )


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
        | {"content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": None},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "x"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "ok"},
    ]

    def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages, places = messages_of(items, "Be brief.")
    assert places["messages[0]"] == "instructions" and places["messages[4]"] == "input[6]"
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": [{"type": "text", "text": "I look."}],
            "tool_calls": [called("c1", "f", "{}"), called("c2", "g", '{"a": 1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "reasoning_content": "so", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "ok"},
    ]


TEXT = {"type": "input_text", "text": "x"}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("input", {"input": []}),
        ("input", {"input": 5}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input[0].type", {"input": [{"type": "computer_call"}]}),
        ("input[0].type", {"input": [{"type": ["message"]}]}),
        ("input[0].role", {"input": [{"role": "wizard", "content": "x"}]}),
        ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        (
            "input[0].content[1]",
            {"input": [{"role": "user", "content": [TEXT, {"type": "input_image"}]}], "instructions": "x"},
        ),
        ("input[1].call_id", {"input": [{"role": "user", "content": "x"}, {"type": "function_call_output"}]}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].name", {"tools": [{"type": "function", "name": "a b"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "name": "h"}, "tools": FUNCTIONS}),
        ("tool_choice.type", {"tool_choice": {"type": "file_search"}, "tools": FUNCTIONS}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("temprature", {"temprature": 1}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_cannot_be_honoured_is_named(
    param: str, fields: dict[str, Any], is_streamed: bool
) -> None:
    found = await ask("x", **fields, stream=is_streamed)
    assert (found.status, found.error["param"], found.error["type"]) == (400, param, "invalid_request_error")


async def test_a_stream_builds_the_answer_that_is_given_whole() -> None:
    reply = Reply("Let me see.", CALLS, "hm, well")
    whole = (await ask(reply, tools=FUNCTIONS)).json
    events = (await ask(reply, tools=FUNCTIONS, stream=True)).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta"),
        *("output_text.done", "function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    assert events[0]["response"]["output"] == []
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == done
    for found in (last, whole):
        reasoning, message, first, second = found["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, well"}]
        assert [part["text"] for part in message["content"]] == ["Let me see."]
        assert [(each["name"], json.loads(each["arguments"])) for each in (first, second)] == [
            ("f", {"a": 1}),
            ("g", {"a": 1}),
        ]
        assert all(item["status"] == "completed" for item in found["output"])
        assert found["status"] == "completed" and found["usage"]["total_tokens"] > 0
        assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": len("hm, well")}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_that_is_cut_short_is_incomplete(is_streamed: bool) -> None:
    found = await ask("a long text", max_output_tokens=6, stream=is_streamed)
    response = found.events[-1]["response"] if is_streamed else found.json
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    (message,) = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "a long")
    if is_streamed:
        assert found.events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_empty_answer_is_a_message(is_streamed: bool) -> None:
    found = await ask("", stream=is_streamed)
    response = found.events[-1]["response"] if is_streamed else found.json
    assert [part["text"] for part in response["output"][0]["content"]] == [""]


async def test_logprobs_of_a_stream_are_those_of_the_whole_answer() -> None:
    fields = {"include": ["message.output_text.logprobs"]}
    whole = (await ask("é ok", **fields)).json["output"][0]["content"][0]["logprobs"]
    events = (await ask("é ok", **fields, stream=True)).events
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == whole
    assert bytes(byte for entry in whole for byte in entry["bytes"]) == "é ok".encode()


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}


async def test_only_allowed_tools_are_offered() -> None:
    config = THINKING.replace(chat_template="{{ tools | tojson }}", reasoning_format=None)
    prompts: list[str] = []

    def noted(prompt: str) -> str:
        prompts.append(prompt)
        return "x"

    found = await ask(noted, config, tools=FUNCTIONS, tool_choice=ALLOWED)
    assert found.json["tool_choice"] == ALLOWED
    assert [tool["function"]["name"] for tool in json.loads(prompts[0])] == ["g"]
    wrong = {**ALLOWED, "tools": [{"type": "function", "name": "h"}]}
    assert (await ask("x", tools=FUNCTIONS, tool_choice=wrong)).error["param"] == "tool_choice"


async def test_one_call_is_kept_without_parallel_tool_calls() -> None:
    for is_parallel, num_calls in ((True, 2), (False, 1)):
        found = await ask(Reply("", CALLS), tools=FUNCTIONS, parallel_tool_calls=is_parallel)
        assert [item["type"] for item in found.json["output"]] == ["function_call"] * num_calls


async def test_effort_reaches_the_template() -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ style }}"
    config = THINKING.replace(chat_template=template, reasoning_format=None)
    fields = {"reasoning": {"effort": "none", "summary": "auto"}, "chat_template_kwargs": {"style": "brief"}}
    found = await ask(lambda prompt: prompt, config, **fields)
    assert found.json["output"][0]["content"][0]["text"] == "none False brief"


def test_an_unknown_item_of_a_body_is_an_error() -> None:
    with pytest.raises(RequestError, match=r"input\[0\]"):
        messages_of([{"type": "mcp_call"}], None)
