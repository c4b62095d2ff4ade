"""The FastAPI example under uvicorn, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio
import httpx
import openai
import pytest
import uvicorn
from embed_fastapi import make_app
from loops import until
from model_zoo import make_model
from prometheus_client.parser import text_string_to_metric_families

from drift_sdk import Engine, EngineConfig, SamplingParams
from drift_sdk.testing import scripted_engine

MODEL = "small"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = [{"role": "user", "content": "what is the capital of france"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The example's app on a thread with a loop of its own; its base URL."""
    config = uvicorn.Config(
        make_app(engine, MODEL), log_level="error", ws="none", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        httpx.get(f"{url}/health", timeout=30).raise_for_status()
        yield url
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, str]]:
    folder = tmp_path_factory.mktemp(MODEL)
    make_model(3, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    engine = Engine(folder)
    with serving(engine) as url:
        yield engine, url


@pytest.fixture
def endless() -> Iterator[tuple[Engine, str]]:
    """Says "la la la" without end, a letter each 2 ms."""
    config = EngineConfig(max_model_len=16_384, kv_cache_tokens=65_536, max_num_seqs=2, max_queued_requests=1)
    engine = scripted_engine(lambda _, output, __: b"la "[len(output) % 3], config=config, step_s=0.002)
    with serving(engine) as url:
        yield engine, url


@pytest.fixture
async def client(small: tuple[Engine, str]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(small[1]) as client:
        yield client


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


async def test_a_chat_is_the_engines_own(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    expected = await small[0].chat(QUESTION, SamplingParams(max_tokens=24))
    found = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    assert found.choices[0].message.content == expected.text != ""
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.choices[0].logprobs is None
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert (found.object, found.model) == ("chat.completion", MODEL)


async def test_a_streamed_chat_joins_to_the_same(
    small: tuple[Engine, str], client: openai.AsyncOpenAI
) -> None:
    expected = await small[0].chat(QUESTION, SamplingParams(max_tokens=40))
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, last = chunks
    assert len(pieces) > 1
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.token_ids)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content for piece in pieces) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [
        expected.finish_reason
    ]


async def test_sampling_follows_its_seed(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    async def text(seed: int) -> str:
        found = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=1.0, top_p=0.9, seed=seed, max_tokens=24
        )
        return found.choices[0].message.content

    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=24)
    assert await text(5) == await text(5) == (await small[0].chat(QUESTION, params)).text
    assert await text(5) != await text(6)


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="abc", temperature=0, max_tokens=24)
    text = whole.choices[0].text
    stop = text[8:10]
    for form in (stop, [stop, "never to be seen"]):
        cut = await client.completions.create(
            model=MODEL, prompt="abc", temperature=0, max_tokens=24, stop=form
        )
        assert cut.choices[0].text == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"


async def test_completions_take_ids_and_stream(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    expected = await small[0].generate([5, 6, 7], SamplingParams(max_tokens=16))
    stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], temperature=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


async def test_logprobs(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    expected = await small[0].chat(QUESTION, SamplingParams(max_tokens=6, logprobs=3))
    options = {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = await client.chat.completions.create(**options)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 6
    # Batched with nothing, on the CPU, in float32: the same numbers.
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in expected.logprobs]
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
        assert entry.bytes == list(entry.token.encode())

    chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert streamed == entries

    texts = await client.completions.create(
        model=MODEL, prompt="abc", temperature=0, max_tokens=4, logprobs=2
    )
    logprobs = texts.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4
    assert all(
        math.isclose(max(top.values()), value)
        for top, value in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    assert logprobs.text_offset[0] == 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_json_of_a_schema(client: openai.AsyncOpenAI, is_streamed: bool) -> None:
    """Weights are random: that the text is JSON at all is the grammar's doing."""
    options = {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 1.0,
        "seed": 1,
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    }
    if is_streamed:
        stream = await client.chat.completions.create(**options, stream=True)
        text = "".join([chunk.choices[0].delta.content async for chunk in stream])
    else:
        text = (await client.chat.completions.create(**options)).choices[0].message.content
    found = json.loads(text)
    assert found["colour"] in ("red", "green")
    assert found["count"] in range(10)
    assert set(found) == {"colour", "count"}


async def test_json_objects(client: openai.AsyncOpenAI) -> None:
    found = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, seed=2, max_tokens=20, response_format={"type": "json_object"}
    )
    assert found.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": "warm"}),
        ("top_p", {"top_p": 0.0}),
        ("max_tokens", {"max_tokens": 0}),
        ("n", {"n": 2}),
        ("seed", {"seed": -1}),
        ("stop", {"stop": ""}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 2000}]}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
        ),
        ("what_is_this", {"extra_body": {"what_is_this": 1}}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_wrong_parameters_are_named(
    client: openai.AsyncOpenAI, param: str, options: dict[str, object], is_streamed: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            **{"model": MODEL, "messages": QUESTION, "stream": is_streamed, **options}
        )
    assert caught.value.body["param"] == param
    assert caught.value.body["type"] == "invalid_request_error"
    assert caught.value.body["message"]


async def test_a_prompt_that_is_too_long_has_its_code(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[5] * 600)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_models_health_and_metrics(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="other"):
        await client.chat.completions.create(model="other", messages=QUESTION)
    async with httpx.AsyncClient(base_url=small[1]) as plain:
        assert (await plain.get("/health")).json() == {"status": "ok", "num_running": 0, "num_waiting": 0}
        metrics = await plain.get("/metrics")
        names = {family.name for family in text_string_to_metric_families(metrics.text)}
        assert {"drift_generated_tokens", "drift_time_to_first_token_seconds"} <= names
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        body = (await plain.post("/v1/completions", content=b"{no json")).json()
        assert body["error"]["type"] == "invalid_request_error"


async def test_leaving_a_stream_frees_its_request(endless: tuple[Engine, str]) -> None:
    engine, url = endless
    async with client_of(url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content
            if len(text) > 20:
                break
        assert text.startswith("la la la")
        assert engine.stats().num_running == 1
        await stream.close()
        await until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_cancelled == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_leaving_an_unstreamed_request_frees_it(endless: tuple[Engine, str], path: str) -> None:
    engine, url = endless
    body = {"messages": QUESTION} if path.startswith("chat") else {"prompt": "x", "max_tokens": 10_000}
    async with httpx.AsyncClient(base_url=url) as plain:
        asking = asyncio.create_task(plain.post(f"/v1/{path}", json=body, timeout=30))
        await until(lambda: engine.stats().num_running == 1)
        await anyio.sleep(0.05)
        assert not asking.done()
        asking.cancel()
        await until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_cancelled == 1


async def test_leaving_before_the_first_token_frees_the_request(endless: tuple[Engine, str]) -> None:
    engine, url = endless
    await engine.pause()
    async with httpx.AsyncClient(base_url=url) as plain:
        body = {"messages": QUESTION, "stream": True}
        asking = asyncio.create_task(plain.post("/v1/chat/completions", json=body, timeout=30))
        await until(lambda: engine.stats().num_waiting == 1)
        asking.cancel()
        await until(lambda: engine.stats().num_waiting == 0)
    await engine.resume()
    assert engine.stats().num_cancelled == 1


async def test_too_many_requests_and_a_closed_engine(endless: tuple[Engine, str]) -> None:
    engine, url = endless
    async with client_of(url) as client:
        streams = [
            await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
            for _ in range(2)
        ]
        third = asyncio.create_task(client.completions.create(model=MODEL, prompt="x"))
        await until(lambda: engine.stats().num_queued == 1)
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        assert full.value.code == "rate_limit_exceeded"

        await engine.aclose()
        with pytest.raises(openai.APIError, match="closed"):
            async for _ in streams[0]:
                pass
        for refused in (third, client.completions.create(model=MODEL, prompt="x")):
            with pytest.raises(openai.InternalServerError) as closed:
                await refused
            assert closed.value.status_code == 503
        await streams[1].close()
    async with httpx.AsyncClient(base_url=url) as plain:
        assert (await plain.get("/health")).status_code == 503
