"""Answers of random models, alone and in a crowd, with prefix hits, preemption and drafts: tests compare
their bits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import anyio
import pytest

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk.stats import EngineStats
from perf.harness.oracle import KnownAnswers, oracle_drafts

VOCAB_SIZE = 160
NUM_TOKENS = 40
NEAR = 1e-3
"""In float32, log-probabilities differ by less, and tokens only where two are nearer than that."""
PREFIX = [3 + (7 * i) % 150 for i in range(256)]
GRAPHS: dict[str, object] = {"device": "cuda", "dtype": "bfloat16", "executor": "graph"}
SIZES: dict[str, object] = {"max_num_seqs": 4, "max_model_len": 384, "prefill_token_budget": 96}
SIZES |= {"block_size": 16, "kv_cache_tokens": 8192}


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths, some of which repeat themselves."""
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(number)]

    shared = [0, 0, 1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 250, 256]
    return [PREFIX[:length] + tokens(rng.randint(1, 50)) for length in shared] + [tokens(6) * 6, tokens(70)]


def chain_of(number: int, draft: Path | str | NGram, **fields: NGram) -> Speculation:
    """Chains of that number of drafts in each round."""
    return Speculation(draft=draft, shape=Chain(number), adaptive=False, **fields)


def answers(
    folder: Path, prompts: Sequence[list[int]], *, repeats: int = 1, is_alone: bool = False, **fields: object
) -> tuple[list[Completion], EngineStats]:
    """Answers to all prompts, computed together on CUDA graphs; of the last repeat.

    is_alone: one after the other, without prefix hits. fields: of the engine's configuration. In float32 all
    tokens are greedy, otherwise every other request.
    """
    config = EngineConfig(**GRAPHS | SIZES | ({"max_num_seqs": 1} if is_alone else {}) | fields)
    is_greedy = config.dtype == "float32"

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=2,
            temperature=0.0 if is_greedy or index % 2 else 0.7,
            seed=index,
            cache_salt=str(index) if is_alone else None,
        )

    async def main() -> tuple[list[Completion], EngineStats]:
        async with Engine(folder, config) as engine:
            for _ in range(repeats):
                streams = [engine.generate(prompt, params(index)) for index, prompt in enumerate(prompts)]
                found = [await stream for stream in streams]
            return found, engine.stats()

    return anyio.run(main)


def different(found: Sequence[Completion], expected: Sequence[Completion]) -> list[int]:
    """The requests whose tokens or log-probabilities differ."""
    return [
        index
        for index, (one, other) in enumerate(zip(found, expected, strict=True))
        if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs)
    ]


def assert_same_in_crowds(
    folder: Path,
    prompts: Sequence[list[int]],
    expected: Sequence[Completion],
    modes: Sequence[Mapping[str, object]],
    *,
    hits: str = "num_cached_tokens",
) -> None:
    """Answers in each mode are the expected ones.

    hits: the statistic of prefix hits, which is not 0. In modes with few tokens of KV cache sequences are
    preempted, and of drafts some are accepted and some rejected.
    """
    for mode in modes:
        found, stats = answers(folder, prompts, repeats=2, **mode)
        assert not different(found, expected), mode
        assert getattr(stats, hits) > 0
        assert "kv_cache_tokens" not in mode or stats.num_preemptions > 0
        assert "speculation" not in mode or 0 < stats.num_accepted_tokens < stats.num_drafted_tokens


def assert_oracle_drafts_change_no_bit(
    folder: Path, modes: Sequence[Mapping[str, object]], *, hits: str = "num_cached_tokens"
) -> None:
    """In every mode, and with every number of accepted drafts of 3, whatever the model would draft."""
    prompts = prompts_of(5)
    expected, _ = answers(folder, prompts, is_alone=True)
    sequences = {
        seed: [*prompt, *one.token_ids]
        for seed, (prompt, one) in enumerate(zip(prompts, expected, strict=True))
    }
    with oracle_drafts(KnownAnswers(sequences, VOCAB_SIZE)):
        assert_same_in_crowds(folder, prompts, expected, modes, hits=hits)
        _, stats = answers(folder, prompts, speculation=chain_of(3, NGram()))
    assert all(count > 0 for count in stats.speculation.acceptance_histogram)


def assert_near(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Greedy answers in float32 are the expected ones, but for near ties."""
    num_equal = 0
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            if entry.token_id != wanted.token_id:
                (_, best), (_, second) = wanted.top
                assert best - second < NEAR
                break  # the texts after it have nothing in common

            assert entry.logprob == pytest.approx(wanted.logprob, abs=NEAR)
            num_equal += 1
    assert num_equal > 0.9 * len(expected) * NUM_TOKENS


def scores(folder: Path, sequences: Sequence[list[int]], **fields: object) -> list[float]:
    """Log-probabilities of all tokens of prompts."""
    config = EngineConfig(**GRAPHS | SIZES | fields)
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)

    async def main() -> list[float]:
        found = []
        async with Engine(folder, config) as engine:
            for sequence in sequences:
                completion = await engine.generate(sequence, params)
                found += [entry.logprob for entry in completion.prompt_logprobs or () if entry is not None]
        return found

    return anyio.run(main)


def assert_as_near_float32_as_eager(
    folder: Path, sequences: Sequence[list[int]], *, fast_prompts: bool
) -> None:
    """In bfloat16, graphs have the error of the eager executor."""
    expected = scores(folder, sequences, executor="eager", dtype="float32")
    rounded = scores(folder, sequences, executor="eager", dtype="bfloat16")
    found = scores(folder, sequences, fast_prompts=fast_prompts)

    def error(other: list[float]) -> float:
        return mean(abs(a - b) for a, b in zip(expected, other, strict=True))

    assert len(found) > 1000
    assert error(found) < 1.25 * error(rounded)
