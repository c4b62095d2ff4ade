"""Recorded requests of the libraries that speak the protocols of drift_sdk.openai, sent again.

chat_requests.json has the requests and the versions of the libraries; test_clients.py recorded it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai_server import CITY, MODEL, PARIS, WEATHER, client_engine, serving

RECORDED = json.loads((Path(__file__).parent / "chat_requests.json").read_bytes())
REQUESTS = [pytest.param(each, id=f"{i}-{each['test']}") for i, each in enumerate(RECORDED["requests"])]


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


@pytest.mark.parametrize("recorded", REQUESTS)
def test_recorded_request_gets_what_its_client_needs(server: httpx.Client, recorded: dict[str, Any]) -> None:
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


def test_every_client_has_recorded_requests_of_each_kind() -> None:
    tests = {each["test"].partition("[")[0] for each in RECORDED["requests"]}
    for client in ("openai", "litellm", "instructor", "pydantic_ai", "langchain"):
        kinds = {test.removeprefix(f"{client}_") for test in tests if test.startswith(client)}
        assert {"typed", "errors"} <= kinds, client
        assert client == "instructor" or {"plain", "stream", "tools"} <= kinds, client
    assert len(RECORDED["versions"]) == 5
