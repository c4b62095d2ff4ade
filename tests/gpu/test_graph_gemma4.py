"""Models of the kinds of Gemma 4 on CUDA graphs: near the eager executor, and the same bits alone and in a
crowd, in prefix hits, with drafts and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from assistant_zoo import make_assistant, make_often_right
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
from gguf import GGMLQuantizationType as Q
from gguf_files import write_gguf
from hybrid_parity import stacked_and_each
from model_zoo import random_model, save_tokenizer
from msgspec.structs import replace
from quantised_files import write_checkpoint
from safetensors.torch import load_file, save_file

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
    return save(config_of(kind), 3, folder)


def config_of(kind: str) -> Any:
    return transformers.Gemma4TextConfig(**KINDS[kind])


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
def test_a_cache_of_e4m3_has_the_bits_of_one_alone(kind: str, tmp_path: Path) -> None:
    """With hits, cut prompts, preemption and rejected drafts."""
    folder, prompts = saved(kind, tmp_path), prompts_of(3)
    expected, _ = answers(folder, prompts, is_alone=True, kv_dtype="fp8")
    assert different(expected, answers(folder, prompts, is_alone=True)[0])
    modes: list[dict[str, object]] = [
        {"kv_dtype": "fp8", "max_num_seqs": 16},
        {"kv_dtype": "fp8", "max_num_seqs": 16, "kv_cache_tokens": 448, "prefill_token_budget": 40},
        {"kv_dtype": "fp8", "max_num_seqs": 16, "speculation": chain_of(3, NGram(min_length=1))},
    ]
    assert_same_in_crowds(folder, prompts, expected, modes)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("12B and 31B", "gguf"), ("26B", "gguf"), ("E2B and E4B", "packed"), ("26B", "fp8, channel")],
)
def test_quantised_files_have_the_bits_of_one_alone(kind: str, form: str, tmp_path: Path) -> None:
    """Weights stay quantised in kernels, but for those of experts' gates."""
    folder, prompts = saved(kind, tmp_path / "plain"), prompts_of(4)
    quantised = tmp_path / "quantised"
    if form == "gguf":
        quantised = tmp_path / "model.gguf"
        write_gguf(random_model(transformers.Gemma4ForCausalLM, config_of(kind), seed=3), quantised, Q.Q4_0)
    else:
        file = folder / "model.safetensors"
        if kind == "26B":
            save_file(stacked_and_each(load_file(file))[1], file)
        ignored = ("embed_tokens", "router.")
        write_checkpoint(folder, form, quantised, tmp_path / "twin", ignored=ignored)
    expected, _ = answers(quantised, prompts, is_alone=True)
    drafts = chain_of(3, NGram(min_length=1))
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "speculation": drafts, "kv_cache_tokens": 448},
    ]
    assert_same_in_crowds(quantised, prompts, expected, modes)


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


def with_assistant(kind: str, folder: Path) -> Path:
    """Save a model and its assistant, whose drafts are often right and often wrong, with clusters where
    published ones have them. Return the assistant's folder."""
    fields = KINDS[kind] | {"tie_word_embeddings": False}  # or most tokens would be followed by themselves
    target = random_model(transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**fields), seed=3)
    target.save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    make_assistant(3, folder / "assistant", target, num_clusters=40 if kind == "E2B and E4B" else 0)
    make_often_right(folder, folder / "assistant")
    return folder / "assistant"


@pytest.mark.parametrize("kind", KINDS)
def test_assistants_change_no_bit(kind: str, tmp_path: Path) -> None:
    """With prefix hits, cut prompts, preemption, blocks of windows, and n-grams beside them."""
    draft, prompts = with_assistant(kind, tmp_path), prompts_of(2)
    expected, _ = answers(tmp_path, prompts, is_alone=True)
    few, more = (chain_of(number, draft) for number in (3, 7))
    both = chain_of(3, draft, ngrams=NGram(min_length=1))
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": few},
        {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 448, "prefill_token_budget": 200},
        {"max_num_seqs": 16, "speculation": both, "prefill_token_budget": 40},
        {"max_num_seqs": 16, "speculation": replace(few, draft_weights="fp8")},
    ]
    assert_same_in_crowds(tmp_path, prompts, expected, modes)
    _, stats = answers(tmp_path, prompts, speculation=few, max_num_seqs=16)
    assert all(count > 0 for count in stats.speculation.acceptance_histogram)


@pytest.mark.parametrize("kind", ["12B and 31B", "E2B and E4B"])
def test_assistants_draft_as_on_the_eager_executor(kind: str, tmp_path: Path) -> None:
    """In float32, where drafts differ in near ties alone."""
    speculation, prompts = chain_of(3, with_assistant(kind, tmp_path)), prompts_of(4)
    accepted = []
    for executor in ("eager", "graph"):
        _, stats = answers(tmp_path, prompts, dtype="float32", executor=executor, speculation=speculation)
        accepted.append(stats.num_accepted_tokens)
    assert accepted[0] > 40
    assert accepted[1] == pytest.approx(accepted[0], rel=0.05)
