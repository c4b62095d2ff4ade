"""Probabilities of given answers against forced runs and transformers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from model_zoo import make_model, make_overflowing
from odd_lists import Endless, Uncounted, Unreadable
from placement import engine_config

from drift_sdk import (
    Chain,
    Decision,
    DriftError,
    Engine,
    EngineConfig,
    EnginePool,
    ExecutorError,
    NGram,
    RequestError,
    SamplingParams,
    Speculation,
    SyncEngine,
    serving,
)
from drift_sdk.testing import scripted_engine

MODEL = 3
CHOICES = [(7, 8, 9), (7, 8, 10), (11,), (12, 13), (7,)]
TOLERANCE = 2e-5


def prompts_of(seed: int, lengths: Sequence[int] = (1, 15, 16, 17, 33, 90)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_model(MODEL, tmp_path_factory.mktemp("reference"))


def config(**fields: Any) -> EngineConfig:
    return engine_config(max_model_len=256, prefill_token_budget=32, **fields)


@torch.inference_mode()
def reference(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
    return sum(
        logprobs[position, token].item() for position, token in enumerate(answer, start=len(prompt) - 1)
    )


async def forced(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The log-probability of an answer, whose tokens are the only ones that may be generated."""
    total = 0.0
    for index, token in enumerate(answer):
        completion = await engine.generate(
            [*prompt, *answer[:index]], max_tokens=1, allowed_token_ids=(token,), logprobs=0
        )
        assert completion.token_ids == (token,) and completion.logprobs is not None
        total += completion.logprobs[0].logprob
    return total


def softmax(logprobs: Sequence[float]) -> list[float]:
    weights = np.exp(np.array(logprobs) - max(logprobs))
    found: list[float] = (weights / weights.sum()).tolist()
    return found


def test_probabilities_are_the_softmax_of_forced_runs(folder: Path, model: Any) -> None:
    async def main() -> None:
        async with Engine(folder, config()) as engine:
            for prompt in prompts_of(1):
                found = await engine.decide(prompt, CHOICES)
                runs = [await forced(engine, prompt, answer) for answer in CHOICES]
                expected = [reference(model, prompt, answer) for answer in CHOICES]
                assert found.choices == tuple(CHOICES) and found.num_tokens == len(prompt)
                assert found.logprobs == pytest.approx(runs, abs=TOLERANCE)
                assert found.logprobs == pytest.approx(expected, abs=TOLERANCE)
                assert found.probabilities == pytest.approx(softmax(runs), abs=TOLERANCE)
                assert math.fsum(found.probabilities) == pytest.approx(1.0)
                assert found.choice == CHOICES[int(np.argmax(expected))]

    anyio.run(main)


def test_the_prompt_is_computed_once(folder: Path) -> None:
    """Its full blocks, that is: an answer computes the rest of the prompt, and itself."""
    prompt = prompts_of(2)[-1]

    async def main() -> None:
        async with Engine(folder, config()) as engine:
            before = engine.stats()
            await engine.decide(prompt, CHOICES)
            stats = engine.stats()
            num_prompt = stats.num_prompt_tokens - before.num_prompt_tokens
            num_cached = stats.num_cached_tokens - before.num_cached_tokens
            assert num_prompt == len(CHOICES) * len(prompt) + sum(map(len, CHOICES))
            assert num_cached == (len(CHOICES) - 1) * 80 > 0

    anyio.run(main)


def test_answers_of_one_token_are_one_request(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the numbers of a request for each answer, and of forced runs."""
    answers: list[Any] = [(7,), (11,), "b", (7,), (499,), "c"]
    prompts = prompts_of(7)

    async def main() -> None:
        async with Engine(folder, config()) as engine:
            ids = [each if isinstance(each, tuple) else engine.tokenizer.encode(each) for each in answers]
            assert {len(each) for each in ids} == {1}
            found = []
            for prompt in prompts:
                before = engine.stats()
                found.append(await engine.decide(prompt, answers, cache_salt=str(len(prompt))))
                stats = engine.stats()
                assert stats.num_submitted - before.num_submitted == 1
                assert stats.num_prompt_tokens - before.num_prompt_tokens == len(prompt)
            text = await engine.decide("a b", ["b", "c"])
            with monkeypatch.context() as patch:
                patch.setattr(serving, "single_tokens", lambda *_: None)
                several = [await engine.decide(prompt, answers) for prompt in prompts]
                assert (await engine.decide("a b", ["b", "c"])).logprobs == pytest.approx(
                    text.logprobs, abs=TOLERANCE
                )
            for prompt, one, other in zip(prompts, found, several, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
                assert (one.num_tokens, one.choices) == (other.num_tokens, other.choices)
                expected = [reference(model, prompt, answer) for answer in ids]
                assert one.logprobs == pytest.approx(expected, abs=TOLERANCE)
                assert one.probabilities == pytest.approx(softmax(expected), abs=TOLERANCE)
            longest = prompts_of(1, (255,))[0]  # which leaves room for the answer
            assert len((await engine.decide(longest, [(7,), (8,)])).logprobs) == 2
            most = [(index,) for index in range(3, 132)]
            before = engine.stats().num_submitted
            await engine.decide([5, 6], most[:128])
            assert engine.stats().num_submitted - before == 1
            await engine.decide([5, 6], most)
            assert engine.stats().num_submitted - before == 1 + 129

    anyio.run(main)


def test_decisions_in_a_crowd(folder: Path) -> None:
    """With little room: prompts are cut into chunks, and requests preempted."""
    prompts = prompts_of(3, (40, 70, 33, 90, 40, 51))

    async def main() -> None:
        async with Engine(folder, config(max_num_seqs=1)) as engine:
            alone = [await engine.decide(prompt, CHOICES) for prompt in prompts]
        crowded = engine_config(
            max_model_len=160, prefill_token_budget=16, kv_cache_tokens=240, block_size=8, max_num_seqs=12
        )
        found: dict[int, Decision] = {}
        async with Engine(folder, crowded) as engine:

            async def decide(index: int) -> None:
                found[index] = await engine.decide(prompts[index], CHOICES, priority=-index)

            async with anyio.create_task_group() as tasks:
                for index in range(len(prompts)):
                    tasks.start_soon(decide, index)
                others = [engine.generate(prompt, max_tokens=50, ignore_eos=True) for prompt in prompts]
                for other in others:
                    await other
            stats = engine.stats()
            assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0
        for index, expected in enumerate(alone):
            assert found[index].choices == expected.choices
            assert found[index].logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)

    anyio.run(main)


def test_texts_follow_the_prompts_tokens(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with SyncEngine(folder, config()) as engine:
        encode = engine.tokenizer.encode
        texts = ["b", "c d"]
        ids = [tuple(encode(text, add_special_tokens=False)) for text in texts]
        by_text, by_ids = engine.decide("a b", texts), engine.decide(encode("a b"), ids)
        assert by_text.logprobs == pytest.approx(by_ids.logprobs, abs=TOLERANCE)
        assert by_text.choices == tuple(texts)
        messages = engine.decide([{"role": "user", "content": "a b"}], texts)
        plain = engine.decide(encode("a b", add_special_tokens=False), ids)
        assert messages.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE)


def test_arguments_of_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ after }}"
    )
    with SyncEngine(folder, config()) as engine:
        ids, messages = [[5], [6, 7]], [{"role": "user", "content": "a b"}]
        found = engine.decide(messages, ids, template_args={"after": " c"})
        plain = engine.decide(engine.tokenizer.encode("a b c", add_special_tokens=False), ids)
        assert found.num_tokens == plain.num_tokens > engine.decide(messages, ids).num_tokens
        assert found.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE)
        with pytest.raises(RequestError, match="template_args="):
            engine.decide("a b", ids, template_args={"after": " c"})


def test_a_pool_decides_too(folder: Path) -> None:
    async def main() -> None:
        pool = EnginePool([Engine(folder, config()), Engine(folder, config())])
        async with pool:
            prompt = prompts_of(5)[-1]
            found = await pool.decide(prompt, CHOICES)
            assert pool.stats().num_cached_tokens > 0  # all answers went to one replica
        async with Engine(folder, config()) as engine:
            assert found.logprobs == pytest.approx(
                (await engine.decide(prompt, CHOICES)).logprobs, abs=TOLERANCE
            )

    anyio.run(main)


def test_wrong_arguments(folder: Path) -> None:
    with SyncEngine(folder, config()) as engine:
        for choices, words in (
            ([], "choices=.*expected 1 to 1000 texts"),
            ("ab", "choices='ab'"),
            (["a", ""], r"choices\[1\]=''"),
            ([[5], []], r"choices\[1\]="),
            ([[5], 7], r"choices\[1\]=7"),
            ([[5], [500]], r"choices\[1\]\[0\]=500"),
            ([[5], "a" * 10_000], r"choices\[1\]: prompt of at least"),
            (Unreadable([[5]]), r"choices=.*\(ValueError\('no such place'\)\)"),
            (Endless([[5]]), "choices=.*expected 1 to 1000 texts"),
            (["a", "\ud800"], r"choices\[1\]: expected text without lone surrogates"),
            ([[5] * 250], r"choices\[0\]: prompt and answer of 256 tokens: expected at most 255"),
        ):
            with pytest.raises(RequestError, match=words):
                engine.decide([5, 6, 7, 8, 9, 10], choices)
        with pytest.raises(RequestError, match="prompt=7"):
            engine.decide(7, [[5]])
        assert engine.decide([5, 6], Uncounted([[5]])).probabilities == (1.0,)
        assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.parametrize("choices", [[[7], [8]], [[7, 8], [8]]])
def test_probabilities_that_overflow_are_an_error(tmp_path: Path, choices: list[list[int]]) -> None:
    make_model(MODEL, tmp_path)
    make_overflowing(tmp_path)
    with SyncEngine(tmp_path, config()) as engine:
        with pytest.raises(ExecutorError, match="choices: log-probabilities are not finite") as caught:
            engine.decide([5, 6], choices)
        assert not caught.value.ends_engine and engine.is_open


async def test_a_decision_whose_request_is_cancelled_says_so(folder: Path) -> None:
    async with Engine(folder, config()) as engine:
        await engine.pause()
        asked = asyncio.create_task(engine.decide([5], [[6], [7]]))
        await asyncio.sleep(0)  # until it has submitted its request
        assert engine.cancel("req-0")
        with pytest.raises(DriftError, match="^req-0 was cancelled$"):
            await asked


async def test_a_scripted_engine_says_that_it_cannot() -> None:
    async with scripted_engine("yes") as engine:
        with pytest.raises(DriftError, match="decide: expected an engine that computes a model"):
            await engine.decide("a", ["yes", "no"])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_logprobs_of_given_tokens_equal_transformers(folder: Path, model: Any, num_drafts: int) -> None:
    """At each generated token, with drafts and without."""
    speculation = (
        Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False) if num_drafts else None
    )
    token_ids = (499, 3, 77)

    async def main() -> None:
        async with Engine(folder, config(speculation=speculation)) as engine:
            streams = [
                engine.generate(
                    [*prompt, *prompt],
                    max_tokens=30,
                    ignore_eos=True,
                    logprobs=index % 2,
                    logprob_token_ids=token_ids,
                )
                for index, prompt in enumerate(prompts_of(9, (5, 9, 20)))
            ]
            others = [engine.generate(prompt, max_tokens=30, logprobs=1) for prompt in prompts_of(10, (5, 9))]
            for prompt, stream in zip(prompts_of(9, (5, 9, 20)), streams, strict=True):
                found = await stream
                ids = [*prompt, *prompt, *found.token_ids]
                with torch.inference_mode():
                    rows = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
                assert found.logprobs is not None and len(found.logprobs) == 30
                for entry, row in zip(found.logprobs, rows[2 * len(prompt) - 1 :], strict=False):
                    assert [token_id for token_id, _ in entry.given] == list(token_ids)
                    values = [logprob for _, logprob in entry.given]
                    assert values == pytest.approx(row[list(token_ids)].tolist(), abs=TOLERANCE)
            for other in others:
                assert all(entry.given == () for entry in (await other).logprobs or ())
            stats = engine.stats().speculation
            assert (stats is not None and stats.num_accepted > 0) == (num_drafts > 0)

    anyio.run(main)


def test_given_tokens_need_logprobs_and_a_vocabulary(folder: Path) -> None:
    with pytest.raises(RequestError, match="expected \\(\\) without logprobs"):
        SamplingParams(logprob_token_ids=(5,))
    with SyncEngine(folder, config()) as engine:
        with pytest.raises(RequestError, match="logprob_token_ids=500: expected token ids of the model"):
            engine.generate([5], logprobs=0, logprob_token_ids=(500,)).result()
