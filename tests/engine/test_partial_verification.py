"""Partial verification in engines: where it is used, what it leaves alone, and what it is refused for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from model_zoo import make_model

from drift_sdk import (
    Chain,
    Completion,
    ConfigError,
    Engine,
    EngineConfig,
    NGram,
    PartialVerification,
    Regex,
    SamplingParams,
    Speculation,
)

SMALL = PartialVerification(sink_tokens=8, retrieved_tokens=16, window_tokens=8, refresh_tokens=9)
LARGE = PartialVerification(sink_tokens=8, retrieved_tokens=256, window_tokens=64, refresh_tokens=9)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
CONTEXT = 160


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: what is tested does not depend on it."""
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0, folder)
    return folder


def config_of(partial: PartialVerification | None) -> EngineConfig:
    speculation = Speculation(
        draft=NGram(min_length=1), shape=Chain(3), adaptive=False, partial_verification=partial
    )
    return EngineConfig(
        dtype="float32", device="cpu", max_model_len=512, block_size=8, speculation=speculation
    )


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(CONTEXT)]


async def complete(engine: Engine, seeds: Sequence[int], params: SamplingParams = PARAMS) -> list[Completion]:
    streams = [engine.generate(prompt_of(seed), params) for seed in seeds]
    return [await stream for stream in streams]


@pytest.mark.anyio
async def test_tokens_are_those_without_it_where_views_would_have_all_blocks(folder: Path) -> None:
    found = []
    for partial in (None, LARGE):
        async with Engine(folder, config_of(partial)) as engine:
            completions = await complete(engine, (1, 2))
            stats = engine.stats()
            assert stats.num_partial_rounds == stats.num_refresh_rounds == 0
        found.append([completion.token_ids for completion in completions])
    assert found[0] == found[1]


@pytest.mark.anyio
async def test_long_sequences_are_verified_over_views_and_refreshed(folder: Path) -> None:
    async with Engine(folder, config_of(SMALL)) as engine:
        completions = await complete(engine, (1, 2))
        for completion in completions:
            found = completion.speculation
            assert found is not None
            assert len(completion.token_ids) == PARAMS.max_tokens
            assert found.num_partial_rounds > found.num_refresh_rounds > 1
            # One token of a refresh or round at least, and four at most; one came from the prompt.
            num_rounds = found.num_partial_rounds + found.num_refresh_rounds
            assert num_rounds < PARAMS.max_tokens <= 1 + 4 * num_rounds
        stats = engine.stats()
        for name in ("num_partial_rounds", "num_refresh_rounds"):
            numbers = [getattr(completion.speculation, name) for completion in completions]
            assert getattr(stats, name) == getattr(stats.speculation, name) == sum(numbers)
            assert f"drift_{name.removeprefix('num_')}_total" in engine.metrics_text()


@pytest.mark.anyio
async def test_requests_without_drafts_or_with_a_grammar_are_verified_whole(folder: Path) -> None:
    params = PARAMS.replace(num_draft_tokens=0)
    async with Engine(folder, config_of(None)) as engine:
        (expected,) = await complete(engine, (3,), params)
    async with Engine(folder, config_of(SMALL)) as engine:
        (found,) = await complete(engine, (3,), params)
        assert found.token_ids == expected.token_ids
        limited = SamplingParams(max_tokens=4, grammar=Regex("[a-z]{30}"))
        await complete(engine, (4,), limited)
        stats = engine.stats()
        assert stats.num_partial_rounds == stats.num_refresh_rounds == 0
        # Beside such a request, others are verified whole too; what is pending is refreshed.
        long = engine.generate(prompt_of(5), PARAMS.replace(max_tokens=200))
        async for _ in long:
            break
        await complete(engine, (6,), params.replace(max_tokens=8))
        long.cancel()
        await long
        assert engine.stats().num_refresh_rounds > 0


@pytest.mark.anyio
async def test_models_with_windows_are_refused(tmp_path: Path) -> None:
    make_model(0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    windows = {"sliding_window": 16, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config | windows))
    with pytest.raises(ConfigError, match="partial_verification=.*None for a model with sliding windows"):
        async with Engine(tmp_path, config_of(SMALL)):
            pass
