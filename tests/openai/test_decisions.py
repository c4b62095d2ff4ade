"""Probabilities of given answers over HTTP: those of `Engine.decide`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_calls import call
from model_zoo import make_model, make_overflowing, save_tokenizer
from openai_server import MODEL, serving
from placement import engine_config

import drift_sdk.openai
from drift_sdk import Decision, Engine, SyncEngine

PATH = "/v1/decide"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if quick %} quick{% endif %} answer:"
)
CHOICES = ["a", "be", "cd e"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(MODEL)
    make_model(18, folder)
    save_tokenizer(folder, 500)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(Engine(folder, engine_config(max_model_len=64))) as url:
        yield url


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SyncEngine]:
    with SyncEngine(folder, engine_config(max_model_len=64)) as engine:
        yield engine


def ask(url: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}{PATH}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def assert_equal(found: dict[str, Any], expected: Decision, choices: list[Any]) -> None:
    assert [each["index"] for each in found["choices"]] == list(range(len(choices)))
    assert [each["choice"] for each in found["choices"]] == choices
    logprobs, probabilities = (
        [each[name] for each in found["choices"]] for name in ("logprob", "probability")
    )
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert probabilities == pytest.approx(expected.probabilities, abs=1e-5)
    assert found["best"] == expected.best
    assert found["usage"] == {"prompt_tokens": expected.num_tokens, "total_tokens": expected.num_tokens}


def test_answers_to_a_text(url: str, engine: SyncEngine) -> None:
    found = ask(url, model=MODEL, prompt="Is it so?", choices=CHOICES)
    assert (found["object"], found["model"]) == ("decision", MODEL)
    assert found["id"].startswith("decide-")
    assert_equal(found, engine.decide("Is it so?", CHOICES), CHOICES)
    ids, answers = engine.tokenizer.encode("Is it so?"), [[70], [71, 72]]
    found = ask(url, prompt=ids, choices=answers)
    assert_equal(found, engine.decide(ids, answers), answers)


def test_answers_to_messages(url: str, engine: SyncEngine) -> None:
    messages = [{"role": "user", "content": "so?"}]
    decisions = []
    for args in (None, {"quick": True}):
        found = ask(url, messages=messages, choices=CHOICES, chat_template_kwargs=args)
        decisions.append(engine.decide(messages, CHOICES, template_args=args))
        assert_equal(found, decisions[-1], CHOICES)
    assert decisions[0].logprobs != pytest.approx(decisions[1].logprobs, abs=1e-3)
    parts = [{"role": "user", "content": [{"type": "text", "text": "so?"}]}]
    assert_equal(ask(url, messages=parts, choices=CHOICES), decisions[0], CHOICES)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {"choices": ["a"]}),
        ("prompt", {"choices": ["a"], "prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("prompt", {"choices": ["a"], "prompt": "a" * 400}),
        ("prompt", {"choices": ["a"], "prompt": []}),
        ("choices", {"prompt": "a"}),
        ("choices", {"prompt": "a", "choices": []}),
        ("choices", {"prompt": "a", "choices": ["a", ""]}),
        ("choices", {"prompt": "a", "choices": [[5], [10**6]]}),
        ("choices", {"prompt": "a", "choices": ["a"] * 1001}),
        ("messages", {"choices": ["a"], "messages": [{"role": "cook", "content": "a"}]}),
        ("messages", {"choices": ["a"], "messages": []}),
        ("chat_template_kwargs", {"choices": ["a"], "prompt": "a", "chat_template_kwargs": {"b": 1}}),
        ("temperature", {"choices": ["a"], "prompt": "a", "temperature": 1.0}),
    ],
)
def test_wrong_requests_name_the_field(url: str, param: str, body: dict[str, Any]) -> None:
    reply = httpx.post(f"{url}{PATH}", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param), reply.text


async def test_keys_are_needed_and_share_no_prefixes(folder: Path) -> None:
    async with Engine(folder, engine_config(max_model_len=64)) as engine:
        app = drift_sdk.openai.app(engine, api_keys=["a", "b"], salts_keys=True)
        body = {"prompt": [5] * 40, "choices": ["a"]}
        assert (await call(app, PATH, body)).status == 401
        cached = []
        for key in ("a", "b", "a"):
            before = engine.stats().num_cached_tokens
            reply = await call(app, PATH, body, headers={"authorization": f"Bearer {key}"})
            assert reply.status == 200
            cached.append(engine.stats().num_cached_tokens - before)
        assert cached == [0, 0, 32]


async def test_numbers_that_overflow_are_an_error_or_the_least(folder: Path, tmp_path: Path) -> None:
    """JSON has neither infinity nor NaN. OpenAI's least log-probability is -9999."""
    copied = tmp_path / MODEL
    shutil.copytree(folder, copied)
    make_overflowing(copied)
    async with Engine(copied, engine_config(max_model_len=64)) as engine:
        app = drift_sdk.openai.app(engine)
        for path, body in (
            (PATH, {"prompt": [5], "choices": ["a", "b"]}),
            ("/v1/embeddings", {"input": [5]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ):
            reply = await call(app, path, body)
            assert reply.status == 500 and "not finite: expected" in reply.error["message"]
        sampling = {"max_tokens": 2, "ignore_eos": True}
        message = {"role": "user", "content": "a"}
        chat = {"messages": [message], "logprobs": True, "top_logprobs": 1, **sampling}
        for stream in (False, True):
            completion = {"prompt": [5], "logprobs": 1, "stream": stream, **sampling}
            for path, body in (
                ("/v1/completions", completion),
                ("/v1/chat/completions", {**chat, "stream": stream}),
            ):
                reply = await call(app, path, body)
                answers = [each["choices"][0] for each in (reply.events[:-1] if stream else [reply.json])]
                logs = [each["logprobs"] for each in answers if each.get("logprobs")]
                found = [number for log in logs for number in log.get("token_logprobs", ())]
                found += [entry["logprob"] for log in logs for entry in log.get("content", ())]
                assert found == [-9999.0] * 2
