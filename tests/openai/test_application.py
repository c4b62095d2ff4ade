"""The application in process: mounting, names, keys, salts, and clients that are slow, hostile, or leave."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest
from asgi_calls import call, endless, streamed
from loops import WAIT_S, on_every_loop, run, until
from starlette.applications import Starlette
from starlette.routing import Mount

import drift_sdk.openai
from drift_sdk import ConfigError, DriftError, Engine, EngineConfig, EnginePool
from drift_sdk.testing import scripted_engine

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
ENDPOINTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
}
WITHOUT_STREAMS = ("count_tokens", "embeddings", "score", "rerank")
STREAMS = [path for path in ENDPOINTS if not path.endswith(WITHOUT_STREAMS)]
every_endpoint = pytest.mark.parametrize("path", ENDPOINTS)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with scripted_engine("Paris.") as engine:
        yield engine


def text_of(path: str, found: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return str(found["output"][0]["content"][0]["text"])

    if path == "/v1/messages":
        return str(found["content"][0]["text"])

    choice = found["choices"][0]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


def test_without_starlette_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("drift_sdk.openai")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(DriftError, match=re.escape("drift-engine[openai]")):
        importlib.import_module("drift_sdk.openai")


def delta_of(event: Any) -> str:
    """The text that an event of a stream adds, in any protocol."""
    if event == "[DONE]" or not ("choices" in event or event["type"].endswith("delta")):
        return ""

    if "choices" in event:
        choice = event["choices"][0]
        return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))

    delta = event["delta"]
    return str(delta if isinstance(delta, str) else delta.get("text", ""))


@on_every_loop
def test_all_protocols_are_served_under_a_prefix_on_every_event_loop(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("Paris.") as engine:
            app = Starlette(routes=[Mount("/llm", drift_sdk.openai.app(engine))])
            for path in STREAMS:
                found = await call(app, f"/llm{path}", ENDPOINTS[path])
                assert (found.status, text_of(path, found.json)) == (200, "Paris.")
                found = await call(app, f"/llm{path}", {**ENDPOINTS[path], "stream": True})
                assert found.status == 200
                assert found.headers["content-type"].startswith("text/event-stream")
                assert "".join(map(delta_of, found.events)) == "Paris."
            several = {"prompt": ["a", "b", "c"], "n": 2, "stream": True}
            found = await call(app, "/llm/v1/completions", several)
            texts = dict.fromkeys(range(6), "")
            for event in found.events[:-1]:
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert list(texts.values()) == ["Paris."] * 6
            assert engine.is_open

    run(loop, main)


async def test_two_applications_share_nothing() -> None:
    async with scripted_engine("one") as one, scripted_engine("two") as two:
        first, second = drift_sdk.openai.app(one, api_keys=["k"]), drift_sdk.openai.app({"b": two})
        host = Starlette(routes=[Mount("/a", first), Mount("/b", second)])
        assert (await call(host, f"/a{CHAT}", ENDPOINTS[CHAT])).status == 401
        found = await call(host, f"/b{CHAT}", {**ENDPOINTS[CHAT], "model": "b"})
        assert text_of(CHAT, found.json) == "two"
        with_key = await call(host, f"/a{CHAT}", ENDPOINTS[CHAT], headers={"authorization": "Bearer k"})
        assert text_of(CHAT, with_key.json) == "one"


async def test_run_by_itself_it_starts_engines_that_are_not_open_and_closes_these() -> None:
    async with scripted_engine("open") as engine:
        other = scripted_engine("new")
        app = drift_sdk.openai.app({"a": engine, "b": other, "c": other})
        async with app.router.lifespan_context(app):
            assert other.is_open
        assert (engine.is_open, other.is_open) == (True, False)
        assert (await call(app, "/health", method="GET")).status == 503


async def test_models_are_served_by_their_names() -> None:
    pool = EnginePool([scripted_engine("two"), scripted_engine("two")])
    async with scripted_engine("one") as one, pool as two:
        app = drift_sdk.openai.app({"one": one, "alias": one, "two": two})
        for name, text in (("one", "one"), ("alias", "one"), ("two", "two")):
            found = (await call(app, CHAT, {"model": name, "messages": MESSAGES})).json
            assert (found["model"], text_of(CHAT, found)) == (name, text)
        listed = (await call(app, "/v1/models", method="GET")).json
        assert [model["id"] for model in listed["data"]] == ["one", "alias", "two"]
        assert (await call(app, "/v1/models/alias", method="GET")).json["id"] == "alias"
        unnamed = await call(app, CHAT, {"messages": MESSAGES})
        assert (unnamed.status, unnamed.error["param"]) == (400, "model")
        metrics = (await call(app, "/metrics", method="GET")).body.decode()
        assert 'drift_requests_submitted_total{engine="one"} 2.0' in metrics
        assert 'drift_requests_submitted_total{engine="two"} 1.0' in metrics


@every_endpoint
async def test_unknown_models_and_routes_name_those_that_are_there(engine: Engine, path: str) -> None:
    app = drift_sdk.openai.app({"a/b": engine, "c": engine})
    unknown = await call(app, path, {**ENDPOINTS[path], "model": "gpt"})
    assert unknown.status == 404 and "'a/b', 'c'" in unknown.error["message"]
    missing = await call(app, f"{path}/nothing", {})
    assert missing.status == 404
    assert all(each in missing.error["message"] for each in ENDPOINTS)
    assert (await call(app, path, method="GET")).status == 405
    is_anthropic = path.startswith("/v1/messages")
    for found, kind in ((unknown, "not_found_error"), (missing, "not_found_error")):
        assert found.error["type"] == (kind if is_anthropic else "invalid_request_error")


@every_endpoint
async def test_one_of_the_keys_is_needed(engine: Engine, path: str) -> None:
    app = drift_sdk.openai.app(engine, api_keys=["first", "second"])
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer third"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "first\u00ff"}, 401),
        ({"authorization": "Bearer second"}, 200),
        ({"authorization": "bearer first"}, 200),
        ({"x-api-key": "second"}, 200),
    ):
        shown = {
            name: value.encode(errors="surrogateescape").decode("latin-1") for name, value in headers.items()
        }
        found = await call(app, path, ENDPOINTS[path], headers=shown)
        assert found.status == status, headers
        if status == 401:
            assert "first" not in found.error["message"]
            assert found.error["type"].startswith("auth" if "messages" in path else "invalid")
    assert (await call(app, "/metrics", method="GET")).status == 401
    assert (await call(app, "/v1/models", method="GET")).status == 401
    assert (await call(app, "/health", method="GET")).status == 200


async def test_a_wrong_key_is_refused_before_the_body_is_read(engine: Engine) -> None:
    app = drift_sdk.openai.app(engine, api_keys=["first"])
    found = await call(app, CHAT, endless(b"{"))
    assert (found.status, found.num_received) == (401, 0)


async def test_keys_and_salts_divide_the_cache(engine: Engine) -> None:
    app = drift_sdk.openai.app(engine, api_keys=["a", "b"], salts_keys=True)
    body = {"messages": [{"role": "user", "content": "x" * 100}]}

    async def cached(key: str, salt: str | None = None) -> int:
        headers = {"x-api-key": key}
        found = await call(app, CHAT, {**body, "cache_salt": salt}, headers=headers)
        return int(found.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached("a"), await cached("b"), await cached("a")] == [0, 0, 112]
    assert [await cached("a", "1"), await cached("b", "1"), await cached("b", "1")] == [0, 0, 112]
    assert await cached("a", "s" * 1024) == 0
    wrong = await call(app, CHAT, {**body, "cache_salt": ""}, headers={"x-api-key": "a"})
    assert wrong.error["param"] == "cache_salt"


async def test_cached_tokens_can_be_hidden(engine: Engine) -> None:
    app = drift_sdk.openai.app(engine, shows_cached_tokens=False)
    content = [{"role": "user", "content": "x" * 100}]
    for path, body in (
        (CHAT, {"messages": content}),
        ("/v1/responses", {"input": content}),
        ("/v1/messages", {"messages": content, "max_tokens": 5}),
    ):
        for _ in range(2):
            usage = (await call(app, path, body)).json["usage"]
        assert "112" not in str(usage) and "prompt_tokens_details" not in usage


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("engine", {"engine": {}}),
        ("engine", {"engine": "model"}),
        ("engine", {"engine": {"": scripted_engine()}}),
        ("engine", {"engine": {"a": "model"}}),
        ("api_keys", {"api_keys": "secret"}),
        ("api_keys", {"api_keys": [""]}),
        ("api_keys", {"api_keys": [" a"]}),
        ("api_keys", {"api_keys": ["é"]}),
        ("max_body_bytes", {"max_body_bytes": 0}),
    ],
)
def test_wrong_arguments_are_named(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        drift_sdk.openai.app(**{"engine": scripted_engine(), **arguments})
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


MALFORMED = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "cut": b'{"model"',
    "no text": b'{"input": "\xff"}',
    "surrogate": b'{"input": "\\ud800"}',
    "deep": b"[" * 100_000,
    "deep and closed": b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "large number": b'{"input": ' + b"9" * 10_000 + b"}",
    "no number": b'{"input": NaN}',
    "a million items": b'{"input": [' + b"0," * 2**20 + b"0]}",
    "a million lists": b'{"input": [' + b"[]," * 2**20 + b"[]]}",
    "long name": b'{"' + b"x" * 100_000 + b'": 1}',
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bodies_are_refused(engine: Engine, name: str) -> None:
    found = await call(drift_sdk.openai.app(engine), "/v1/responses", MALFORMED[name])
    assert (found.status, found.error["type"]) == (400, "invalid_request_error")
    assert len(found.body) < 1000


@every_endpoint
async def test_bodies_of_another_shape_are_refused(engine: Engine, path: str) -> None:
    app = drift_sdk.openai.app(engine)
    first = next(iter(ENDPOINTS[path]))
    for body in ([], {}, {first: 5}, {first: [None]}, {first: [{"role": 1}]}, {first: []}, {"x" * 10**5: 1}):
        found = await call(app, path, body)
        assert (found.status, found.error["type"]) == (400, "invalid_request_error"), body


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        (CHAT, "body", {"messages": MESSAGES * 60_000}),
        ("/v1/messages", "body", {"messages": MESSAGES * 60_000}),
        ("/v1/responses", "body", {"input": MESSAGES * 60_000}),
        ("/v1/completions", "prompt", {"prompt": ["a"] * 10_000}),
        ("/v1/completions", "prompt", {"prompt": [1] * 100_000}),
        (CHAT, "tools", {"tools": [{"type": "function", "function": {"name": "f"}}] * 129}),
    ],
)
async def test_what_is_too_much_for_the_engine_is_named(
    engine: Engine, path: str, param: str, fields: dict[str, Any]
) -> None:
    found = await call(drift_sdk.openai.app(engine), path, {**ENDPOINTS[path], **fields})
    assert found.status == 400
    assert found.error.get("param", param) == param
    assert engine.stats().num_submitted <= 1


async def test_deep_schemas_are_refused(engine: Engine) -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    function = {"name": "f", "parameters": schema}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}]}
    found = await call(drift_sdk.openai.app(engine), CHAT, body)
    assert (found.status, found.error["param"]) == (400, "tools")


@every_endpoint
async def test_large_bodies_are_not_read_to_their_end(engine: Engine, path: str) -> None:
    app = drift_sdk.openai.app(engine, max_body_bytes=100)
    announced = await call(app, path, endless(b"{"), headers={"content-length": "101"})
    assert (announced.status, announced.num_received) == (413, 0)
    parts = streamed([b"[" * 60] * 1000)
    found = await call(app, path, parts)
    assert (found.status, found.num_received) == (413, 2)
    assert found.headers["connection"] == "close"
    assert found.error["message"] == "the body is larger than 100 bytes"


@every_endpoint
async def test_bodies_that_do_not_end_are_given_up(
    engine: Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drift_sdk.openai.service.BODY_TIMEOUT_S", 0.02)
    with anyio.fail_after(WAIT_S):
        found = await call(drift_sdk.openai.app(engine), path, endless(b"{"))
    assert found.status == 408 and found.headers["connection"] == "close"


async def test_answers_may_take_longer_than_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drift_sdk.openai.service.BODY_TIMEOUT_S", 0.05)
    async with scripted_engine("la " * 30, step_s=0.002) as engine:
        found = await call(drift_sdk.openai.app(engine), CHAT, ENDPOINTS[CHAT])
    assert text_of(CHAT, found.json) == "la " * 30


def endless_engine() -> Engine:
    config = EngineConfig(max_model_len=16_384, kv_cache_tokens=65_536, max_num_seqs=4)
    return scripted_engine(lambda _, output, __: b"la "[len(output) % 3], config=config, step_s=0.001)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_cancels_its_request(path: str, is_streamed: bool) -> None:
    body = {**ENDPOINTS[path], "stream": is_streamed, "ignore_eos": True}
    body |= {"max_tokens": 10_000} if path != "/v1/responses" else {}
    async with endless_engine() as engine, anyio.create_task_group() as tasks:
        app = drift_sdk.openai.app(engine)

        async def leave(parts: AsyncIterator[bytes]) -> None:
            await call(app, path, parts, leave_after=2 if is_streamed else None)

        if is_streamed:
            tasks.start_soon(leave, streamed([as_json(body)]))
        else:
            tasks.start_soon(leave_while_running, app, path, body, engine)
        await until(lambda: engine.stats().num_cancelled == 1)
        await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)


def as_json(body: Any) -> bytes:
    return json.dumps(body).encode()


async def leave_while_running(app: Any, path: str, body: Any, engine: Engine) -> None:
    """A client that leaves when its request runs, before there is an answer."""
    is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": as_json(body), "more_body": False}

        await until(lambda: engine.stats().num_running == 1)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app(scope, receive, send)


SONG = "la " * 100_000
"""An answer that takes far longer than clients wait which leave."""


async def test_two_hundred_streams_of_which_half_leave() -> None:
    def reply(prompt: str) -> str:
        return SONG if "sing" in prompt else f"re: {prompt.strip()}"

    config = EngineConfig(max_model_len=2**19, kv_cache_tokens=2**25, max_num_seqs=64)
    found: dict[int, list[Any]] = {}
    async with scripted_engine(reply, config=config, step_s=0.001) as engine:
        app = drift_sdk.openai.app(engine)

        async def ask(number: int) -> None:
            content = "sing" if number % 2 else f"number {number}"
            body = {"messages": [{"role": "user", "content": content}], "stream": True}
            leave_after = 1 + number % 3 if number % 2 else None
            found[number] = (await call(app, CHAT, body, leave_after=leave_after)).events

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(ask, number)
        await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        assert engine.stats().num_cancelled == 100
    for number in range(0, 200, 2):
        *events, done = found[number]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert done == "[DONE]" and f"number {number}" in text


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_whose_engine_fails_ends_with_an_error(path: str) -> None:
    has_begun = threading.Event()

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        if output_ids:
            assert has_begun.wait(WAIT_S)
            raise MemoryError

        return 65

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            if message["type"] == "http.response.body":
                has_begun.set()
            await send(message)

        await app(scope, receive, noted)

    async with scripted_engine(next_token) as engine:
        app = drift_sdk.openai.app(engine)
        found = await call(noting, path, {**ENDPOINTS[path], "stream": True})
    last = found.events[-1]
    assert found.status == 200
    if path == "/v1/responses":
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    elif path == "/v1/messages":
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    else:
        assert last["error"]["type"] == "server_error"


@every_endpoint
async def test_closed_engines_and_full_queues_have_their_status(path: str) -> None:
    config = EngineConfig(max_model_len=64, kv_cache_tokens=4096, max_num_seqs=1, max_queued_requests=0)
    async with scripted_engine(lambda *_: 65, config=config, step_s=0.001) as engine:
        app = drift_sdk.openai.app(engine)
        await engine.pause()
        if path in STREAMS:
            running = engine.generate("x")
            full = await call(app, path, ENDPOINTS[path])
            assert (full.status, full.error["type"]) == (429, "rate_limit_error")
            running.cancel()
    closed = await call(app, path, ENDPOINTS[path])
    is_anthropic = path.startswith("/v1/messages")
    assert (closed.status, closed.error["type"]) == (
        503,
        "overloaded_error" if is_anthropic else "server_error",
    )


async def test_unexpected_errors_are_told_without_their_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(type(engine), "samples", fail)
    app = drift_sdk.openai.app(engine)

    async def logging(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(ValueError, match="a secret"):
            await app(scope, receive, send)

    found = await call(logging, CHAT, ENDPOINTS[CHAT])
    assert (found.status, found.error["type"]) == (500, "server_error")
    assert "secret" not in found.body.decode()
