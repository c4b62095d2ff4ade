"""Embeddings and hidden states of prompts against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import tokenizers
import torch
from model_zoo import make_model, make_overflowing
from odd_lists import Endless, Uncounted, Unreadable
from placement import engine_config
from tokenizers import processors

from drift_sdk import (
    Engine,
    EnginePool,
    ExecutorError,
    Job,
    PromptTooLong,
    RequestError,
    SamplingParams,
    SyncEngine,
)
from drift_sdk.results import StateKind

MODELS = {"qwen3": 18, "gemma3": 30, "granite": 32}
"""Indices in the zoo."""
TOLERANCE = 1e-5


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (1, 2, 16, 17, 70, 150)]


@torch.inference_mode()
def reference(model: Any, prompt: list[int], pooling: StateKind) -> np.ndarray:
    """States of transformers' model without its head, [rows, hidden size]."""
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    states = {"last": hidden[-1:], "mean": hidden.mean(0, keepdim=True), "all": hidden}[pooling]
    return states.numpy()


def normalised(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(MODELS[name], tmp_path)
    prompts = prompts_of(3)
    config = engine_config(max_model_len=256, prefill_token_budget=16, max_num_seqs=4)

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            for pooling in ("last", "mean", "all"):
                found = await engine.embed(prompts, pooling=pooling)
                shorter = await engine.embed(prompts, pooling=pooling, dimensions=10)
                plain = await engine.embed(prompts, pooling=pooling, normalize=False)
                assert len(found) == len(shorter) == len(plain) == len(prompts)
                for prompt, one, short, raw in zip(prompts, found, shorter, plain, strict=True):
                    expected = reference(model, prompt, pooling)
                    assert one.num_tokens == len(prompt)
                    assert one.states.numpy().shape == expected.shape
                    assert np.abs(one.states.numpy() - normalised(expected)).max() < TOLERANCE
                    assert np.abs(short.states.numpy() - normalised(expected[:, :10])).max() < TOLERANCE
                    scale = max(1.0, np.abs(expected).max())
                    assert np.abs(raw.states.numpy() - expected).max() < TOLERANCE * scale
                    assert np.array_equal(one.vector, one.states.numpy()[0])

    anyio.run(main)


def test_texts_have_the_models_own_tokens_around_them(tmp_path: Path) -> None:
    make_model(MODELS["qwen3"], tmp_path)

    async def main() -> None:
        async with Engine(tmp_path, engine_config(max_model_len=64)) as engine:
            (text,) = await engine.embed(["a b"])
            (ids,) = await engine.embed([engine.tokenizer.encode("a b")])
            assert text == ids

    anyio.run(main)


def test_files_without_a_head_are_served(tmp_path: Path) -> None:
    """Published models of embeddings have names without "model." and no head."""
    model = make_model(19, tmp_path)
    base = tmp_path / "base"
    model.model.save_pretrained(base)
    for file in tmp_path.glob("tokenizer*"):
        (base / file.name).write_bytes(file.read_bytes())

    async def main() -> None:
        async with Engine(base, engine_config(max_model_len=64)) as engine:
            (found,) = await engine.embed([[5, 6, 7]])
            expected = normalised(reference(model, [5, 6, 7], "last"))
            assert np.abs(found.vector - expected[0]).max() < TOLERANCE

    anyio.run(main)


def test_a_prefix_hit_leaves_the_last_state_and_is_not_used_for_the_mean(tmp_path: Path) -> None:
    model = make_model(MODELS["qwen3"], tmp_path)
    prompt = prompts_of(4)[-1]

    async def main() -> None:
        async with Engine(tmp_path, engine_config(max_model_len=256)) as engine:
            await engine.generate(prompt, max_tokens=1)
            for pooling in ("last", "mean", "all"):
                (found,) = await engine.embed([prompt], pooling=pooling)
                assert (found.cached_tokens > 0) == (pooling == "last")
                expected = normalised(reference(model, prompt, pooling))
                assert np.abs(found.states.numpy() - expected).max() < TOLERANCE
            (salted,) = await engine.embed([prompt], cache_salt="other")
            assert salted.cached_tokens == 0

    anyio.run(main)


def test_a_request_that_generates_reports_states_too(tmp_path: Path) -> None:
    """Beside others, and with little room: some are preempted before their first token and some after it."""
    model = make_model(MODELS["qwen3"], tmp_path)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in (80, 30, 110, 120, 60, 90)]
    config = engine_config(prefill_token_budget=8, block_size=8, max_model_len=232, kv_cache_tokens=232)
    kinds: list[StateKind] = ["last", "mean", "all"]

    async def main() -> None:
        async with Engine(tmp_path, config) as engine:
            streams = [
                engine.generate(
                    prompt,
                    max_tokens=60,
                    ignore_eos=True,
                    prompt_states=kinds[index % 3],
                    prompt_logprobs=0 if index % 2 else None,
                    priority=index,
                )
                for index, prompt in enumerate(prompts)
            ]
            for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                completion = await stream
                expected = reference(model, prompt, kinds[index % 3])
                assert completion.prompt_states is not None
                assert np.abs(completion.prompt_states.numpy() - expected).max() < 2 * TOLERANCE
                assert len(completion.token_ids) == 60
            assert engine.stats().num_preemptions > 0
            assert (await engine.generate(prompts[1], max_tokens=1)).prompt_states is None

    anyio.run(main)


def test_wrong_arguments(tmp_path: Path) -> None:
    make_model(MODELS["qwen3"], tmp_path)
    with SyncEngine(tmp_path, engine_config(max_model_len=64)) as engine:
        assert engine.embed([]) == []
        job = Job(key=1, prompt=[5], params=SamplingParams(prompt_states="mean"))
        for arguments, keywords, words in (
            (("a text",), {}, r"prompts='a text': expected a sequence of prompts.*; \[prompt\] for one"),
            (([5, 6],), {}, r"prompts=\[5, 6\]: expected a sequence of prompts.*; \[prompt\] for one"),
            (([[6], 5],), {}, r"prompts\[1\]=5: expected a string or a sequence of token ids"),
            (([[5]],), {"pooling": "first"}, "pooling='first': expected one of"),
            (([[5]],), {"dimensions": 0}, "dimensions=0: expected an integer of at least 1"),
            (([[5]],), {"dimensions": 65}, "dimensions=65: expected 1 to 64, or None"),
            (([[5]],), {"normalize": 1}, "normalize=1"),
            (([[5], [7] * 64],), {}, r"prompts\[1\]: prompt of 64 tokens"),
            (([[5]],), {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: expected an integer of"),
            (([[5], [500]],), {}, r"prompts\[1\]\[0\]=500"),
            ((Unreadable([[5]]),), {}, r"prompts=.*\(ValueError\('no such place'\)\)"),
            ((Uncounted([[5]]),), {}, r"prompts=.*\(ValueError\('not counted'\)\)"),
            ((Endless([[5]]),), {}, "prompts=.*expected a sequence of prompts"),
            ((range(10**12),), {}, r"prompts=range.*; \[prompt\] for one"),
            (([[5], job],), {}, r"prompts\[1\]=Job.*expected a text or token ids"),
        ):
            with pytest.raises(RequestError, match=words):
                engine.embed(*arguments, **keywords)
        assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.parametrize("pooling", ["last", "mean", "all"])
def test_states_that_overflow_are_an_error(tmp_path: Path, pooling: StateKind) -> None:
    """The mean of 4 and of 300 tokens too, which is computed in integers."""
    make_model(MODELS["qwen3"], tmp_path)
    make_overflowing(tmp_path)
    with SyncEngine(tmp_path, engine_config(max_model_len=400)) as engine:
        for prompt in ([5] * 4, [5] * 300):
            with pytest.raises(ExecutorError, match=r"prompts\[0\]: hidden states are not finite") as caught:
                engine.embed([prompt], pooling=pooling)
            assert not caught.value.ends_engine
        assert len(engine.generate([5], max_tokens=3, ignore_eos=True).result().token_ids) == 3


def test_strict_engines_refuse_by_name(tmp_path: Path) -> None:
    make_model(MODELS["qwen3"], tmp_path)
    engine = Engine(tmp_path, engine_config(strict_performance=True))
    with pytest.raises(RequestError, match="prompt_states='mean': expected None with strict_performance"):
        engine._check(None, SamplingParams(prompt_states="mean"), None)


def test_long_prompts_are_cut_and_keep_the_tokens_around_a_text(tmp_path: Path) -> None:
    make_model(MODELS["qwen3"], tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    around = [("<bos>", 0), ("<eos>", 1)]
    raw.post_processor = processors.TemplateProcessing("<bos> <bos> $A <eos>", special_tokens=around)
    raw.save(str(tmp_path / "tokenizer.json"))
    text = "a cat and a dog, " * 20
    with SyncEngine(tmp_path, engine_config(max_model_len=64)) as engine:
        ids = engine.tokenizer.encode(text)
        own = engine.tokenizer.encode(text, add_special_tokens=False)
        assert ids == [0, 0, *own, 1] and len(own) > 80
        for most in (4, 20, 63, 500):
            kept = min(most, 63)
            found, of_ids, other = engine.embed([text, own, [5, 6, 7]], truncate_prompt_tokens=most)
            [expected, own_cut, short] = engine.embed([[0, 0, *own[: kept - 3], 1], own[:kept], [5, 6, 7]])
            for one, wanted in ((found, expected), (of_ids, own_cut), (other, short)):
                assert one.num_tokens == wanted.num_tokens
                assert np.allclose(one.vector, wanted.vector, atol=TOLERANCE)
        whole = engine.embed(["a b"], truncate_prompt_tokens=63)
        assert np.array_equal(whole[0].vector, engine.embed(["a b"])[0].vector)
        with pytest.raises(
            RequestError, match="=3: expected at least 4, as the model has 3 tokens"
        ) as caught:
            engine.embed([text], truncate_prompt_tokens=3)
        assert caught.value.field == "truncate_prompt_tokens"
        with pytest.raises(PromptTooLong) as too_long:
            engine.embed(["a", "b", text])
        assert too_long.value.field == "prompts[2]"


async def test_cut_prompts_go_to_the_replica_that_has_them(tmp_path: Path) -> None:
    make_model(MODELS["qwen3"], tmp_path)
    text = "a cat and a dog, " * 40
    engines = [Engine(tmp_path, engine_config(max_model_len=256)) for _ in range(2)]
    async with EnginePool(engines) as pool:
        for _ in range(3):
            [found] = await pool.embed([text], truncate_prompt_tokens=200)
            assert found.num_tokens == 200
        assert found.cached_tokens > 100
