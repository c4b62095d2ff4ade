"""Chat and completions under uvicorn, used through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import httpx
import openai
import pytest
import tokenizers
from loops import WAIT_S, until
from model_zoo import make_model
from openai.types.chat import ChatCompletionChunk, ChatCompletionTokenLogprob
from openai_server import MODEL, replying, serving
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import decoders, models

from drift_sdk import Engine, EngineConfig, Regex, SamplingParams
from drift_sdk.openai.application import name_of
from drift_sdk.openai.conversation import TokenLog
from drift_sdk.openai.server import LimitedHeads
from drift_sdk.testing import EOS_TOKEN_ID, scripted_engine
from drift_sdk.text.tokenizer import Tokenizer

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
    """A server whose model generates "la la la" without end, a letter every 2 ms."""
    config = EngineConfig(max_model_len=16_384, kv_cache_tokens=65_536, max_num_seqs=2, max_queued_requests=1)
    engine = scripted_engine(lambda _, output, __: b"la "[len(output) % 3], config=config, step_s=0.002)
    with serving(engine) as url:
        yield engine, url


@pytest.fixture
async def client(small: tuple[Engine, str]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(small[1]) as client:
        yield client


def client_of(url: str) -> openai.AsyncOpenAI:
    # Without loading certificates, which takes longer than a test.
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300, http_client=plain
    )


async def test_chat_equals_that_of_the_engine(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
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


async def test_streamed_chat_equals_that_of_the_engine(
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
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.token_ids)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content for piece in pieces) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [
        expected.finish_reason
    ]


async def test_equal_seeds_give_equal_samples(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    async def text(seed: int) -> str:
        found = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=1.0, top_p=0.9, seed=seed, max_tokens=24
        )
        return found.choices[0].message.content

    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=24)
    assert await text(5) == await text(5) == (await small[0].chat(QUESTION, params)).text
    assert await text(5) != await text(6)


async def test_text_ends_before_the_stop_string(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="abc", temperature=0, max_tokens=24)
    text = whole.choices[0].text
    stop = text[8:10]
    for form in (stop, [stop, "never to be seen"]):
        cut = await client.completions.create(
            model=MODEL, prompt="abc", temperature=0, max_tokens=24, stop=form
        )
        assert cut.choices[0].text == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"


async def test_completions_accept_token_ids_and_stream(
    small: tuple[Engine, str], client: openai.AsyncOpenAI
) -> None:
    expected = await small[0].generate([5, 6, 7], SamplingParams(max_tokens=16))
    stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], temperature=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


async def test_logprobs_equal_those_of_the_engine(
    small: tuple[Engine, str], client: openai.AsyncOpenAI
) -> None:
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
    # On the CPU, in float32 and without a batch, the numbers are equal.
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in expected.logprobs]
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)

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
async def test_response_follows_a_json_schema(client: openai.AsyncOpenAI, is_streamed: bool) -> None:
    """The weights are random, so the text is JSON only because of the grammar."""
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


async def test_response_format_json_object_gives_an_object(client: openai.AsyncOpenAI) -> None:
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
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("logit_bias", {"logit_bias": {"word": 1}}),
        ("logit_bias", {"logit_bias": {"5": 101}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
        ("functions", {"extra_body": {"functions": [{"name": "f"}]}}),
        ("modalities", {"modalities": ["text", "audio"]}),
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
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        ),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_wrong_parameter_is_named_in_the_error(
    client: openai.AsyncOpenAI, param: str, options: dict[str, object], is_streamed: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            **{"model": MODEL, "messages": QUESTION, "stream": is_streamed, **options}
        )
    assert re.split(r"[.\[]", caught.value.body["param"])[0] == param
    assert caught.value.body["type"] == "invalid_request_error"
    assert caught.value.body["message"]


async def test_too_long_prompt_has_its_error_code(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[5] * 600)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_model_can_be_looked_up(client: openai.AsyncOpenAI) -> None:
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("some/other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_models_health_and_metrics_are_served(
    small: tuple[Engine, str], client: openai.AsyncOpenAI
) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="other"):
        await client.chat.completions.create(model="other", messages=QUESTION)
    async with httpx.AsyncClient(base_url=small[1], verify=False) as plain:
        assert (await plain.get("/health")).json() == {"status": "ok", "num_running": 0, "num_waiting": 0}
        metrics = await plain.get("/metrics")
        names = {family.name for family in text_string_to_metric_families(metrics.text)}
        assert {"drift_generated_tokens", "drift_time_to_first_token_seconds"} <= names
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        body = (await plain.post("/v1/completions", content=b"{no json")).json()
        assert body["error"]["type"] == "invalid_request_error"


async def test_disconnecting_from_a_stream_frees_its_request(endless: tuple[Engine, str]) -> None:
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
async def test_disconnecting_from_an_unstreamed_request_frees_it(
    endless: tuple[Engine, str], path: str
) -> None:
    engine, url = endless
    body = {"messages": QUESTION} if path.startswith("chat") else {"prompt": "x", "max_tokens": 10_000}
    async with httpx.AsyncClient(base_url=url, verify=False) as plain:
        asking = asyncio.create_task(plain.post(f"/v1/{path}", json=body, timeout=300))
        await until(lambda: engine.stats().num_running == 1)
        await anyio.sleep(0.05)
        assert not asking.done()
        asking.cancel()
        await until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_cancelled == 1


async def test_disconnecting_before_the_first_token_frees_the_request(endless: tuple[Engine, str]) -> None:
    engine, url = endless
    await engine.pause()
    async with httpx.AsyncClient(base_url=url, verify=False) as plain:
        body = {"messages": QUESTION, "stream": True}
        asking = asyncio.create_task(plain.post("/v1/chat/completions", json=body, timeout=300))
        await until(lambda: engine.stats().num_waiting == 1)
        asking.cancel()
        await until(lambda: engine.stats().num_waiting == 0)
    await engine.resume()
    assert engine.stats().num_cancelled == 1


async def test_full_queue_and_closed_engine_have_their_status(endless: tuple[Engine, str]) -> None:
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
    async with httpx.AsyncClient(base_url=url, verify=False) as plain:
        assert (await plain.get("/health")).status_code == 503


TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]"
    "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/Place"}},
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["Rome", "Oslo"]}},
    },
}
TIME = {"name": "get_time"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """A server whose model repeats its prompt."""
    with serving(replying(lambda prompt: prompt, template=TOOLS_TEMPLATE)) as url:
        yield url


async def joined(stream: AsyncIterator[ChatCompletionChunk]) -> dict[int, Choice]:
    """The joined chunks of a stream, by choice."""
    found: dict[int, Choice] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            whole = found.setdefault(choice.index, Choice())
            whole.text += choice.delta.content or ""
            whole.pieces.append(choice.delta.content or "")
            for call in choice.delta.tool_calls or []:
                whole.calls.append((call.index, call.function.name, json.loads(call.function.arguments)))
                assert call.id and call.type == "function" and choice.finish_reason is None
            whole.logprobs += choice.logprobs.content if choice.logprobs is not None else []
            assert whole.finish_reason is None, "a chunk after the last one"
            whole.finish_reason = choice.finish_reason
    return found


class Choice:
    def __init__(self) -> None:
        self.text = ""
        self.pieces: list[str] = []
        self.calls: list[tuple[int, str, dict[str, object]]] = []
        self.logprobs: list[ChatCompletionTokenLogprob] = []
        self.finish_reason: str | None = None


@pytest.mark.parametrize(("stop", "text"), [(None, "é ✓ end"), ("✓", "é "), (" e", "é ✓")])
async def test_bytes_of_logprobs_equal_those_of_the_text(stop: str | None, text: str) -> None:
    """Each token is a byte here, so characters are split. End of sequence and stop string are not text."""
    with serving(replying(lambda _: "é ✓ end", template=TOOLS_TEMPLATE)) as url:
        async with client_of(url) as client:
            options = {"model": MODEL, "messages": QUESTION, "logprobs": True, "stop": stop}
            whole = await client.chat.completions.create(**options)
            choice = (await joined(await client.chat.completions.create(**options, stream=True)))[0]
            texts = await client.completions.create(
                model=MODEL, prompt="x", logprobs=0, stop=stop, max_tokens=50
            )
    entries = whole.choices[0].logprobs.content
    assert (whole.choices[0].message.content, choice.text) == (text, text)
    assert b"".join(bytes(entry.bytes) for entry in entries) == text.encode()
    assert choice.logprobs == entries
    logprobs = texts.choices[0].logprobs
    assert len(logprobs.tokens) == len(text.encode())
    offsets = [index for index, char in enumerate(text) for _ in char.encode()]
    assert logprobs.text_offset == offsets


async def test_logprobs_of_an_answer_that_ends_within_a_character() -> None:
    reply = [*b"a", "é".encode()[0], EOS_TOKEN_ID]
    config = EngineConfig(chat_template=TOOLS_TEMPLATE)
    with serving(scripted_engine(lambda prompt, output, seed: reply[len(output)], config=config)) as url:
        async with client_of(url) as client:
            options = {"model": MODEL, "messages": QUESTION, "logprobs": True}
            whole = (await client.chat.completions.create(**options)).choices[0]
            streamed = (await joined(await client.chat.completions.create(**options, stream=True)))[0]
            text = (await client.completions.create(model=MODEL, prompt="x", logprobs=0)).choices[0]
    assert [entry.bytes for entry in whole.logprobs.content] == [[reply[0]], [reply[1]]]
    assert streamed.logprobs == whole.logprobs.content
    assert (text.text, text.logprobs.text_offset) == ("a\ufffd", [0, 1])


async def test_nulls_stand_for_defaults(echo: str) -> None:
    names = (
        *("stream", "stream_options", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        *(
            "logit_bias",
            "stop",
            "seed",
            "user",
            "max_tokens",
            "max_completion_tokens",
            "logprobs",
            "functions",
        ),
        *("top_logprobs", "response_format", "tools", "tool_choice", "metadata", "what_is_this"),
    )
    async with httpx.AsyncClient(base_url=echo, verify=False) as plain:
        for path, prompt in (("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": "a"})):
            found = await plain.post(f"/v1/{path}", json={**prompt, **dict.fromkeys(names)})
            assert found.status_code == 200, found.text
            expected = await plain.post(f"/v1/{path}", json=prompt)
            message = found.json()["choices"][0]
            assert message.get("message") == expected.json()["choices"][0].get("message")
            assert message.get("text") == expected.json()["choices"][0].get("text")


async def test_answers_are_accepted_as_messages(echo: str) -> None:
    """Clients send back the messages of a server, with nulls and unknown fields."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        },
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny.", "tool_calls": None, "annotations": [], "x": 1},
        {"role": "user", "content": "Thanks"},
    ]
    async with client_of(echo) as client:
        found = await client.chat.completions.create(model=MODEL, messages=messages)
    assert found.choices[0].message.content == (
        "<system>be\nbrief<user>hi<assistant>[f Rome]<tool>sunnyc1<assistant>It is sunny.<user>Thanks"
    )


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["one", "two"], ["one", "two"]),
        ([[65, 66], [67]], ["AB", "C"]),
        ([65, 66], ["AB"]),
        (["one"], ["one"]),
    ],
)
async def test_prompt_may_be_one_or_a_list(echo: str, prompt: list[object], texts: list[str]) -> None:
    async with client_of(echo) as client:
        options = {"model": MODEL, "prompt": prompt, "n": 2, "seed": 1}
        found = await client.completions.create(**options)
        pieces = dict.fromkeys(range(2 * len(texts)), "")
        include = {"include_usage": True}
        stream = await client.completions.create(**options, stream=True, stream_options=include)
        chunks = [chunk async for chunk in stream]
    expected = [text for text in texts for _ in range(2)]
    assert [(choice.index, choice.text) for choice in found.choices] == list(enumerate(expected))
    assert found.usage.prompt_tokens == sum(map(len, texts))
    assert found.usage.completion_tokens == 2 * sum(len(text) + 1 for text in texts)
    for chunk in chunks[:-1]:
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert list(pieces.values()) == expected
    assert chunks[-1].usage == found.usage


async def test_empty_prompts_are_rejected(echo: str) -> None:
    async with client_of(echo) as client:
        for prompt in ([], "", [[]], [""], ["x"] * 129, [["a"]], {"a": 1}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model=MODEL, prompt=prompt)
            assert caught.value.param.partition("[")[0] == "prompt"


async def test_several_choices_have_different_seeds(
    small: tuple[Engine, str], client: openai.AsyncOpenAI
) -> None:
    expected = [
        (await small[0].chat(QUESTION, SamplingParams(temperature=1.0, seed=seed, max_tokens=12))).text
        for seed in (7, 8)
    ]
    options = {"model": MODEL, "messages": QUESTION, "n": 2, "seed": 7, "max_tokens": 12, "temperature": 1}
    found = await client.chat.completions.create(**options)
    assert [choice.message.content for choice in found.choices] == expected
    streamed = await joined(await client.chat.completions.create(**options, stream=True))
    assert [streamed[index].text for index in range(2)] == expected
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


async def test_logit_bias_is_honoured(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    expected = await small[0].generate("abc", SamplingParams(max_tokens=4, logit_bias={65: 100.0}))
    found = await client.completions.create(
        model=MODEL, prompt="abc", temperature=0, max_tokens=4, logit_bias={"65": 100}
    )
    assert expected.token_ids == (65,) * 4
    assert found.choices[0].text == expected.text


async def test_rejected_prompt_cancels_the_others() -> None:
    """The answers that are cancelled would take ten seconds."""
    limits = {"max_num_seqs": 1, "max_queued_requests": 1}
    engine = replying(lambda _: "long " * 500, template=TOOLS_TEMPLATE, step_s=0.005, **limits)
    with serving(engine) as url:
        async with client_of(url) as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model=MODEL, prompt=["x"] * 5, max_tokens=2000)
            await until(lambda: engine.stats().num_cancelled > 0)
            await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
            with pytest.raises(openai.BadRequestError, match="n=5: expected 1 to 2"):
                await client.chat.completions.create(model=MODEL, messages=QUESTION, n=5)
            assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_tokens_without_bytes_of_their_own_are_decoded_for_the_log() -> None:
    raw = tokenizers.Tokenizer(models.WordLevel({"a": 0, "##b": 1}, unk_token="a"))
    raw.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(raw, bos_token=None, eos_token=None, chat_template=None, adds_bos=False)
    log = TokenLog(cast(Engine, SimpleNamespace(tokenizer=tokenizer)))
    assert [log.text_of(token_id) for token_id in (0, 1)] == ["a", tokenizer.decode([1])]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_fields_of_vllm_have_their_effect(
    small: tuple[Engine, str], client: openai.AsyncOpenAI, is_streamed: bool
) -> None:
    async def text(**fields: object) -> str:
        options = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "extra_body": fields}
        if is_streamed:
            chunks = await client.chat.completions.create(**options, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        return (await client.chat.completions.create(**options)).choices[0].message.content

    async def expected(**changes: Any) -> str:
        return (await small[0].chat(QUESTION, max_tokens=12, **changes)).text

    greedy = await text()
    assert greedy == await expected() == await text(temperature=2, top_k=1)
    assert await text(repetition_penalty=0.01) == await expected(repetition_penalty=0.01) != greedy
    allowed = {"allowed_token_ids": [65, 66], "min_tokens": 12}
    assert await text(**allowed) == await expected(**allowed) != greedy
    for fields in ({"guided_choice": ["a.b", "c d\n"]}, {"structured_outputs": {"choice": ["a.b", "c d\n"]}}):
        assert await text(**fields) in ("a.b", "c d\n")
    assert await text(guided_regex="[0-9]{3}") == await expected(grammar=Regex("[0-9]{3}"))
    assert await text(structured_outputs={"json": {"const": 7}}) == "7"
    assert await text(guided_grammar='start: "x" "y"') == "xy"


UNFINISHED_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Ro'}}],
}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temprature", {"temprature": 0.5}),
        ("guided_regex", {"guided_regex": "("}),
        ("structured_outputs", {"structured_outputs": {"grammar": "start: ("}}),
        ("structured_outputs", {"structured_outputs": {"structural_tag": "{}"}}),
        ("include_stop_str_in_output", {"include_stop_str_in_output": [1]}),
        ("min_tokens", {"min_tokens": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("max_completion_tokens", {"max_completion_tokens": 2**40}),
        ("cache_salt", {"cache_salt": ""}),
        ("messages[1].tool_calls[0].function.arguments", {"messages": [*QUESTION, UNFINISHED_CALL]}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_field_that_cannot_be_honoured_is_named(
    client: openai.AsyncOpenAI, param: str, fields: dict[str, object], is_streamed: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=is_streamed, extra_body=fields
        )
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert caught.value.body["message"]


async def test_final_message_is_continued(small: tuple[Engine, str], client: openai.AsyncOpenAI) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    expected = await small[0].chat(messages, max_tokens=8, continue_final=True)
    found = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=8,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "request_id": "mine"},
    )
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.id == "chatcmpl-mine"


async def test_salts_divide_the_cache_and_cached_tokens_can_be_hidden() -> None:
    messages = [{"role": "user", "content": "x" * 100}]

    async def cached(client: openai.AsyncOpenAI, salt: str | None) -> int | None:
        found = await client.chat.completions.create(
            model=MODEL, messages=messages, extra_body={"cache_salt": salt}
        )
        details = found.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    for shows in (True, False):
        engine = replying(lambda _: "yes", template=TOOLS_TEMPLATE)
        with serving(engine, shows_cached_tokens=shows) as url:
            async with client_of(url) as client:
                found = [await cached(client, salt) for salt in (None, "a", "b", "b")]
        assert found == ([0, 0, 0, 96] if shows else [None] * 4)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        (CALL, None, 1),
        (f"Let me look.\n{CALL}\n{CALL}", "Let me look.", 2),
        ('{"name": "get_weather", "parameters": {"place": "Rome"}}', None, 1),
        ("a < b, <tool> and { } are text", "a < b, <tool> and { } are text", 0),
        ('{"answer": 5}', '{"answer": 5}', 0),
        ("<tool_call>{broken", "<tool_call>{broken", 0),
        (f"<think>{{hm}}</think>{CALL}", "<think>{hm}</think>", 1),
    ],
)
async def test_tool_calls_are_found_in_the_text(reply: str, content: str | None, calls: int) -> None:
    prompts: list[str] = []

    def noted(prompt: str) -> str:
        prompts.append(prompt)
        return reply

    with serving(replying(noted, template=TOOLS_TEMPLATE)) as url:
        async with client_of(url) as client:
            options = {"model": MODEL, "messages": QUESTION, "tools": TOOLS}
            whole = (await client.chat.completions.create(**options)).choices[0]
            streamed = (await joined(await client.chat.completions.create(**options, stream=True)))[0]
    expected = [("get_weather", {"place": "Rome"})] * calls
    found = [
        (call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls or []
    ]
    reason = "tool_calls" if calls else "stop"
    assert (whole.message.content, found, whole.finish_reason) == (content, expected, reason)
    assert [(name, arguments) for _, name, arguments in streamed.calls] == expected
    assert (streamed.text.rstrip(), streamed.finish_reason) == (content or "", reason)
    assert "The weather of a city." in prompts[0] and "get_time" in prompts[0]


async def test_text_is_streamed_when_tools_are_given() -> None:
    """The second half is generated only when a part of the first has arrived."""
    reply, has_arrived = b"word " * 30, threading.Event()

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        if len(output_ids) == len(reply) // 2:
            assert has_arrived.wait(300)
        return reply[len(output_ids)] if len(output_ids) < len(reply) else EOS_TOKEN_ID

    text = ""
    with serving(scripted_engine(next_token, config=EngineConfig(chat_template=TOOLS_TEMPLATE))) as url:
        async with client_of(url) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=QUESTION, tools=TOOLS, stream=True
            )
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                if text:
                    has_arrived.set()
    assert text == reply.decode()


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ("required", {"get_weather", "get_time"}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tool_call_can_be_forced(
    client: openai.AsyncOpenAI, choice: object, names: set[str], is_streamed: bool
) -> None:
    """The weights are random, so there is a call only because of the grammar."""
    options = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "seed": 3}
    if is_streamed:
        stream = await client.chat.completions.create(**options, stream=True)
        found = (await joined(stream))[0]
        calls, reason = [(name, arguments) for _, name, arguments in found.calls], found.finish_reason
        assert found.text == ""
        assert len(found.pieces) <= len(calls) + 2  # none of the tokens of a call: the role, and the end
    else:
        whole = (await client.chat.completions.create(**options)).choices[0]
        functions = [call.function for call in whole.message.tool_calls]
        calls = [(function.name, json.loads(function.arguments)) for function in functions]
        reason = whole.finish_reason
        assert whole.message.content is None
    assert calls
    if choice != "required":
        assert (len(calls), reason) == (1, "tool_calls")
    for name, arguments in calls:
        assert name in names
        assert set(arguments) == ({"place"} if name == "get_weather" else set())
        assert arguments.get("place", "Rome") in ("Rome", "Oslo")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_call_is_kept_without_parallel_tool_calls(is_streamed: bool) -> None:
    with serving(replying(lambda _: f"{CALL}\n{CALL}", template=TOOLS_TEMPLATE)) as url:
        async with client_of(url) as client:
            for is_parallel, num_calls in ((True, 2), (False, 1)):
                options = {"messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": is_parallel}
                found = await client.chat.completions.create(model=MODEL, **options, stream=is_streamed)
                if is_streamed:
                    choice = (await joined(found))[0]
                    calls = choice.calls
                else:
                    choice = found.choices[0]
                    calls = choice.message.tool_calls
                assert (len(calls), choice.finish_reason) == (num_calls, "tool_calls")


async def test_finish_reason_comes_after_the_last_call() -> None:
    """OpenAI's stream helper tells of a complete call only if a chunk without calls ends the choice."""
    with serving(replying(lambda _: CALL, template=TOOLS_TEMPLATE)) as url:
        async with client_of(url) as client:
            options = {"model": MODEL, "messages": QUESTION, "tools": TOOLS}
            async with client.chat.completions.stream(**options) as stream:
                events = [event async for event in stream]
    done = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
    assert list(map(json.loads, done)) == [{"place": "Rome"}]


async def test_response_format_does_not_apply_to_forced_calls(client: openai.AsyncOpenAI) -> None:
    found = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        response_format={"type": "json_object"},
        seed=3,
    )
    assert [call.function.name for call in found.choices[0].message.tool_calls] == ["get_weather"]


async def test_answer_with_a_response_format_and_tools_is_either() -> None:
    for reply, reason in ((CALL, "tool_calls"), ('{"a": 1}', "stop")):
        with serving(replying(lambda _, reply=reply: reply, template=TOOLS_TEMPLATE)) as url:
            async with client_of(url) as client:
                found = await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, tools=TOOLS, response_format={"type": "json_object"}
                )
        (choice,) = found.choices
        assert choice.finish_reason == reason
        assert (choice.message.content, bool(choice.message.tool_calls)) in (
            (None, True),
            ('{"a": 1}', False),
        )


async def test_tool_that_is_named_like_a_choice_cannot_be_forced(echo: str) -> None:
    function = {"type": "function", "function": {"name": "auto"}}
    async with client_of(echo) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=QUESTION, tools=[function], tool_choice=function
            )
    assert caught.value.param == "tool_choice"


async def test_reasoning_is_sent_apart_and_accepted_back() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{% endfor %}"
        "{{ reasoning_effort }}{{ style }}<think>"
    )
    prompts: list[str] = []

    def noted(prompt: str) -> str:
        prompts.append(prompt)
        return "hm, well</think>Paris"

    with serving(replying(noted, template=template)) as url:
        async with client_of(url) as client:
            options = {"model": MODEL, "messages": QUESTION}
            answer = await client.chat.completions.create(**options, n=2)
            message = answer.choices[0].message
            assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * len("hm, well")
            assert (message.reasoning_content, message.content) == ("hm, well", "Paris")
            chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm, well"
            assert "".join(delta.content or "" for delta in deltas) == "Paris"
            await client.chat.completions.create(
                model=MODEL,
                messages=[*QUESTION, message],
                reasoning_effort="low",
                extra_body={"chat_template_kwargs": {"style": "brief"}},
            )
    assert prompts[-1] == "<user><assistant>hm, welllowbrief<think>"


async def test_answer_names_its_request_and_its_stop_reason(client: openai.AsyncOpenAI) -> None:
    found = await client.completions.create(
        model=MODEL,
        prompt=[5] * 500,
        max_tokens=100,
        logit_bias={"1": -100},  # a sampled end of sequence would end it before
    )
    choice = found.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("length", "context")
    assert found._request_id == found.id
    assert found.id.startswith("cmpl-")


async def test_headers_of_a_stream_come_before_its_first_token(endless: tuple[Engine, str]) -> None:
    engine, url = endless
    await engine.pause()
    async with client_of(url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        assert engine.cancel(stream.response.headers["x-request-id"])
        await engine.resume()
        with pytest.raises(openai.APIError, match="cancelled"):
            assert not [chunk async for chunk in stream]


async def test_two_hundred_streams_at_once_get_their_own_answers() -> None:
    engine = replying(lambda prompt: f"re: {prompt}", template="{{ messages[0].content }}", max_num_seqs=64)
    with serving(engine) as url:
        async with client_of(url) as client:

            async def ask(number: int) -> str:
                messages = [{"role": "user", "content": f"number {number}"}]
                stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
                return "".join([chunk.choices[0].delta.content async for chunk in stream])

            found = await asyncio.gather(*map(ask, range(200)))
        assert found == [f"re: number {number}" for number in range(200)]
        assert engine.stats().num_running == engine.stats().num_waiting == 0


async def test_tools_are_hidden_with_tool_choice_none(echo: str) -> None:
    async with client_of(echo) as client:
        found = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="none"
        )
    assert "<tools>" not in found.choices[0].message.content


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": 5}',
        b'{"messages": [null]}',
    ],
)
async def test_malformed_body_is_rejected(echo: str, body: bytes) -> None:
    async with httpx.AsyncClient(base_url=echo, verify=False) as plain:
        for path in ("chat/completions", "completions"):
            headers = {"Content-Type": "application/json"}
            found = await plain.post(f"/v1/{path}", content=body, headers=headers)
            assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_body_that_is_not_json_is_named_as_such(echo: str) -> None:
    async with httpx.AsyncClient(base_url=echo, verify=False) as plain:
        headers = {"Content-Type": "application/json"}
        found = await plain.post("/v1/chat/completions", content=b'{"model"', headers=headers)
    assert found.json()["error"]["message"].startswith("body: JSON decode error")


@pytest.mark.parametrize(
    ("header", "body"),
    [("Content-Length: 999", b"a" * 201), ("Transfer-Encoding: chunked", b"c9\r\n" + b"a" * 201 + b"\r\n")],
)
async def test_body_that_is_too_large_is_not_read_to_its_end(header: str, body: bytes) -> None:
    with serving(scripted_engine(), max_body_bytes=200) as served:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{header}\r\n\r\n".encode()
        found = await answer_to(served, head + body)
    head, _, answer = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ") and b"connection: close" in head.lower()
    assert json.loads(answer)["error"]["message"] == "the body is larger than 200 bytes"


async def answer_to(url: str, *parts: bytes, before_last: Callable[[], None] = lambda: None) -> bytes:
    """Send bytes of requests over one connection, each part when there is an answer to the one before, and
    read until the server closes it."""
    address = httpx.URL(url)
    with anyio.fail_after(WAIT_S):
        async with await anyio.connect_tcp(address.host, address.port) as connection:
            found = b""
            for part in parts[:-1]:
                await connection.send(part)
                found += await connection.receive()
            before_last()
            await connection.send(parts[-1])
            with suppress(anyio.EndOfStream):
                while True:
                    found += await connection.receive()
    return found


async def test_slow_senders_are_disconnected(
    endless: tuple[Engine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that send nothing, a part of a head, first or later, or a part of a body."""

    def limit(name: str, seconds: float) -> None:
        monkeypatch.setattr(name, seconds)

    _, url = endless
    whole, part = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n"
    limit_heads = partial(limit, "drift_sdk.openai.server.HEAD_TIMEOUT_S")
    limit_heads(0.1)
    assert await answer_to(url, b"") == b""
    assert await answer_to(url, part) == b""
    limit_heads(WAIT_S)
    found = await answer_to(url, whole, part, before_last=partial(limit_heads, 0.1))
    assert found.startswith(b"HTTP/1.1 200") and found.count(b"HTTP/1.1") == 1
    limit_heads(WAIT_S)
    limit("drift_sdk.openai.service.BODY_TIMEOUT_S", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
    found = await answer_to(url, head + b"Content-Type: application/json\r\n\r\n{")
    assert found.startswith(b"HTTP/1.1 408") and b'"invalid_request_error"' in found


async def test_answers_may_take_longer_than_heads(
    endless: tuple[Engine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[LimitedHeads] = []
    begin = LimitedHeads.connection_made

    def noting(connection: LimitedHeads, transport: asyncio.Transport) -> None:
        connections.append(connection)
        begin(connection, transport)

    monkeypatch.setattr(LimitedHeads, "connection_made", noting)
    async with client_of(endless[1]) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        await anext(aiter(stream))
        (connection,) = connections
        assert connection._timeout is None
        await stream.close()


async def test_body_of_the_largest_size_is_served() -> None:
    content = b'{"prompt": "a", "max_tokens": 1}'
    headers = {"Content-Type": "application/json"}
    with serving(scripted_engine(), max_body_bytes=len(content)) as url:
        async with httpx.AsyncClient(base_url=url, verify=False, headers=headers) as plain:
            found = [await plain.post("/v1/completions", content=content + rest) for rest in (b"", b" ")]
    assert [each.status_code for each in found] == [200, 413]


async def test_method_that_is_not_allowed_is_answered_with_those_that_are(echo: str) -> None:
    async with httpx.AsyncClient(base_url=echo, verify=False) as plain:
        found = await plain.get("/v1/completions")
    assert (found.status_code, found.headers["allow"]) == (405, "POST")


def test_name_of_a_model_is_its_file_name_or_hub_id(tmp_path: Path) -> None:
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "small.Q4_1.gguf").touch()
    assert name_of(str(tmp_path / "Llama-3.1-8B")) == "Llama-3.1-8B"
    assert name_of(str(tmp_path / "small.Q4_1.gguf")) == "small.Q4_1"
    assert name_of("owner/Model-1.5") == "owner/Model-1.5"
