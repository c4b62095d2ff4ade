"""Partial verification on the graph executor: sequences shorter than a view, and what later requests see."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from random_folder import make_random_draft_folder, make_random_folder

from drift_sdk import (
    Chain,
    Engine,
    EngineConfig,
    NGram,
    PartialVerification,
    SamplingParams,
    Speculation,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CONTEXT, NUM_TOKENS = 1500, 160
SMALL = PartialVerification(sink_tokens=64, retrieved_tokens=256, window_tokens=64, refresh_tokens=28)
LARGE = PartialVerification(sink_tokens=64, retrieved_tokens=4096, window_tokens=64, refresh_tokens=28)


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: what is tested does not depend on it."""
    return "asyncio"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    model = make_random_folder(folder / "model", "llama")
    return model, make_random_draft_folder(folder / "draft", model)


def config_of(folders: tuple[Path, Path], partial: PartialVerification | None) -> EngineConfig:
    speculation = Speculation(
        draft=folders[1],
        ngrams=NGram(min_length=1),
        shape=Chain(3),
        adaptive=False,
        partial_verification=partial,
    )
    return EngineConfig(
        load="random",
        executor="graph",
        max_num_seqs=4,
        max_model_len=2048,
        strict_performance=False,
        speculation=speculation,
    )


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 32_000) for _ in range(CONTEXT)]


@pytest.mark.anyio
async def test_sequences_shorter_than_a_view_are_verified_whole(
    folders: tuple[Path, Path],
) -> None:
    found = []
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, seed=3)
    for partial in (None, LARGE):
        async with Engine(folders[0], config_of(folders, partial)) as engine:
            completions = [await engine.generate(prompt_of(seed), params) for seed in (1, 2)]
            found.append([completion.token_ids for completion in completions])
            assert engine.stats().num_partial_rounds == 0
    assert found[0] == found[1]


@pytest.mark.anyio
async def test_later_requests_get_the_bits_of_an_engine_without_it(folders: tuple[Path, Path]) -> None:
    """Tokens that were emitted over views are a prompt like any other: what is cached of them, and what a
    request without drafts decodes, has the bits of plain decoding."""
    plain = SamplingParams(max_tokens=32, ignore_eos=True, num_draft_tokens=0, logprobs=2)
    async with Engine(folders[0], config_of(folders, SMALL)) as engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        streams = [engine.generate(prompt_of(seed), params) for seed in (1, 2, 3)]
        answers = [(await stream).token_ids for stream in streams]
        stats = engine.stats()
        assert stats.num_partial_rounds > stats.num_refresh_rounds > 10
        prompts = [[*prompt_of(seed), *answer] for seed, answer in zip((1, 2, 3), answers, strict=True)]
        found = [await engine.generate(prompt, plain) for prompt in prompts]
        assert all(completion.usage.cached_tokens > CONTEXT for completion in found)
    async with Engine(folders[0], config_of(folders, None)) as engine:
        expected = [await engine.generate(prompt, plain) for prompt in prompts]
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
