"""Embeddings under uvicorn, through OpenAI's own client and without it."""

from __future__ import annotations

import asyncio
import base64
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from asgi_calls import call
from model_zoo import make_model
from openai.types import embedding_create_params
from openai_server import MODEL, serving
from placement import engine_config

import drift_sdk.openai
from drift_sdk import Embedding, Engine, SyncEngine
from drift_sdk.openai.scoring import EmbeddingBody
from drift_sdk.results import PromptStates
from drift_sdk.testing import scripted_engine

PATH = "/v1/embeddings"
INPUTS = ["a b", "c d e f", "a b"]
LONG = "a cat and a dog, " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(MODEL)
    make_model(18, folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(Engine(folder, engine_config(max_model_len=64))) as url:
        yield url


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[np.ndarray]:
    with SyncEngine(folder, engine_config(max_model_len=64)) as engine:
        return [each.vector for each in engine.embed(INPUTS)]


def ask(url: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}{PATH}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_the_client_gets_what_the_engine_computes(url: str, expected: list[np.ndarray]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k")
    found = client.embeddings.create(model=MODEL, input=INPUTS)
    assert [each.index for each in found.data] == [0, 1, 2]
    for each, vector in zip(found.data, expected, strict=True):
        assert np.allclose(each.embedding, vector, atol=1e-6)
    assert found.model == MODEL and found.usage.prompt_tokens == found.usage.total_tokens > 0
    shorter = client.embeddings.create(model=MODEL, input=INPUTS[0], dimensions=8)
    first = expected[0][:8] / np.linalg.norm(expected[0][:8])
    assert np.allclose(shorter.data[0].embedding, first, atol=1e-6)


def test_numbers_and_base64_are_the_same(url: str) -> None:
    as_floats = ask(url, input="a b", encoding_format="float")["data"][0]
    as_text = ask(url, input="a b", encoding_format="base64")["data"][0]
    decoded = np.frombuffer(base64.b64decode(as_text["embedding"]), dtype="<f4")
    assert decoded.tolist() == as_floats["embedding"] and len(decoded) == 64


def test_inputs_may_be_token_ids(url: str, folder: Path) -> None:
    with SyncEngine(folder, engine_config(max_model_len=64)) as engine:
        ids = [engine.tokenizer.encode(text) for text in INPUTS[:2]]
    texts, arrays = ask(url, input=INPUTS[:2]), ask(url, input=ids)
    single = ask(url, input=ids[0])
    for one, other in zip(texts["data"], arrays["data"], strict=True):
        assert np.allclose(one["embedding"], other["embedding"], atol=1e-6)
    assert len(single["data"]) == 1
    assert arrays["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert arrays["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input", {"input": []}),
        ("input[1]", {"input": ["a", ""]}),
        ("input[1]", {"input": ["a", 5]}),
        ("input", {"input": [["a"]]}),
        ("input", {"input": ["a"] * 2049}),
        ("input", {"input": "x" * 4000}),
        ("input", {"input": [5, 10**6]}),
        ("dimensions", {"input": "a", "dimensions": 65}),
        ("dimensions", {"input": "a", "dimensions": 0}),
        ("encoding_format", {"input": "a", "encoding_format": "int8"}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": -2}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": "5"}),
        ("truncation_side", {"input": "a", "truncate_prompt_tokens": 5, "truncation_side": "left"}),
        ("what", {"input": "a", "what": 5}),
    ],
)
def test_wrong_requests_name_the_field(url: str, field: str, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{url}{PATH}", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(field), reply.text


def test_every_field_of_the_client_is_known() -> None:
    for name in typing.get_type_hints(embedding_create_params.EmbeddingCreateParams):
        assert name in (*EmbeddingBody.__struct_fields__, *EmbeddingBody.ignored, *EmbeddingBody.refused), (
            name
        )


def test_a_client_that_leaves_cancels_its_inputs() -> None:
    engine = scripted_engine("Paris.", step_s=0.05)
    with serving(engine) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}{PATH}", json={"input": ["a" * 3000] * 200}, timeout=0.5)
        deadline = time.monotonic() + 10
        while engine.stats().num_running or engine.stats().num_waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert engine.stats().num_cancelled > 0


async def test_keys_share_no_prefixes(folder: Path) -> None:
    async with Engine(folder, engine_config(max_model_len=64)) as engine:
        app = drift_sdk.openai.app(engine, api_keys=["a", "b"], salts_keys=True)
        cached = []
        for key in ("a", "b", "a"):
            reply = await call(app, PATH, {"input": [[5] * 40]}, headers={"authorization": f"Bearer {key}"})
            cached.append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 32]


def test_longer_inputs_are_cut(url: str, folder: Path) -> None:
    with SyncEngine(folder, engine_config(max_model_len=64)) as engine:
        ids = engine.tokenizer.encode(LONG)
        assert len(ids) > 64
        for most, kept in ((5, 5), (63, 63), (64, 63), (10**9, 63), (-1, 63)):
            [expected] = engine.embed([ids[:kept]])
            for given in (LONG, ids):
                found = ask(url, input=given, truncate_prompt_tokens=most)
                assert found["usage"]["prompt_tokens"] == kept
                assert np.allclose(found["data"][0]["embedding"], expected.vector, atol=1e-6)
        short = ask(url, input="a b", truncate_prompt_tokens=60, truncation_side="right")
        assert short["data"] == ask(url, input="a b")["data"]


def test_the_input_that_is_too_long_is_named(url: str) -> None:
    for given, param in ((LONG, "input"), (["a", LONG], "input[1]"), ([[5], [5] * 64], "input[1]")):
        reply = httpx.post(f"{url}{PATH}", json={"input": given}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_a_full_queue_rejects_new_requests_and_not_further_inputs(folder: Path) -> None:
    config = engine_config(max_model_len=64, max_num_seqs=1, max_queued_requests=1)
    async with Engine(folder, config) as engine:
        app, body = drift_sdk.openai.app(engine), {"input": [f"a {index}" for index in range(20)]}
        rerank = {"query": "a", "documents": body["input"]}
        async with engine.generate("a", max_tokens=60), engine.generate("a", max_tokens=60):
            for path, given in ((PATH, body), ("/v1/rerank", rerank)):
                found = await call(app, path, given)
                assert (found.status, found.error["code"]) == (429, "rate_limit_exceeded")
        assert len((await call(app, PATH, body)).json["data"]) == 20
        assert engine.stats().num_rejected == 0


async def test_long_answers_leave_the_event_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may have as many numbers as take seconds to write."""
    states = PromptStates(num_rows=1, size=2, data=np.float32([0.5, -1.5]).tobytes())
    embedding = Embedding(states=states, num_tokens=1)

    async def embed(prompts: list[str], **options: Any) -> list[Embedding]:
        return [embedding] * len(prompts)

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with scripted_engine("a") as engine:
        monkeypatch.setattr(engine, "embed", embed)
        num_turns = 0
        counting = asyncio.create_task(count())
        found = await call(drift_sdk.openai.app(engine), PATH, {"input": ["a"] * 500})
        counting.cancel()
    assert [each["embedding"] for each in found.json["data"]] == [[0.5, -1.5]] * 500
    assert num_turns > 500
