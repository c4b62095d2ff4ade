"""Layers with windows in blocks of their own, on CUDA graphs: the bits that a request has alone in a cache in
which all layers keep all tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import transformers
from model_zoo import GEMMA_ROPES, random_model, save_tokenizer

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk.scheduling.blocks import WindowBlocks
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup import executor_factory
from drift_sdk.stats import EngineStats

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE, WINDOW, NUM_TOKENS = 160, 100, 40
NUM_LONG, NUM_LONG_TOKENS = 8, 200
"""The last requests generate more tokens than a small pool has room for: some are preempted."""
PREFIX = [3 + (7 * index) % 150 for index in range(512)]
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "max_position_embeddings": 16_384,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gemma3":
        config = transformers.Gemma3TextConfig(
            intermediate_size=96, head_dim=128, rope_parameters=GEMMA_ROPES, **COMMON
        )
        model = random_model(transformers.Gemma3ForCausalLM, config, seed=5)
    else:
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        config = transformers.GptOssConfig(intermediate_size=32, head_dim=64, **experts, **COMMON)
        model = random_model(transformers.GptOssForCausalLM, config, seed=5)
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


def config_of(**fields: Any) -> EngineConfig:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 768, "prefill_token_budget": 96}
    return EngineConfig(device="cuda", dtype="bfloat16", executor="graph", **settings | fields)


def all_layers_together(config: EngineConfig, spec: ModelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(range(spec.num_layers)), ()


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(number)]

    shared = [0, 0, 1, 63, 64, 65, 127, 128, 129, 192, 256, 300, 400, 500, 512]
    prompts = [PREFIX[:length] + tokens(rng.randint(1, 80)) for length in shared]
    prompts += [tokens(6) * 9, tokens(70)]
    return prompts + [tokens(number) for number in range(104, 104 + 2 * NUM_LONG, 2)]


def answers(
    folder: Path, prompts: list[list[int]], config: EngineConfig, *, repeats: int = 1, is_alone: bool = False
) -> tuple[list[Completion], EngineStats]:
    """Answers to all prompts, of the last repeat. is_alone: one after the other, without prefix hits."""

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=NUM_TOKENS if index < len(prompts) - NUM_LONG else NUM_LONG_TOKENS,
            ignore_eos=True,
            logprobs=1,
            temperature=0.0 if index % 2 else 0.7,
            seed=index,
            cache_salt=str(index) if is_alone else None,
        )

    async def main() -> tuple[list[Completion], EngineStats]:
        async with Engine(folder, config) as engine:
            for _ in range(repeats):
                found = []
                if is_alone:
                    for index, prompt in enumerate(prompts):
                        found.append(await engine.generate(prompt, params(index)))
                else:
                    streams = [engine.generate(prompt, params(index)) for index, prompt in enumerate(prompts)]
                    found = [await stream for stream in streams]
            return found, engine.stats()

    return anyio.run(main)


def alone(folder: Path, prompts: list[list[int]]) -> list[Completion]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_factory, "kv_layers", all_layers_together)
        config = config_of(max_num_seqs=1, kv_cache_tokens=4096)
        found, stats = answers(folder, prompts, config, is_alone=True)
    assert stats.num_window_blocks == stats.num_cached_tokens == 0
    return found


def bits(found: Sequence[Completion]) -> list[Any]:
    return [(each.token_ids, each.logprobs) for each in found]


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_crowd_changes_no_bit(folder: Path, block_size: int) -> None:
    prompts = prompts_of(2)
    expected = bits(alone(folder, prompts))
    modes: list[dict[str, Any]] = [
        {"kv_cache_tokens": 16_384},
        {"kv_cache_tokens": 16_384, "prefill_token_budget": 512},
        {"kv_cache_tokens": 768, "prefill_token_budget": 200},
    ]
    for number in (3, 7):
        draft = Speculation(draft=NGram(min_length=1), shape=Chain(number), adaptive=False)
        modes += [mode | {"speculation": draft} for mode in modes[:3]]
    num_preemptions = 0
    for mode in modes:
        found, stats = answers(folder, prompts, config_of(block_size=block_size, **mode), repeats=2)
        assert bits(found) == expected, mode
        assert 0 < stats.num_window_blocks <= stats.num_blocks
        assert stats.num_free_window_blocks == stats.num_window_blocks
        assert stats.num_cached_tokens > 0
        num_preemptions += stats.num_preemptions
        assert "speculation" not in mode or 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    assert num_preemptions > 0


def test_a_long_session_hits_behind_the_window(folder: Path) -> None:
    """150 windows in a pool of a few; the last answer has the bits of one without the cache."""
    rng = random.Random(3)
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1)

    async def main() -> None:
        config = config_of(max_num_seqs=2, max_model_len=16_384, kv_cache_tokens=32_768)
        async with Engine(folder, config) as engine:
            assert engine.stats().num_window_blocks < engine.stats().num_blocks / 10
            tokens, length = PREFIX[:200], 0
            while len(tokens) < 15_000:
                completion = await engine.generate(tokens, params)
                assert completion.usage.cached_tokens == max(length - 1, 0) // 64 * 64
                length, last = len(tokens) + 30, tokens
                tokens = [*tokens, *completion.token_ids, *(rng.randrange(3, 160) for _ in range(400))]
            again = await engine.generate(last, params, cache_salt="new")
            assert again.usage.cached_tokens == 0
            assert bits([again]) == bits([completion])

    anyio.run(main)


def test_a_block_recycled_too_early_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(2)
    expected = bits(alone(folder, prompts))
    first_block = WindowBlocks.first_block
    monkeypatch.setattr(WindowBlocks, "first_block", lambda self, at: first_block(self, at + 64))
    monkeypatch.setattr(WindowBlocks, "num_resumable", lambda self, nodes: 0)
    found, _ = answers(folder, prompts, config_of(kv_cache_tokens=1024))
    assert bits(found) != expected
