"""Requests of models whose layers with windows have blocks of their own: the tokens that each has alone in a
cache in which all layers keep all tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest
import transformers
from hybrid_requests import run_all, tokens_of
from model_zoo import GEMMA_ROPES, random_model, save_tokenizer
from msgspec.structs import replace
from near_ties import no_near_ties
from oracle_drafter import OracleDrafter
from placement import engine_config
from slow_cases import slow_after
from tolerances import bound

from drift_sdk import (
    Chain,
    Completion,
    Engine,
    EngineConfig,
    EngineStats,
    NGram,
    SamplingParams,
    Speculation,
    inspect,
)
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.scheduling.blocks import WindowBlocks
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup import executor_factory

VOCAB_SIZE, WINDOW, BLOCK_SIZE = 160, 20, 8
NEAR_TIE = bound(16.0, inner=64, depth=1 + 4 * 4)
PREFIX = [3 + (7 * index) % 150 for index in range(160)]
NUM_REQUESTS = 24
VARIANTS: list[dict[str, int]] = [
    {"prefill_token_budget": 61, "kv_cache_tokens": 416, "max_num_seqs": 12},  # preemptions
    {"prefill_token_budget": 512, "kv_cache_tokens": 8192},
    {"prefill_token_budget": 16, "kv_cache_tokens": 8192},
]
DRAFT_VARIANTS = [VARIANTS[0] | {"kv_cache_tokens": 320}, *VARIANTS[1:]]
"""Accepted drafts leave less time to be preempted in."""


class Case:
    """A request whose prompt begins with a part of PREFIX, and the step at which it arrives: one of two, so
    that many run at a time on a busy machine too."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        shared = rng.choice([0, 1, 15, 16, 17, 31, 64, 65, 100, 128, 160])
        self.prompt = PREFIX[:shared] + own
        self.arrival = rng.randrange(40) // 20 * 20
        self.params = SamplingParams(
            max_tokens=rng.randint(1, 48),
            ignore_eos=True,
            seed=seed,
            temperature=0.8 if seed % 3 == 2 else 0.0,
            priority=rng.choice([0, 0, 0, 1]),
        )


def config_of(**fields: Any) -> EngineConfig:
    return engine_config(**{"max_model_len": 320, "block_size": BLOCK_SIZE} | fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows in three layers of four."""
    folder = tmp_path_factory.mktemp("windows")
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=6,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=GEMMA_ROPES,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    random_model(transformers.Gemma3ForCausalLM, config, seed=5).save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rng = random.Random(2033)
    return [Case(rng, seed) for seed in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def alone(folder: Path, cases: list[Case]) -> list[Completion]:
    """Each request alone and without prefix hits, in blocks that all layers share."""
    salted = [Case(random.Random(0), 0) for _ in cases]
    for index, (each, case) in enumerate(zip(salted, cases, strict=True)):
        each.prompt, each.params = case.prompt, replace(case.params, cache_salt=str(index))
    stats: list[EngineStats] = []

    def note(engine: Engine) -> None:
        stats.append(engine.stats())

    with pytest.MonkeyPatch.context() as patch, no_near_ties(NEAR_TIE):
        patch.setattr(executor_factory, "kv_layers", all_layers_together)
        found = anyio.run(lambda: run_all(folder, config_of(max_num_seqs=1), salted, on_end=note))
    assert stats[0].num_window_blocks == 0 < stats[0].num_blocks
    assert not any(each.usage.cached_tokens for each in found)
    assert len({token for each in found for token in each.token_ids}) > 40
    return found


def all_layers_together(config: EngineConfig, spec: ModelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(range(spec.num_layers)), ()


def run(
    folder: Path, cases: list[Case], fields: dict[str, int], **more: Any
) -> tuple[list[Completion], EngineStats]:
    """The completions of a second pass over all requests, and the engine's statistics after it."""
    stats: list[EngineStats] = []

    def note(engine: Engine) -> None:
        driver = engine._driver
        assert driver is not None
        driver._scheduler.check_integrity()
        stats.append(engine.stats())

    found = anyio.run(lambda: run_all(folder, config_of(**fields, **more), cases, num_passes=2, on_end=note))
    return found, stats[0]


def draft(
    folder: Path,
    cases: list[Case],
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, int],
) -> tuple[list[Completion], EngineStats]:
    """`run` with drafts of which any number is accepted."""
    answers = {
        case.params.seed: [*case.prompt, *completion.token_ids]
        for case, completion in zip(cases, alone, strict=True)
    }
    oracle = OracleDrafter(answers, 0.3, VOCAB_SIZE)
    monkeypatch.setattr(NGramDrafterFactory, "eager_drafter", lambda *_: oracle)
    speculation = Speculation(draft=NGram(), shape=Chain(4), adaptive=False)
    found = run(folder, cases, fields, speculation=speculation)
    assert sorted(oracle.histogram) == [0, 1, 2, 3, 4]
    return found


@pytest.mark.parametrize("variant", slow_after(1, [0, 1, 2]))
def test_requests_together_equal_requests_alone(
    folder: Path, cases: list[Case], alone: list[Completion], variant: int
) -> None:
    found, stats = run(folder, cases, VARIANTS[variant])
    assert tokens_of(found) == tokens_of(alone)
    assert 0 < stats.num_window_blocks < stats.num_blocks / 2
    assert sum(each.usage.cached_tokens for each in found) > 200
    assert (stats.num_preemptions > 0) == (variant == 0)
    assert stats.num_recomputed_tokens > 0
    assert stats.num_free_window_blocks == stats.num_window_blocks


@pytest.mark.parametrize("variant", slow_after(1, [0, 1, 2]))
def test_drafts_do_not_change_tokens(
    folder: Path,
    cases: list[Case],
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    variant: int,
) -> None:
    found, stats = draft(folder, cases, alone, monkeypatch, DRAFT_VARIANTS[variant])
    assert tokens_of(found) == tokens_of(alone)
    assert 100 < stats.num_accepted_tokens < stats.num_drafted_tokens - 100
    assert sum(each.usage.cached_tokens for each in found) > 40
    assert (stats.num_preemptions > 0) == (variant == 0)


@pytest.mark.parametrize("kv_dtype", ["fp8", "nvfp4"])
def test_tokens_with_a_narrow_cache_are_those_of_shared_blocks(folder: Path, kv_dtype: str) -> None:
    prompts = [PREFIX[:number] + PREFIX[7:27] for number in (100, 100, 31, 160)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    async def main() -> list[tuple[int, ...]]:
        config = config_of(kv_dtype=kv_dtype, kv_cache_tokens=1024, max_num_seqs=1)
        async with Engine(folder, config) as engine:
            has_windows.append(engine.stats().num_window_blocks > 0)
            return [(await engine.generate(prompt, params)).token_ids for prompt in prompts]

    has_windows: list[bool] = []
    with no_near_ties(NEAR_TIE):
        found = anyio.run(main)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_factory, "kv_layers", all_layers_together)
        assert anyio.run(main) == found
    assert has_windows == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("has_drafts", [True, False])
def test_a_block_that_is_recycled_too_early_is_found(
    folder: Path,
    cases: list[Case],
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    has_drafts: bool,
) -> None:
    first_block = WindowBlocks.first_block
    monkeypatch.setattr(WindowBlocks, "first_block", lambda self, at: first_block(self, at + BLOCK_SIZE))
    monkeypatch.setattr(WindowBlocks, "num_resumable", lambda self, nodes: 0)
    monkeypatch.setattr(WindowBlocks, "check_integrity", lambda self, running: None)
    if has_drafts:
        found, _ = draft(folder, cases, alone, monkeypatch, VARIANTS[0])
    else:
        found, _ = run(folder, cases, VARIANTS[0])
    assert tokens_of(found) != tokens_of(alone)


def test_inspection_reports_both_pools(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(kv_cache_tokens=1024, max_num_seqs=2)
    info = inspect(folder, config)
    of_layer = 2 * 2 * 16 * 4
    assert (info.kv_bytes_per_token, info.window_bytes_per_token) == (4 * of_layer, 3 * of_layer)
    assert info.kv_cache_tokens == 1024 and info.window_cache_tokens is not None
    assert f"; {info.window_cache_tokens:,} tokens in windows (" in info.text()

    async def main() -> None:
        async with Engine(folder, config) as engine:
            stats = engine.stats()
            assert stats.num_window_blocks * BLOCK_SIZE == info.window_cache_tokens
            assert stats.num_free_window_blocks == stats.num_window_blocks
            stream = engine.generate(PREFIX, SamplingParams(max_tokens=90, ignore_eos=True))
            await anext(stream)
            assert engine.stats().num_free_window_blocks < stats.num_window_blocks
            await stream

    with caplog.at_level("INFO", "drift_sdk"):
        anyio.run(main)
    said = f"KV cache of layers with windows: {info.window_cache_tokens} tokens"
    assert any(said in message for message in caplog.messages)


@pytest.fixture(scope="module")
def gemma4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the kind of Gemma 4 E2B: windows in two layers of three that keep keys, and layers that
    attend to the keys of these."""
    folder = tmp_path_factory.mktemp("gemma4")
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=5,
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=VOCAB_SIZE,
        sliding_window=WINDOW,
        max_position_embeddings=2**17,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    random_model(transformers.Gemma4ForCausalLM, config, seed=5).save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.mark.parametrize(
    ("kind", "most", "turn_tokens"),
    [("folder", 6000, 180), pytest.param("gemma4_folder", 100_000, 5000, marks=pytest.mark.slow)],
    ids=["gemma3", "gemma4"],
)
def test_a_long_session_keeps_its_window_and_hits_behind_it(
    kind: str, most: int, turn_tokens: int, request: pytest.FixtureRequest
) -> None:
    """Turns of a conversation of 300 or 5,000 windows in few blocks of windows. Each turn goes on where the
    one before ended; the last one has the tokens that it has without the cache."""
    folder: Path = request.getfixturevalue(kind)
    rng = random.Random(3)
    window_bytes, full_bytes = {
        "folder": (3 * 2 * 2 * 16 * 4, 2 * 2 * 16 * 4),
        "gemma4_folder": (2 * 2 * 8 * 4, 2 * 16 * 4),
    }[kind]
    length_of_cache = 2 ** (most + turn_tokens).bit_length()
    fields = {
        "max_model_len": length_of_cache,
        "kv_cache_tokens": length_of_cache,
        "max_num_seqs": 2,
        "prefill_token_budget": 256 if kind == "folder" else 1024,
    }

    def turn() -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(turn_tokens)]

    async def main() -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        async with Engine(folder, config_of(**fields)) as engine:
            stats = engine.stats()
            num_window_tokens = stats.num_window_blocks * BLOCK_SIZE
            assert stats.num_blocks * BLOCK_SIZE == length_of_cache
            assert num_window_tokens < 1000 + 2 * fields["prefill_token_budget"]
            assert stats.window_kv_bytes == num_window_tokens * window_bytes
            assert stats.kv_bytes == length_of_cache * full_bytes
            tokens, length = turn(), 0
            while len(tokens) < most:
                completion = await engine.generate(tokens, params)
                cached = completion.usage.cached_tokens
                assert cached == max(length - 1, 0) // BLOCK_SIZE * BLOCK_SIZE
                stats = engine.stats()
                assert stats.num_free_window_blocks == stats.num_window_blocks
                length = len(tokens) + 20
                last, tokens = tokens, [*tokens, *completion.token_ids, *turn()]
            assert cached > 0.8 * most
            assert engine.stats().num_recomputed_tokens == 0
            with no_near_ties(NEAR_TIE):
                again = await engine.generate(last, replace(params, cache_salt="new"))
            assert again.usage.cached_tokens == 0
            assert again.token_ids == completion.token_ids

    anyio.run(main)


def test_samples_of_a_prompt_share_its_window(folder: Path) -> None:
    """They go on from the prompt's end, far behind the window, beside each other."""
    prompt = PREFIX + PREFIX[5:105]

    async def main() -> None:
        async with Engine(folder, config_of(kv_cache_tokens=2048, max_num_seqs=6)) as engine:
            params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, seed=5)
            samples = await engine.samples(prompt, 5, params)
            assert [each.usage.cached_tokens for each in samples] == [0] + [256] * 4
            for index, sample in enumerate(samples):
                given = replace(params, seed=5 + index, cache_salt=str(index))
                with no_near_ties(NEAR_TIE):
                    assert (await engine.generate(prompt, given)).token_ids == sample.token_ids
            assert len({each.token_ids for each in samples}) == 5

    anyio.run(main)


def test_windows_survive_a_pause_and_are_computed_again_after_sleep(folder: Path) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)

    async def main() -> None:
        async with Engine(folder, config_of(kv_cache_tokens=1024, max_num_seqs=3)) as engine:
            before = engine.stats()
            expected = await engine.generate(PREFIX, replace(params, cache_salt="alone"))
            for puts_to_sleep in (False, True):
                stream = engine.generate(PREFIX, params)
                await anext(stream)
                if puts_to_sleep:
                    await engine.sleep()
                    await engine.wake()
                else:
                    await engine.pause()
                    await engine.resume()
                assert (await stream).token_ids == expected.token_ids
            stats = engine.stats()
            assert stats.num_preemptions > 0
            assert (stats.num_window_blocks, stats.num_blocks) == (before.num_window_blocks, 128)
            assert stats.num_free_window_blocks == stats.num_window_blocks > 0
            completion = await engine.generate(PREFIX, params)
            assert completion.usage.cached_tokens == 152
            assert completion.token_ids == expected.token_ids

    anyio.run(main)
