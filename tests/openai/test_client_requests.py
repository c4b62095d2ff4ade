"""Recorded requests of the libraries that speak the protocols of drift_sdk.openai, sent again.

chat_requests.json and more_requests.json have the requests and the versions of the libraries; test_clients.py
and test_more_clients.py recorded them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai_server import CITY, MODEL, PARIS, WEATHER, client_engine, serving
from pydantic import TypeAdapter

FILES = ("chat_requests.json", "more_requests.json")
RECORDED = [json.loads((Path(__file__).parent / name).read_bytes()) for name in FILES]


def requests_to(path: str) -> list[Any]:
    found = [each for file in RECORDED for each in file["requests"] if each["path"] == path]
    return [pytest.param(each, id=f"{number}-{each['test']}") for number, each in enumerate(found)]


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with (
        serving(client_engine(max_model_len=8192)) as url,
        httpx.Client(base_url=url, verify=False) as client,
    ):
        yield client


def expected_message(body: dict[str, Any]) -> tuple[str | None, list[tuple[str, Any]]]:
    """The text and the tool calls that the scripted model answers with."""
    if body["messages"][-1]["role"] == "tool":
        return json.dumps(CITY) if "response_format" in body else "It is sunny in Rome.", []

    if body.get("tools"):
        name = body["tools"][0]["function"]["name"]
        return None, [(name, WEATHER if name == "get_weather" else CITY)]

    return json.dumps(CITY) if "city" in str(body["messages"][-1]["content"]) else PARIS, []


def joined(text: str, body: dict[str, Any]) -> tuple[str | None, list[tuple[str, Any]], str | None]:
    """Text, calls and finish reason of a stream of events, which must have the order that clients rely on."""
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")) for event in events]
    if (body.get("stream_options") or {}).get("include_usage"):
        last = chunks.pop()
        assert last.choices == [] and last.usage is not None
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens > 0
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert all(choice.finish_reason is None for choice in choices[:-1])
    assert not choices[-1].delta.tool_calls
    deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in deltas] == list(range(len(deltas)))
    assert all(call.id and call.type == "function" for call in deltas)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in deltas]
    content = "".join(choice.delta.content or "" for choice in choices)
    return content or None, calls, choices[-1].finish_reason


@pytest.mark.parametrize("recorded", requests_to("/v1/chat/completions"))
def test_recorded_request_of_chat_gets_what_its_client_needs(
    server: httpx.Client, recorded: dict[str, Any]
) -> None:
    body = recorded["body"]
    found = server.post(recorded["path"], json=body, headers=recorded["headers"])
    if body["model"] != MODEL:
        assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
        return

    assert found.status_code == 200, found.text
    text, calls = expected_message(body)
    reason = "tool_calls" if calls else "stop"
    if body.get("stream"):
        assert found.headers["content-type"].startswith("text/event-stream")
        assert joined(found.text, body) == (text, calls, reason)
        return

    whole = ChatCompletion.model_validate_json(found.content)
    (choice,), usage = whole.choices, whole.usage
    made = [
        (call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []
    ]
    assert (choice.message.content, made, choice.finish_reason) == (text, calls, reason)
    assert all(call.id for call in choice.message.tool_calls or [])
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0


def answers(last: str, *, is_result: bool, has_tools: bool, is_typed: bool) -> tuple[str | None, Any]:
    """The text and the arguments of the call that the scripted model answers with."""
    if is_result:
        return "It is sunny in Rome.", None

    if has_tools:
        return None, WEATHER if "weather" in last else CITY

    return json.dumps(CITY) if is_typed or "city" in last else PARIS, None


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: names and data, in which the name stands too."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        values = json.loads(data.removeprefix("data: "))
        found.append((name.removeprefix("event: "), values))
        assert values["type"] == found[-1][0]
    return found


RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize("recorded", requests_to("/v1/responses"))
def test_recorded_request_of_responses_gets_what_its_client_needs(
    server: httpx.Client, recorded: dict[str, Any]
) -> None:
    body = recorded["body"]
    found = server.post(recorded["path"], json=body, headers=recorded["headers"])
    if body["model"] != MODEL or "previous_response_id" in body:
        status, param = (404, "model") if body["model"] != MODEL else (400, "previous_response_id")
        assert (found.status_code, found.json()["error"]["param"]) == (status, param)
        return

    assert found.status_code == 200, found.text
    last = body["input"] if isinstance(body["input"], str) else body["input"][-1]
    text, arguments = answers(
        str(last),
        is_result=isinstance(last, dict) and last.get("type") == "function_call_output",
        has_tools=bool(body.get("tools")),
        is_typed="format" in (body.get("text") or {}),
    )
    if body.get("stream"):
        events = [RESPONSE_EVENT.validate_python(data) for _, data in events_of(found.text)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert ("".join(pieces) or None) == text
        whole = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == whole.output
    else:
        whole = Response.model_validate_json(found.content)
    calls = [json.loads(item.arguments) for item in whole.output if item.type == "function_call"]
    assert (whole.output_text or None, calls) == (text, [] if arguments is None else [arguments])
    assert whole.usage is not None and whole.usage.total_tokens > whole.usage.output_tokens > 0


@pytest.mark.parametrize("recorded", requests_to("/v1/messages"))
def test_recorded_request_of_messages_gets_what_its_client_needs(
    server: httpx.Client, recorded: dict[str, Any]
) -> None:
    body = recorded["body"]
    found = server.post(recorded["path"], json=body, headers=recorded["headers"])
    if body["model"] != MODEL:
        error = found.json()
        assert (found.status_code, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
        return

    assert found.status_code == 200, found.text
    last = body["messages"][-1]["content"]
    text, arguments = answers(
        str(last),
        is_result=isinstance(last, list) and last[-1]["type"] == "tool_result",
        has_tools=bool(body.get("tools")),
        is_typed="output_config" in body,
    )
    reason = "end_turn" if arguments is None else "tool_use"
    if not body.get("stream"):
        whole = found.json()
        (block,) = whole["content"]
        assert block.get("text") == text and block.get("input") == arguments
        assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", reason)
        return

    (first, start), *blocks, (delta, ended), (stop, _) = events_of(found.text)
    assert (first, delta, stop) == ("message_start", "message_delta", "message_stop")
    assert ended["delta"]["stop_reason"] == reason and ended["usage"]["output_tokens"] > 0
    usage = ended["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert start["message"]["usage"]["input_tokens"] == total > 0
    assert [name for name, _ in blocks[:1] + blocks[-1:]] == ["content_block_start", "content_block_stop"]
    deltas = [data["delta"] for name, data in blocks if name == "content_block_delta"]
    assert ("".join(each.get("text", "") for each in deltas) or None) == text
    written = "".join(each.get("partial_json", "") for each in deltas)
    assert (json.loads(written) if written else None) == arguments


@pytest.mark.parametrize("recorded", requests_to("/v1/messages/count_tokens"))
def test_recorded_count_is_that_of_the_answer(server: httpx.Client, recorded: dict[str, Any]) -> None:
    counted = server.post(recorded["path"], json=recorded["body"], headers=recorded["headers"])
    whole = server.post("/v1/messages", json={"max_tokens": 1, **recorded["body"]})
    usage = whole.json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"] > 0


def test_every_client_has_recorded_requests_of_each_kind() -> None:
    tests = {each["test"].partition("[")[0] for file in RECORDED for each in file["requests"]}
    clients = ("openai", "litellm", "instructor", "pydantic_ai", "langchain")
    for client in (*clients, "openai_responses", "anthropic", "agents"):
        kinds = {test.removeprefix(f"{client}_") for test in tests if test.startswith(client)}
        assert "typed" in kinds and ("errors" in kinds or client == "agents"), client
        assert client == "instructor" or {"plain", "stream", "tools"} <= kinds, client
    assert [len(file["versions"]) for file in RECORDED] == [5, 6]
