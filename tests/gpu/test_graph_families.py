"""Small random models with windows, several rotations, other norms and routers, and gates: graphs against the
eager executor."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest
from model_zoo import make_model, save_tokenizer
from recent_zoo import VOCAB_SIZE, make_recent_model

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Qwen2 and Qwen3 with windows, Mistral, Phi-3, Gemma 3, SmolLM3 and Granite.
MODELS = (26, 27, 28, 29, 30, 31, 32)
# Their seeds: models that scale queries by position within windows, whose layers have experts or none, that
# choose groups of experts and scale weights, and with windows and without rotation by layer.
RECENT = {"ministral3": 4, "mistral3": 0, "qwen3_vl": 0, "qwen3_vl_moe": 4, "glm4_moe": 0, "muse_glimmer": 0}
DRAFTED = (27, 28, 30, "ministral3", "glm4_moe", "muse_glimmer")
NUM_TOKENS = 48
# In float32, log-probabilities differ by less, and tokens only where two are nearer than that.
NEAR = 1e-3


def answers(folder: Path, prompts: list[list[int]], **fields: object) -> list[Completion]:
    """Greedy answers to all prompts, computed together."""
    settings: dict[str, object] = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_tokens": 2048}
    config = EngineConfig(device="cuda", block_size=8, prefill_token_budget=32, **settings | fields)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)

    async def main() -> list[Completion]:
        async with Engine(folder, config) as engine:
            streams = [engine.generate(prompt, params) for prompt in prompts]
            return [await stream for stream in streams]

    return anyio.run(main)


def make(model: int | str, folder: Path) -> tuple[random.Random, range]:
    """Save a model of the zoo by its number, or a recent one by its family. Returns what draws its prompts,
    and the tokens to draw from."""
    if isinstance(model, int):
        make_model(model, folder)
        return random.Random(model), range(3, 300)

    make_recent_model(model, RECENT[model], folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return random.Random(RECENT[model]), range(3, VOCAB_SIZE)


def random_prompts(rng: random.Random, tokens: range) -> list[list[int]]:
    """Prompts shorter and longer than any window; the last two begin alike."""
    shared = rng.choices(tokens, k=40)
    return [rng.choices(tokens, k=length) for length in (1, 19)] + [shared, [*shared, 5, 6]]


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize("model", [*MODELS, *RECENT])
def test_graphs_equal_the_eager_executor(model: int | str, fast_prompts: bool, tmp_path: Path) -> None:
    prompts = random_prompts(*make(model, tmp_path))
    expected = answers(tmp_path, prompts, executor="eager", dtype="float32")
    found = answers(tmp_path, prompts, executor="graph", dtype="float32", fast_prompts=fast_prompts)
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            if entry.token_id != wanted.token_id:
                (_, best), (_, second) = wanted.top
                assert best - second < NEAR
                break  # the texts after it have nothing in common

            assert entry.logprob == pytest.approx(wanted.logprob, abs=NEAR)


@pytest.mark.parametrize("model", DRAFTED)
def test_drafts_change_no_bit(model: int | str, tmp_path: Path) -> None:
    """Rows that are verified together see other keys than each other, and go to other experts; bfloat16, to
    the last bit."""
    rng, tokens = make(model, tmp_path)
    prompts = [rng.choices(tokens, k=7) * 5, *random_prompts(rng, tokens)]
    fields = {"executor": "graph", "dtype": "bfloat16"}
    plain = answers(tmp_path, prompts, **fields)
    speculation = Speculation(draft=NGram(min_length=1), shape=Chain(4), adaptive=False)
    drafted = answers(tmp_path, prompts, speculation=speculation, **fields)
    assert sum(one.speculation.num_drafted for one in drafted if one.speculation is not None) > 0
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
