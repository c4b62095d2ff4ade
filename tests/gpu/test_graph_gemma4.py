"""Models of the kinds of Gemma 4 on CUDA graphs: near the eager executor, and the same bits alone and in a
crowd, in prefix hits, with drafts and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from crowds import (
    VOCAB_SIZE,
    answers,
    assert_as_near_float32_as_eager,
    assert_near,
    assert_oracle_drafts_change_no_bit,
    assert_same_in_crowds,
    chain_of,
    different,
    prompts_of,
)
from family_zoo import draw_config
from model_zoo import random_model, save_tokenizer
from msgspec.structs import replace

from drift_sdk import NGram
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.softmax import Partitions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 15.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
INPUTS = {
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
KINDS = {
    "12B and 31B": COMMON,
    "26B": COMMON | EXPERTS | {"experts_implementation": "eager"},
    "E2B and E4B": COMMON | INPUTS,
    "wide heads": COMMON | {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 8},
}
DRAWN = [("gemma4", seed) for seed in (0, 1, 2, 4)] + [("gemma4 experts", seed) for seed in (0, 1)]
"""Models with drawn shapes and options, of which some have inputs of layers and keys of others."""


def saved(kind: str, folder: Path) -> Path:
    config = transformers.Gemma4TextConfig(**KINDS[kind])
    return save(config, 3, folder)


def save(config: Any, seed: int, folder: Path) -> Path:
    random_model(transformers.Gemma4ForCausalLM, config, seed=seed).save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize(("family", "seed"), DRAWN)
def test_graphs_equal_the_eager_executor_in_float32(
    family: str, seed: int, fast_prompts: bool, tmp_path: Path
) -> None:
    folder, prompts = save(draw_config(family, seed), seed, tmp_path), prompts_of(seed)
    fields: dict[str, object] = {"dtype": "float32", "max_num_seqs": 16}
    expected, _ = answers(folder, prompts, executor="eager", **fields)
    found, stats = answers(folder, prompts, fast_prompts=fast_prompts, **fields)
    assert stats.num_cached_tokens > 0
    assert_near(found, expected)


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_as_near_float32_as_the_eager_executor(
    kind: str, fast_prompts: bool, tmp_path: Path
) -> None:
    folder, rng = saved(kind, tmp_path), random.Random(1)
    # Without a common beginning: an expert that is another one there would count in all.
    sequences = [[rng.randrange(3, VOCAB_SIZE) for _ in range(90)] for _ in range(24)]
    assert_as_near_float32_as_eager(folder, sequences, fast_prompts=fast_prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_changes_no_bit(kind: str, tmp_path: Path) -> None:
    """Alone without the prefix cache; then with hits, cut prompts, preemption, and rejected drafts. Of wide
    heads, eight rows are two tiles of query rows for each KV head."""
    folder, prompts = saved(kind, tmp_path), prompts_of(2)
    expected, _ = answers(folder, prompts, is_alone=True)
    drafts, more = (chain_of(number, NGram(min_length=1)) for number in (3, 7))
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "prefill_token_budget": 40},
        {"max_num_seqs": 16, "prefill_token_budget": 1024},
        {"max_num_seqs": 16, "kv_cache_tokens": 448},
        {"max_num_seqs": 16, "speculation": drafts},
        {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 448, "prefill_token_budget": 200},
    ]
    assert_same_in_crowds(folder, prompts, expected, modes)


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_drafts_change_no_bit(kind: str, tmp_path: Path) -> None:
    """Every number of accepted drafts, whatever the model would draft."""
    drafts, more = (chain_of(number, NGram()) for number in (3, 7))
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": drafts},
        {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 448},
    ]
    assert_oracle_drafts_change_no_bit(saved(kind, tmp_path), modes)


def test_prompts_in_another_order_of_summation_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption computes rows as prompts that were decoded."""
    folder, prompts = saved("wide heads", tmp_path), prompts_of(2)

    def narrower(layer: LayerAttention) -> Partitions:
        return replace(Partitions.of_layer(layer.head_dim, layer.window), narrow=64)

    monkeypatch.setattr(LayerAttention, "partitions", property(narrower))
    expected, _ = answers(folder, prompts, is_alone=True)
    found, stats = answers(folder, prompts, max_num_seqs=16, kv_cache_tokens=448)
    assert stats.num_preemptions > 0
    assert different(found, expected)
