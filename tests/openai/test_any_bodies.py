"""Bodies that a generator draws: every one gets an answer, and none an internal error."""

from __future__ import annotations

import copy
from typing import Any

import anyio
import pytest
from asgi_calls import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import WAIT_S

import drift_sdk.openai
from drift_sdk import EngineConfig
from drift_sdk.testing import scripted_engine

TEXT = {"type": "text", "text": "hi"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}},
        "stream_options": {"include_usage": True},
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "max_tokens": 5,
    },
    "/v1/completions": {
        "prompt": ["a", "b"],
        "n": 2,
        "logprobs": 1,
        "structured_outputs": {"choice": ["a"]},
        "max_tokens": 5,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": 1}}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": [TEXT]},
            {
                "role": "assistant",
                "content": [TEXT, {"type": "tool_use", "id": "c", "name": "f", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {"const": 1}}},
    },
}

# With a template that shows calls, so that there is no warning.
CONFIG = EngineConfig(max_model_len=512, kv_cache_tokens=4096, chat_template="{{ tools }}{{ messages }}")

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | st.text(max_size=4) | st.sampled_from(["text", "function", "auto", "json_object", "user", "f"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside a value: its container and its key."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    inner = [(value, key) for key in keys]
    return inner + [place for key in keys for place in places_in(value[key])]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A valid body, of which some values are replaced or removed."""
    body = copy.deepcopy(VALID[path])
    for _ in range(draw(st.integers(1, 3))):
        if places := places_in(body):
            container, key = draw(st.sampled_from(places))
            if draw(st.booleans()):
                container[key] = draw(values)
            else:
                del container[key]
    return body


@pytest.mark.parametrize("path", VALID)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_body_gets_an_answer(path: str, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(bodies(path), min_size=4, max_size=4))

    async def main() -> None:
        async with scripted_engine(
            "1", config=EngineConfig(max_model_len=512, kv_cache_tokens=4096)
        ) as engine:
            app = drift_sdk.openai.app(engine)
            for body in drawn:
                with anyio.fail_after(WAIT_S):
                    found = await call(app, path, body)
                assert found.status in (200, 400, 404), (found.status, found.body, body)
                assert found.status == 200 or found.error["message"]
            assert engine.is_open

    anyio.run(main)
