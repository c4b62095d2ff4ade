"""Models with recurrent layers on CUDA graphs: near the eager executor in float32, and the same bits alone
and in a crowd, from checkpoints, with drafts and without."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import crowds
import pytest
from crowds import (
    PREFIX,
    VOCAB_SIZE,
    answers,
    assert_as_near_float32_as_eager,
    chain_of,
    different,
    prompts_of,
)
from gguf import GGMLQuantizationType as Q
from hybrid_gguf import write_mtp_gguf
from hybrid_parity import stacked_and_each
from hybrid_zoo import make_hybrid_model
from kept_rows import keep_rejected_inputs
from model_zoo import save_tokenizer
from mtp_zoo import add_mtp, make_often_right
from quantised_files import quantise_folder
from safetensors.torch import load_file, save_file

from drift_sdk import NGram

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
UNQUANTISED = (
    "lm_head",
    "embed_tokens",
    "in_proj_a",
    "in_proj_b",  # and in_proj_ba of Qwen3-Next
    "mlp.gate.",
    "shared_expert_gate",
    "mtp.fc",
)
"""Parts of the names of matrices that published files in FP8 have in bfloat16."""

assert_same_in_crowds = partial(crowds.assert_same_in_crowds, hits="num_checkpoint_hits")


def saved(family: str, folder: Path, context: int = 512) -> Path:
    """A model whose heads the kernels compute."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "head_dim": 32}
    sizes["max_position_embeddings"] = context
    make_hybrid_model(family, 1, folder, **sizes, attention_bias=False)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


def saved_with_mtp(family: str, folder: Path) -> Path:
    """A model with an MTP layer whose drafts are often right, and often wrong."""
    add_mtp(saved(family, folder))
    make_often_right(folder)
    return folder


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_are_as_near_float32_as_the_eager_executor(
    family: str, fast_prompts: bool, tmp_path: Path
) -> None:
    folder, sequences = saved(family, tmp_path), prompts_of(1)
    assert_as_near_float32_as_eager(folder, sequences, fast_prompts=fast_prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_changes_no_bit(family: str, tmp_path: Path) -> None:
    """Alone without the prefix cache; then with hits, cut prompts, preemption, and rejected drafts."""
    folder, prompts = saved(family, tmp_path), prompts_of(2)
    expected, _ = answers(folder, prompts, is_alone=True)
    drafts, more = (chain_of(number, NGram(min_length=1)) for number in (3, 7))
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "prefill_token_budget": 40},
        {"max_num_seqs": 8, "kv_cache_tokens": 1200},
        {"max_num_seqs": 16, "speculation": drafts},
        {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 480, "prefill_token_budget": 200},
    ]
    assert_same_in_crowds(folder, prompts, expected, modes)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_the_mtp_layer_change_no_bit(family: str, tmp_path: Path) -> None:
    """Drafts of the model's own layer, alone and with n-grams beside it."""
    folder, prompts = saved_with_mtp(family, tmp_path), prompts_of(4)
    expected, _ = answers(folder, prompts, is_alone=True)
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": chain_of(1, "mtp")},
        {"max_num_seqs": 16, "speculation": chain_of(3, "mtp"), "prefill_token_budget": 40},
        {"max_num_seqs": 16, "speculation": chain_of(3, "mtp", ngrams=NGram(min_length=1))},
        {"max_num_seqs": 8, "speculation": chain_of(5, "mtp"), "kv_cache_tokens": 640},
    ]
    assert_same_in_crowds(folder, prompts, expected, modes)
    found, _ = answers(folder, prompts, is_alone=True, speculation=chain_of(3, "mtp"))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_files_in_fp8_change_no_bit(family: str, tmp_path: Path) -> None:
    """Weights of the model and of its MTP layer in blocks of FP8, as published."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "head_dim": 32, "hidden_size": 160}
    plain, folder, prompts = tmp_path / "plain", tmp_path / "quantised", prompts_of(6)
    make_hybrid_model(family, 1, plain, **sizes, attention_bias=False, tie_word_embeddings=False)
    save_tokenizer(plain, VOCAB_SIZE)
    add_mtp(plain)
    make_often_right(plain)
    if family == "qwen3_5_moe":
        file = plain / "model.safetensors"
        save_file(stacked_and_each(load_file(file))[1], file)
    quantise_folder(plain, folder, ignored=UNQUANTISED)
    expected, _ = answers(folder, prompts, is_alone=True)
    modes: list[dict[str, object]] = [{"max_num_seqs": 16, "speculation": chain_of(3, "mtp")}]
    assert_same_in_crowds(folder, prompts, expected, modes)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_gguf_files_change_no_bit(family: str, tmp_path: Path) -> None:
    """Weights of the model and of its MTP layer in blocks of Q8_0."""
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "head_dim": 32, "hidden_size": 256}
    sizes: dict[str, Any] = {**heads, "intermediate_size": 256, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 2
    sizes |= {"attention_bias": False, "tie_word_embeddings": False}
    if family != "qwen3_5":
        sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
    if family == "qwen3_next":  # whose files have experts in all layers
        sizes |= {"mlp_only_layers": [], "norm_topk_prob": True}
    file, prompts = write_mtp_gguf(family, 1, tmp_path, lambda name: Q.Q8_0, sizes), prompts_of(6)
    expected, _ = answers(file, prompts, is_alone=True, weights="stored")
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": chain_of(3, "mtp"), "weights": "stored"}
    ]
    assert_same_in_crowds(file, prompts, expected, modes)


@pytest.mark.parametrize("family", FAMILIES)
def test_oracle_drafts_change_no_bit(family: str, tmp_path: Path) -> None:
    """Every number of accepted drafts, whatever the model would draft."""
    drafts, more = (chain_of(number, NGram()) for number in (3, 7))
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": drafts},
        {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 640},
    ]
    folder = saved(family, tmp_path)
    crowds.assert_oracle_drafts_change_no_bit(folder, modes, hits="num_checkpoint_hits")


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes_of_every_length_change_no_bit(family: str, tmp_path: Path) -> None:
    """Drafts and prefix cache together give the tokens of neither, at every length modulo 128."""
    folder, rng = saved_with_mtp(family, tmp_path), random.Random(7)
    prompts = [[*PREFIX[: 20 + number], *rng.choices(range(3, VOCAB_SIZE), k=4)] for number in range(128)]
    rng.shuffle(prompts)
    expected, _ = answers(folder, prompts, is_alone=True)
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": chain_of(3, "mtp", ngrams=NGram(min_length=1))}
    ]
    assert_same_in_crowds(folder, prompts, expected, modes)
    found, _ = answers(folder, prompts, **modes[0])
    assert sum(one.usage.cached_tokens > 0 for one in found) > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_the_third_request_with_a_long_prefix_hits(family: str, tmp_path: Path) -> None:
    """The first leaves a border every so many tokens, the second one where it leaves the first."""
    folder, rng = saved(family, tmp_path, 2304), random.Random(8)
    prefix = rng.choices(range(3, VOCAB_SIZE), k=2000)
    prompts = [[*prefix, *rng.choices(range(3, VOCAB_SIZE), k=20)] for _ in range(3)]
    long = {"max_model_len": 2304}
    expected, _ = answers(folder, prompts, is_alone=True, **long)
    found, _ = answers(folder, prompts, max_num_seqs=1, **long)
    assert not different(found, expected)
    assert found[2].usage.cached_tokens >= 1984


def test_a_state_of_other_rows_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders that do not move: rows are added to a state that is too old."""
    folder, prompts = saved("qwen3_5", tmp_path), prompts_of(3)
    expected, _ = answers(folder, prompts, is_alone=True)
    monkeypatch.setattr("drift_sdk.execution.forward.gated_delta.move_borders_of_rows", lambda *_: None)
    found, _ = answers(folder, prompts, is_alone=True)
    assert any(one.token_ids != other.token_ids for one, other in zip(found, expected, strict=True))


def test_a_rejected_row_in_a_state_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts there is none."""
    folder, prompts = saved_with_mtp("qwen3_5", tmp_path), prompts_of(4)
    expected, _ = answers(folder, prompts, is_alone=True)
    keep_rejected_inputs(monkeypatch)
    plain, _ = answers(folder, prompts, is_alone=True)
    found, _ = answers(folder, prompts, is_alone=True, speculation=chain_of(3, "mtp"))
    assert [one.token_ids for one in plain] == [one.token_ids for one in expected]
    assert any(one.token_ids != other.token_ids for one, other in zip(found, expected, strict=True))
