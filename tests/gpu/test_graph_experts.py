"""Models with experts in graphs: transformers' tokens in float32, and in bfloat16 the same bits in a batch,
with drafts and for any chunks as alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import anyio
import pytest
from expert_cases import LOGPROB_BOUND, NUM_TOKENS, clear_cases, make_folder
from expert_zoo import EXPERT_MODELS
from model_zoo import save_tokenizer

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE = 1000
MEDIUM: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": MEDIUM
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3_moe": MEDIUM
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "norm_topk_prob": True,
    },
}


DRAFT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": 320,
    "intermediate_size": 2880,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
"""An EAGLE-3 head but for its hidden size, which is that of its target."""


def graph_config(**fields: Any) -> EngineConfig:
    return EngineConfig(device="cuda", executor="graph", **fields)


def chain(draft: NGram | Path) -> Speculation:
    return Speculation(draft=draft, shape=Chain(3), adaptive=False)


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize("name", [*EXPERT_MODELS, "mxfp4"])
def test_tokens_equal_transformers_in_float32(name: str, fast_prompts: bool, tmp_path: Path) -> None:
    model, folder = make_folder(name, tmp_path)
    cases = clear_cases(model)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    config = graph_config(
        dtype="float32",
        max_num_seqs=4,
        max_model_len=256,
        kv_cache_tokens=2048,
        prefill_token_budget=32,
        block_size=8,
        fast_prompts=fast_prompts,
    )

    async def main() -> None:
        async with Engine(folder, config) as engine:
            streams = [engine.generate(prompt, params) for prompt, _, _ in cases]
            for stream, (_, tokens, logprobs) in zip(streams, cases, strict=True):
                completion = await stream
                assert list(completion.token_ids) == tokens
                for entry, logprob in zip(completion.logprobs, logprobs, strict=True):
                    assert abs(entry.logprob - logprob) < LOGPROB_BOUND

    anyio.run(main)


@pytest.mark.parametrize("weights", ["fp8", "int4", "nvfp4"])
def test_quantised_experts_have_the_tokens_of_their_numbers(weights: Any, tmp_path: Path) -> None:
    """In float32, those of the eager executor, which multiplies by the numbers, up to a near tie of tokens.
    A row has all experts, so that their choice has none."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3_moe"] | sizes))
    save_tokenizer(tmp_path, VOCAB_SIZE)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 70)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)

    async def answers(executor: Any) -> list[Completion]:
        config = EngineConfig(
            device="cuda",
            executor=executor,
            dtype="float32",
            weights=weights,
            load="random",
            max_model_len=256,
        )
        async with Engine(tmp_path, config) as engine:
            streams = [engine.generate(prompt, params) for prompt in prompts]
            return [await stream for stream in streams]

    async def main() -> None:
        num_compared = 0
        for found, expected in zip(await answers("graph"), await answers("eager"), strict=True):
            for one, other in zip(found.logprobs, expected.logprobs, strict=True):
                (_, best), (_, second) = other.top
                if best - second < 2 * LOGPROB_BOUND:
                    break
                assert one.token_id == other.token_id
                assert abs(one.logprob - other.logprob) < LOGPROB_BOUND
                num_compared += 1
        assert num_compared > 24

    anyio.run(main)


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, None) for name in SHAPES), ("qwen3_moe", "fp8"), ("qwen3_moe", "int4")]
)
def test_bits_do_not_depend_on_other_requests_or_drafts(name: str, weights: Any, tmp_path: Path) -> None:
    """With the shapes of gpt-oss-20b and Qwen3-30B-A3B, and prompts longer than the window of gpt-oss."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    save_tokenizer(tmp_path, VOCAB_SIZE)
    rng = random.Random(3)
    cases = []
    for index in range(24):
        half = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 8, 20, 65, 110)))]
        params = SamplingParams(
            max_tokens=40, ignore_eos=True, seed=index, logprobs=1, temperature=0.8 * (index % 2)
        )
        cases.append((half * 2, params))

    async def answers(together: bool, **fields: Any) -> list[Completion]:
        config = graph_config(
            load="random",
            dtype="bfloat16",
            max_model_len=512,
            kv_cache_tokens=32_768,
            weights=weights,
            **fields,
        )
        async with Engine(tmp_path, config) as engine:
            if not together:
                return [await engine.generate(*case) for case in cases]

            streams = [engine.generate(*case) for case in cases]
            return [await stream for stream in streams]

    async def main() -> None:
        expected = await answers(False, max_num_seqs=1)
        head = tmp_path / "draft"
        head.mkdir()
        (head / "config.json").write_text(json.dumps(DRAFT | {"hidden_size": SHAPES[name]["hidden_size"]}))
        for fields in (
            {"prefill_token_budget": 512},
            {"prefill_token_budget": 64, "max_num_seqs": 7, "speculation": chain(NGram(min_length=1))},
            {"prefill_token_budget": 512, "max_num_seqs": 5, "speculation": chain(head)},
        ):
            for found, alone in zip(await answers(True, **fields), expected, strict=True):
                assert found.token_ids == alone.token_ids
                assert found.logprobs == alone.logprobs

    anyio.run(main)
