"""Relevance of documents under uvicorn: by embeddings, and by the answers of a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from asgi_calls import call
from loops import WAIT_S
from model_zoo import make_model
from openai_server import MODEL, serving
from placement import engine_config

import drift_sdk.openai
from drift_sdk import ConfigError, Engine, SyncEngine
from drift_sdk.openai import RERANKERS, Reranker
from drift_sdk.testing import scripted_engine
from drift_sdk.text.tokenizer import Tokenizer

QUERY = "a b"
ROUNDING = 1e-5
DOCUMENTS = ["c d e f", "a b", "x y z", "a b c", "a b"]
LONG = "a cat and a dog, " * 20
MAX_LEN = 96
RERANKER = Reranker(
    template="{instruction}: {query}? {document}. So {query}:", instruction="Judge", choices=("a", "e")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(MODEL)
    make_model(18, folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(Engine(folder, engine_config(max_model_len=MAX_LEN))) as url:
        yield url


@pytest.fixture(scope="module")
def judging_url(folder: Path) -> Iterator[str]:
    with serving(Engine(folder, engine_config(max_model_len=MAX_LEN)), reranker=RERANKER) as url:
        yield url


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SyncEngine]:
    with SyncEngine(folder, engine_config(max_model_len=MAX_LEN)) as engine:
        yield engine


def ask(url: str, path: str = "/v1/rerank", **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def cosines(engine: SyncEngine, documents: list[str]) -> list[float]:
    query, *others = engine.embed([QUERY, *documents])
    return [float(query.vector @ other.vector) for other in others]


def probability(engine: SyncEngine, query: str, document: str, instruction: str = "Judge") -> float:
    text = f"{instruction}: {query}? {document}. So {query}:"
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    return engine.decide(ids, ["a", "e"]).probabilities[0]


def test_documents_come_in_the_order_of_their_cosines(url: str, engine: SyncEngine) -> None:
    expected = cosines(engine, DOCUMENTS)
    found = ask(url, query=QUERY, documents=DOCUMENTS, model=MODEL)
    assert found["id"].startswith("rerank-") and found["model"] == MODEL
    order = [each["index"] for each in found["results"]]
    assert order[:2] == [1, 4] and order == sorted(range(5), key=lambda index: -round(expected[index], 5))
    for each in found["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5)
    assert len({round(score, 4) for score in expected}) == 4
    num_tokens = sum(len(engine.tokenizer.encode(text)) for text in {QUERY, *DOCUMENTS})
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == num_tokens
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/rerank", {"top_n": 2}),  # cohere.ClientV2
        ("/v2/rerank", {"top_n": 2, "max_tokens_per_doc": None}),  # langchain-cohere
        ("/v1/rerank", {"top_n": 2, "return_documents": True}),  # cohere.Client, litellm for Jina
        ("/rerank", {"top_n": 2, "return_documents": True}),  # litellm for vLLM
        ("/v1/rerank", {"top_n": 2, "return_documents": False, "user": "me"}),
        ("/v1/rerank", {"top_n": 2, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1], "id": 5}]}),
    ],
)
def test_requests_in_the_forms_of_clients(url: str, path: str, body: dict[str, Any]) -> None:
    given = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS[:2]} | body
    results = ask(url, path, **given)["results"]
    assert [each["index"] for each in results] == [1, 0]
    assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    shown = [each.get("document") for each in results]
    wants_documents = body.get("return_documents", True)
    assert shown == ([{"text": DOCUMENTS[1]}, {"text": DOCUMENTS[0]}] if wants_documents else [None, None])


def test_the_best_ones_alone(url: str) -> None:
    everything = ask(url, query=QUERY, documents=DOCUMENTS)["results"]
    for number in (0, 1, 3, 5, 9):
        found = ask(url, query=QUERY, documents=DOCUMENTS, top_n=number)["results"]
        assert [each["index"] for each in found] == [each["index"] for each in everything[: number or None]]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("query", {"documents": ["a"]}),
        ("query", {"query": "", "documents": ["a"]}),
        ("query", {"query": ["a"], "documents": ["a"]}),
        ("query", {"query": LONG, "documents": ["a"]}),
        ("documents", {"query": "a"}),
        ("documents", {"query": "a", "documents": []}),
        ("documents[1]", {"query": "a", "documents": ["a", ""]}),
        ("documents", {"query": "a", "documents": ["a"] * 2049}),
        ("documents[1]", {"query": "a", "documents": ["a", {"title": "b"}]}),
        ("documents[2]", {"query": "a", "documents": ["a", "b", LONG]}),
        ("top_n", {"query": "a", "documents": ["a"], "top_n": -1}),
        ("truncate_prompt_tokens", {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 0}),
        ("truncation_side", {"query": "a", "documents": ["a"], "truncation_side": "left"}),
        ("rank_fields", {"query": "a", "documents": ["a"], "rank_fields": ["title"]}),
        ("max_tokens_per_doc", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 9}),
        ("instruction", {"query": "a", "documents": ["a"], "instruction": "Judge"}),
        ("what", {"query": "a", "documents": ["a"], "what": 5}),
    ],
)
def test_wrong_requests_name_the_field(url: str, param: str, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{url}/v1/rerank", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param), reply.text
    assert "prompts[" not in reply.text


def test_longer_documents_are_cut(url: str, engine: SyncEngine) -> None:
    ids = engine.tokenizer.encode(LONG)
    query, cut = engine.embed([QUERY, ids[:7]])
    found = ask(url, query=QUERY, documents=[LONG], truncate_prompt_tokens=7)
    score = found["results"][0]["relevance_score"]
    assert score == pytest.approx(float(query.vector @ cut.vector), abs=1e-5)
    assert ask(url, query=QUERY, documents=[LONG], truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] > 95


def test_scores_are_cosines_of_embeddings(url: str, engine: SyncEngine) -> None:
    def scores(**texts: Any) -> list[float]:
        data = ask(url, "/v1/score", **texts)["data"]
        assert [each["index"] for each in data] == list(range(len(data)))
        return [each["score"] for each in data]

    [cosine] = cosines(engine, DOCUMENTS[:1])
    assert abs(cosine) < 0.99
    texts = [QUERY, DOCUMENTS[0], QUERY]
    assert scores(text_1=QUERY, text_2=texts) == pytest.approx([1.0, cosine, 1.0], abs=1e-5)
    assert scores(text_1=texts[:2], text_2=texts[1::-1]) == pytest.approx([cosine, cosine], abs=1e-5)
    [cut] = engine.embed([engine.tokenizer.encode(LONG)[:9]])
    [query] = engine.embed([QUERY])
    found = scores(text_1=QUERY, text_2=LONG, truncate_prompt_tokens=9)
    assert found == pytest.approx([float(query.vector @ cut.vector)], abs=1e-5)
    for body, param, words in (
        ({"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "text_2 has 1: expected 2 texts"),
        ({"text_1": [], "text_2": "a"}, "text_1", "expected 1 to"),
        ({"text_1": "a", "text_2": ["a", ""]}, "text_2[1]", "that is not empty"),
        ({"text_1": "", "text_2": ["a"]}, "text_1", "that is not empty"),
        ({"text_1": ["x" * 4000, "a"], "text_2": ["a", "b"]}, "text_1[0]", "tokens"),
        ({"text_1": "a", "text_2": ["b", "x" * 4000]}, "text_2[1]", "tokens"),
    ):
        reply = httpx.post(f"{url}/v1/score", json=body, timeout=60)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param and words in error["message"]


async def test_both_sides_of_a_score_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And equal texts once."""
    async with scripted_engine("Paris.") as engine:
        asked: list[list[str]] = []
        embed = engine.embed

        async def noted(prompts: list[str], **options: Any) -> Any:
            asked.append(prompts)
            return await embed(prompts, **options)

        monkeypatch.setattr(engine, "embed", noted)
        body = {"text_1": ["a", "b"], "text_2": ["c", "a"]}
        found = await call(drift_sdk.openai.app(engine), "/v1/score", body)
        assert found.status == 200 and asked == [["a", "c", "b"]]


def test_a_model_judges_documents(judging_url: str, engine: SyncEngine) -> None:
    expected = [probability(engine, QUERY, document) for document in DOCUMENTS]
    found = ask(judging_url, query=QUERY, documents=DOCUMENTS, top_n=4)
    results = found["results"]
    # Equal documents have equal scores but for rounding, which batches and cached beginnings change.
    assert len({round(score, 4) for score in expected}) == 4
    scores = [each["relevance_score"] for each in results]
    assert scores == pytest.approx(sorted(expected, reverse=True)[:4], abs=ROUNDING)
    assert scores == pytest.approx([expected[each["index"]] for each in results], abs=ROUNDING)
    assert len({each["index"] for each in results}) == 4
    assert found["usage"]["prompt_tokens"] > sum(map(len, DOCUMENTS))
    data = ask(judging_url, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [each["score"] for each in data] == pytest.approx(expected, abs=ROUNDING)
    [other] = ask(judging_url, query=QUERY, documents=["c d"], instruction="Guess")["results"]
    assert other["relevance_score"] == pytest.approx(probability(engine, QUERY, "c d", "Guess"), abs=ROUNDING)
    assert other["relevance_score"] != pytest.approx(probability(engine, QUERY, "c d"), abs=ROUNDING)


def test_places_in_documents_are_text(judging_url: str, engine: SyncEngine) -> None:
    [found] = ask(judging_url, query="{document}", documents=["{query} {instruction}"])["results"]
    expected = probability(engine, "{document}", "{query} {instruction}")
    assert found["relevance_score"] == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize(("most", "kept"), [(40, 40), (94, 94), (-1, 94), (10**6, 94)])
def test_a_judged_document_is_cut_and_not_what_is_around_it(
    most: int, kept: int, judging_url: str, engine: SyncEngine
) -> None:
    """An answer has one token, and one more is thrown away."""
    first = engine.tokenizer.encode(f"Judge: {QUERY}? {LONG}", add_special_tokens=False)
    last = engine.tokenizer.encode(f". So {QUERY}:", add_special_tokens=False)
    ids = [*first[: kept - len(last)], *last]
    assert len(ids) == kept < len(first)
    found = ask(judging_url, query=QUERY, documents=[LONG], truncate_prompt_tokens=most)
    expected = engine.decide(ids, list(RERANKER.choices)).probabilities[0]
    assert found["results"][0]["relevance_score"] == pytest.approx(expected, abs=ROUNDING)
    assert found["usage"]["prompt_tokens"] == kept


def test_wrong_documents_of_a_judge_are_named(judging_url: str) -> None:
    for body, param in (
        ({"documents": ["a", LONG]}, "documents[1]"),
        ({"documents": ["a", LONG], "truncate_prompt_tokens": 12}, "truncate_prompt_tokens"),
        ({"documents": ["a"], "query": LONG}, "documents[0]"),
        ({"documents": ["a"], "query": LONG, "truncate_prompt_tokens": -1}, "documents[0]"),
    ):
        reply = httpx.post(f"{judging_url}/v1/rerank", json={"query": QUERY} | body, timeout=60)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_a_document_that_leaves_no_room_for_an_answer_is_named(folder: Path) -> None:
    reranker = Reranker(template="{query} {document}", instruction="", choices=("a b c d", "e f g h"))
    async with Engine(folder, engine_config(max_model_len=MAX_LEN)) as engine:
        num_free = MAX_LEN - 1 - await engine.count_tokens(QUERY + " ")
        ids = engine.tokenizer.encode(LONG, add_special_tokens=False)[: num_free - 1]
        body = {"query": QUERY, "documents": ["a", engine.tokenizer.decode(ids)]}
        found = await call(drift_sdk.openai.app(engine, reranker=reranker), "/v1/rerank", body)
        error = found.json["error"]
        assert (found.status, error["param"]) == (400, "documents[1]") and "and answer of" in error["message"]


def test_the_prompt_of_qwen3_rerankers() -> None:
    """As in the description of the published models."""
    reranker = RERANKERS["qwen3"]
    assert reranker.choices == ("yes", "no")
    assert "".join(reranker.prompt("What?", "This.", None)) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: What?\n<Document>: This.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("template", ["{document}", "{query}", "{query} {document} {document}"])
def test_templates_without_their_places_are_refused(template: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Reranker(template=template, instruction="")
    assert caught.value.field == "template"


@pytest.mark.parametrize(
    "wrong",
    [
        {"template": 5},
        {"instruction": None},
        {"choices": ("a", "b", "c")},
        {"choices": ("a", "a")},
        {"choices": ("a", "")},
        {"choices": "ab"},
        {"choices": None},
        {"choices": ("a", "\ud800")},
        {"template": "{query} {document} \ud800"},
        {"choice": ("a", "b")},
        {"choices": ((5,), (6,))},
    ],
)
def test_values_of_another_form_are_refused(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"template": "{query} {document}", "instruction": "", "choices": ["a", "b"]}
    assert Reranker(**given).choices == ("a", "b")
    with pytest.raises(ConfigError) as caught:
        Reranker(**given | wrong)
    assert [caught.value.field] == list(wrong)


async def test_rerankers_are_those_of_their_engines(folder: Path) -> None:
    config = engine_config(max_model_len=MAX_LEN)
    async with Engine(folder, config) as one, Engine(folder, config) as other:
        engines = {"one": one, "other": other}
        app = drift_sdk.openai.app(engines, reranker={"other": RERANKER})
        found = [
            (await call(app, "/v1/rerank", {"model": name, "query": QUERY, "documents": [QUERY]})).json
            for name in engines
        ]
        scores = [each["results"][0]["relevance_score"] for each in found]
        assert scores[0] == pytest.approx(1.0, abs=1e-5) and scores[1] < 0.99
        for wrong in ({"another": RERANKER}, {"one": "qwen3"}, {}, "qwen3"):
            with pytest.raises(ConfigError) as caught:
                drift_sdk.openai.app(engines, reranker=wrong)  # type: ignore[arg-type]
            assert caught.value.field == "reranker"


@pytest.mark.parametrize("reranker", [None, RERANKER])
async def test_a_client_that_leaves_cancels_its_documents(folder: Path, reranker: Reranker | None) -> None:
    engine = Engine(folder, engine_config(max_model_len=MAX_LEN, max_num_seqs=1))
    body = {"query": QUERY, "documents": [f"{index} {QUERY}" * 8 for index in range(400)]}
    with serving(engine, reranker=reranker) as url:
        async with httpx.AsyncClient() as client:
            asked = asyncio.create_task(client.post(f"{url}/v1/rerank", json=body, timeout=WAIT_S))
            while not engine.stats().num_running:
                assert not asked.done()
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait([asked])
        deadline = time.monotonic() + WAIT_S
        while engine.stats().num_running or engine.stats().num_waiting:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert 0 < engine.stats().num_cancelled and engine.stats().num_length_limited < 400


def test_vectors_of_equal_texts_are_equal(engine: SyncEngine) -> None:
    """Which the order of equal documents rests on."""
    one, other = engine.embed([QUERY, QUERY])
    assert np.array_equal(one.vector, other.vector)


async def test_equal_documents_are_judged_once_and_keep_their_order(folder: Path) -> None:
    async with Engine(folder, engine_config(max_model_len=MAX_LEN, max_num_seqs=4)) as engine:
        app = drift_sdk.openai.app(engine, reranker=RERANKER)
        found = await call(app, "/v1/rerank", {"query": QUERY, "documents": ["b c", "d e"] * 20})
        results = found.json["results"]
        assert engine.stats().num_submitted == len({each["relevance_score"] for each in results}) == 2
        first, second = (each["index"] for each in (results[0], results[20]))
        assert [each["index"] for each in results] == [*range(first, 40, 2), *range(second, 40, 2)]


@pytest.mark.parametrize("choices", [("a", "e"), ("a b c", "e f g")])
async def test_documents_wait_for_room_in_the_queue(choices: tuple[str, str], folder: Path) -> None:
    """One request may have more documents than the queue takes."""
    reranker = Reranker(template="{query} {document}", instruction="", choices=choices)
    config = engine_config(max_model_len=MAX_LEN, max_num_seqs=2, max_queued_requests=1)
    async with Engine(folder, config) as engine:
        app = drift_sdk.openai.app(engine, reranker=reranker)
        body = {"query": QUERY, "documents": [f"{index} {QUERY}" for index in range(40)]}
        found = await call(app, "/v1/rerank", body)
        assert found.status == 200 and len(found.json["results"]) == 40
        assert engine.stats().num_rejected == 0


@pytest.mark.parametrize("most", [None, -1])
async def test_texts_that_cannot_fit_are_not_tokenised(
    most: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long query is a part of the prompt of every document."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    async with Engine(folder, engine_config(max_model_len=MAX_LEN)) as engine:
        app = drift_sdk.openai.app(engine, reranker=RERANKER)
        body = {"query": LONG * 50, "documents": DOCUMENTS, "truncate_prompt_tokens": most}
        found = await call(app, "/v1/rerank", body)
        assert found.status == 400 and max(lengths) < len(LONG)
