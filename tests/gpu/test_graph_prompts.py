"""Embeddings, decisions and log-probabilities of given tokens on CUDA graphs: alone, in a crowd, eagerly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from model_zoo import make_model

from drift_sdk import Chain, Decision, Embedding, Engine, EngineConfig, NGram, Speculation, TokenLogprobs
from drift_sdk.results import StateKind

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KINDS: list[StateKind] = ["last", "mean", "all"]
CHOICES = [(7, 8, 9), (7, 8, 10), (11,), (12, 13)]
TOKENS = [(7,), (11,), (12,), (7,)]
"""Answers that one request scores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(18, folder)
    return folder


def engine_of(folder: Path, executor: str = "graph", dtype: str = "bfloat16", **fields: Any) -> Engine:
    options = {"max_num_seqs": 8, "max_model_len": 512, "kv_cache_tokens": 8192, "block_size": 16} | fields
    return Engine(folder, EngineConfig(device="cuda", executor=executor, dtype=dtype, **options))


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    shared = [rng.randrange(3, 500) for _ in range(100)]
    return [
        (shared if index % 2 else []) + [rng.randrange(3, 500) for _ in range(rng.randint(1, 200))]
        for index in range(12)
    ]


async def measured(engine: Engine, *, is_crowded: bool) -> tuple[list[Embedding], list[Decision]]:
    """Embeddings of each kind and decisions: one after the other, or together beside requests that decode."""
    embeddings: dict[tuple[int, int], Embedding] = {}
    decisions: dict[int, Decision] = {}

    async def embed(kind: int, index: int) -> None:
        salt = None if is_crowded else f"{kind} {index}"  # alone, nothing is cached
        (embeddings[kind, index],) = await engine.embed(
            [prompts()[index]], pooling=KINDS[kind], cache_salt=salt
        )

    async def decide(index: int) -> None:
        salt = None if is_crowded else f"{index}"
        choices = TOKENS if index % 3 == 0 else CHOICES
        decisions[index] = await engine.decide(prompts()[index], choices, cache_salt=salt)

    calls = [(embed, kind, index) for kind in range(3) for index in range(12)]
    every = [*calls, *((decide, index) for index in range(12))]
    if not is_crowded:
        for call, *arguments in every:
            await call(*arguments)
    else:
        streams = [engine.generate(prompt, max_tokens=100, ignore_eos=True) for prompt in prompts()]
        async with anyio.create_task_group() as tasks:
            for call, *arguments in every:
                tasks.start_soon(call, *arguments)
        for stream in streams:
            await stream
    return [embeddings[key] for key in sorted(embeddings)], [decisions[index] for index in range(12)]


def test_bits_are_the_same_alone_and_in_a_crowd(folder: Path) -> None:
    async def main(*, is_crowded: bool) -> tuple[list[Embedding], list[Decision]]:
        fields = {"prefill_token_budget": 64 if is_crowded else 512}
        async with engine_of(folder, **fields) as engine:
            found = await measured(engine, is_crowded=is_crowded)
            assert not is_crowded or engine.stats().num_cached_tokens > 0
            return found

    alone, crowded = (anyio.run(lambda each=each: main(is_crowded=each)) for each in (False, True))
    assert [each.states for each in alone[0]] == [each.states for each in crowded[0]]
    assert [each.logprobs for each in alone[1]] == [each.logprobs for each in crowded[1]]
    assert len(alone[0]) == 36 and len(alone[1]) == 12


def test_results_are_near_those_of_the_eager_executor(folder: Path) -> None:
    async def main(executor: str) -> tuple[list[Embedding], list[Decision]]:
        async with engine_of(folder, executor, "float32") as engine:
            return await measured(engine, is_crowded=True)

    found, expected = anyio.run(main, "graph"), anyio.run(main, "eager")
    for one, other in zip(found[0], expected[0], strict=True):
        assert np.abs(one.states.numpy() - other.states.numpy()).max() < 1e-3
    for decision, wanted in zip(found[1], expected[1], strict=True):
        assert decision.logprobs == pytest.approx(wanted.logprobs, abs=2e-3)


def test_decisions_equal_forced_runs(folder: Path) -> None:
    async def main() -> None:
        async with engine_of(folder) as engine:
            for index, prompt in enumerate(prompts()[:6]):
                choices = TOKENS if index % 3 == 0 else CHOICES
                found = await engine.decide(prompt, choices)
                for answer, logprob in zip(choices, found.logprobs, strict=True):
                    total = 0.0
                    for index, token in enumerate(answer):
                        one = await engine.generate(
                            [*prompt, *answer[:index]], max_tokens=1, allowed_token_ids=(token,), logprobs=0
                        )
                        assert one.logprobs is not None
                        total += one.logprobs[0].logprob
                    assert logprob == pytest.approx(total, abs=1e-4)

    anyio.run(main)


@pytest.mark.parametrize("executor", ["eager", "graph"])
def test_logprobs_of_given_tokens_are_the_same_with_drafts(folder: Path, executor: str) -> None:
    async def main(speculation: Speculation | None) -> list[tuple[TokenLogprobs, ...] | None]:
        async with engine_of(folder, executor, "float32", speculation=speculation) as engine:
            streams = [
                engine.generate(
                    prompt[:100] * 2,
                    max_tokens=40,
                    ignore_eos=True,
                    logprobs=1,
                    logprob_token_ids=(3, 499, 77),
                )
                for prompt in prompts()
            ]
            found = [(await stream).logprobs for stream in streams]
            stats = engine.stats().speculation
            assert (stats is not None and stats.num_accepted > 0) == (speculation is not None)
            return found

    plain = anyio.run(main, None)
    drafted = anyio.run(main, Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False))
    for one, other in zip(plain, drafted, strict=True):
        for entry, drawn in zip(one or (), other or (), strict=True):
            assert entry.token_id == drawn.token_id and len(entry.given) == 3
            values = [[logprob for _, logprob in each.given] for each in (entry, drawn)]
            assert values[0] == (values[1] if executor == "graph" else pytest.approx(values[1], abs=1e-4))
            assert entry.given[0][0] == 3
