"""Tokens of models with windows and other options of layers: the same alone and together, for any chunks,
after prefix hits, and with drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest
from draft_zoo import make_draft
from model_zoo import logprob_bound, make_model
from near_ties import no_near_ties
from placement import engine_config
from slow_cases import slow_rows_after

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation

VOCAB_SIZE = 500
SHARED = [7 + (5 * i) % 300 for i in range(48)]
QWEN2, PHI3, GEMMA3, SMOLLM3, GEMMA4 = 26, 29, 30, 31, 33
EAGLE = "eagle"


def _prompts() -> list[list[int]]:
    """Prompts longer and shorter than the windows. Some have common prefixes, some repeat a phrase."""
    rng = random.Random(7)
    prompts = []
    for index in range(8):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(5)]
        prompts.append(SHARED[: rng.choice([0, 33, 48])] + own + phrase * (3 * (index % 2)))

    return prompts


PARAMS = [SamplingParams(max_tokens=24, ignore_eos=True, seed=seed) for seed in range(8)]


async def _alone(folder: Path) -> list[Completion]:
    async with Engine(folder, engine_config(max_num_seqs=1, max_model_len=256)) as engine:
        return [await engine.generate(*pair) for pair in zip(_prompts(), PARAMS, strict=True)]


async def _together(folder: Path, config: EngineConfig) -> tuple[list[list[Completion]], Any]:
    """The completions of all prompts, asked twice, and the engine's statistics."""
    async with Engine(folder, config) as engine:
        passes = []
        for _ in range(2):
            streams = [engine.generate(*pair) for pair in zip(_prompts(), PARAMS, strict=True)]
            passes.append([await stream for stream in streams])

        return passes, engine.stats()


@pytest.mark.parametrize(
    "index, draft",
    slow_rows_after(
        2,
        [
            (GEMMA3, EAGLE),
            (PHI3, "ngram"),
            (GEMMA4, "ngram"),
            (GEMMA4, EAGLE),
            (QWEN2, None),
            (GEMMA3, "ngram"),
            (SMOLLM3, "ngram"),
        ],
    ),
)
def test_tokens_together_equal_tokens_alone(index: int, draft: str | None, tmp_path: Path) -> None:
    make_model(index, tmp_path / "model")
    speculation = None
    if draft is not None:
        source: Any = NGram(min_length=1)
        if draft == EAGLE:
            source = tmp_path / "draft"
            make_draft("reference", source, tmp_path / "model")
        speculation = Speculation(draft=source, shape=Chain(3), adaptive=False)

    config = engine_config(
        max_num_seqs=6,
        max_model_len=256,
        block_size=8,
        kv_cache_tokens=256,
        prefill_token_budget=16,
        speculation=speculation,
    )
    with no_near_ties(logprob_bound(index)):
        expected = anyio.run(_alone, tmp_path / "model")

    passes, stats = anyio.run(_together, tmp_path / "model", config)
    for completions in passes:
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]

    assert sum(completion.usage.cached_tokens for completion in passes[1]) > 0
    assert (stats.num_drafted_tokens > 0) == (draft is not None)
    assert len({token for completion in expected for token in completion.token_ids}) > 40
