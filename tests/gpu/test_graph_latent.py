"""Models with latent attention on CUDA graphs: the tokens of the eager executor in float32, and the same bits
alone and in a crowd, with drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from crowds import (
    VOCAB_SIZE,
    answers,
    assert_near,
    assert_oracle_drafts_change_no_bit,
    assert_same_in_crowds,
    chain_of,
    different,
    prompts_of,
)
from draft_zoo import make_draft
from family_zoo import draw_model
from model_zoo import save_tokenizer
from mtp_zoo import make_mtp_model, make_often_right
from quantised_files import quantise_folder

from drift_sdk import NGram
from drift_sdk.scheduling import planning

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MODELS = [(family, seed) for family in ("glm4_moe_lite", "deepseek_v3") for seed in range(4)]
"""With queries that have a latent and those that have none, with YaRN, and groups of experts."""
WIDE = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80, "kv_lora_rank": 512}
WIDE |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 48, "v_head_dim": 40, "q_lora_rank": 96}
"""Latents of published sizes."""
SQUARE = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64, "kv_lora_rank": 32}
PUBLISHED = WIDE | {"qk_nope_head_dim": 192, "v_head_dim": 256}
"""With keys and values of one size, so that prompts are expanded."""


def saved(family: str, seed: int, folder: Path, **sizes: object) -> Path:
    draw_model(family, seed, **sizes).save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_graphs_equal_the_eager_executor(family: str, seed: int, tmp_path: Path) -> None:
    folder, prompts = saved(family, seed, tmp_path), prompts_of(1)[:10]
    expected, _ = answers(folder, prompts, executor="eager", dtype="float32")
    found, _ = answers(folder, prompts, dtype="float32")
    assert_near(found, expected)


@pytest.mark.parametrize(
    ("family", "seed", "sizes"),
    [
        ("glm4_moe_lite", 1, {}),
        ("deepseek_v3", 0, {"qk_rope_head_dim": 8}),
        ("deepseek_v2", 0, {}),
        ("glm4_moe_lite", 1, WIDE),
    ],
    ids=("glm", "v3", "v2", "wide"),
)
def test_a_crowd_changes_no_bit(family: str, seed: int, sizes: dict[str, int], tmp_path: Path) -> None:
    """Alone without the prefix cache; then with hits, cut prompts, preemption, and rejected drafts."""
    folder, prompts = saved(family, seed, tmp_path, **sizes), prompts_of(2)
    expected, _ = answers(folder, prompts, is_alone=True)
    drafts, more = (chain_of(number, NGram(min_length=1)) for number in (3, 7))
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "prefill_token_budget": 40},
        {"max_num_seqs": 16, "kv_cache_tokens": 640},
        {"max_num_seqs": 16, "speculation": drafts},
        {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 480, "prefill_token_budget": 200},
    ]
    assert_same_in_crowds(folder, prompts, expected, modes)


@pytest.mark.parametrize("sizes", [SQUARE, PUBLISHED], ids=("small", "published"))
def test_a_crowd_changes_no_bit_of_expanded_prompts(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above. Some prompts begin with another one and its answer, which were computed in two forms."""
    monkeypatch.setattr(planning, "MIN_EXPANDED_PROMPT", 40)
    monkeypatch.setattr(planning, "EXPANDED_BORDER", 8)
    make_mtp_model("glm4_moe_lite", 1, tmp_path, **sizes)
    make_often_right(tmp_path)
    prompts = prompts_of(8)
    first, _ = answers(tmp_path, prompts, is_alone=True)
    prompts += [
        [*prompt, *one.token_ids[: 9 + 4 * index], 5, index]
        for index, (prompt, one) in enumerate(zip(prompts[:6], first, strict=False))
    ]
    expected, _ = answers(tmp_path, prompts, is_alone=True)
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 8},
        {"max_num_seqs": 16, "prefill_token_budget": 40},
        {"max_num_seqs": 16, "kv_cache_tokens": 640},
        {"max_num_seqs": 16, "speculation": chain_of(3, NGram(min_length=1))},
        {"max_num_seqs": 8, "speculation": chain_of(3, "mtp"), "kv_cache_tokens": 640},
    ]
    assert_same_in_crowds(tmp_path, prompts, expected, modes)
    monkeypatch.setattr(planning, "MIN_EXPANDED_PROMPT", 1000)
    absorbed, _ = answers(tmp_path, prompts, is_alone=True)
    assert [one.logprobs for one in absorbed] != [one.logprobs for one in expected]


@pytest.mark.parametrize("sizes", [{"qk_rope_head_dim": 16, "kv_lora_rank": 32}, WIDE], ids=("small", "wide"))
def test_a_crowd_changes_no_bit_of_latents_in_fp8(sizes: dict[str, int], tmp_path: Path) -> None:
    """As above, with the model's own drafts too. Tokens are others than those of a cache in bfloat16."""
    make_mtp_model("glm4_moe_lite", 1, tmp_path, **sizes)
    make_often_right(tmp_path)
    prompts = prompts_of(7)
    expected, stats = answers(tmp_path, prompts, is_alone=True, kv_dtype="fp8")
    plain, others = answers(tmp_path, prompts, is_alone=True)
    assert [one.token_ids for one in plain] != [one.token_ids for one in expected]
    assert (stats.kv_dtype, others.kv_dtype) == ("fp8", "bfloat16")
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "prefill_token_budget": 40},
        {"max_num_seqs": 16, "kv_cache_tokens": 640},
        {"max_num_seqs": 16, "speculation": chain_of(3, NGram(min_length=1))},
        {"max_num_seqs": 8, "speculation": chain_of(3, "mtp"), "kv_cache_tokens": 640},
    ]
    assert_same_in_crowds(tmp_path, prompts, expected, [mode | {"kv_dtype": "fp8"} for mode in modes])


def test_oracle_drafts_change_no_bit(tmp_path: Path) -> None:
    """Every number of accepted drafts, whatever the model would draft."""
    folder = saved("glm4_moe_lite", 1, tmp_path, **WIDE)
    assert_oracle_drafts_change_no_bit(folder, [{"max_num_seqs": 16, "speculation": chain_of(3, NGram())}])


def test_an_eagle_head_changes_no_bit(tmp_path: Path) -> None:
    three = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    folder, prompts = saved("glm4_moe_lite", 9, tmp_path / "model", **three), prompts_of(3)
    make_draft("reference", tmp_path / "draft", folder)
    expected, _ = answers(folder, prompts, is_alone=True)
    found, stats = answers(folder, prompts, max_num_seqs=16, speculation=chain_of(3, tmp_path / "draft"))
    assert stats.num_drafted_tokens > 0
    assert not different(found, expected)


@pytest.mark.parametrize(
    ("family", "seed", "sizes"),
    [("glm4_moe_lite", 1, {}), ("deepseek_v3", 0, {"qk_rope_head_dim": 8}), ("glm4_moe_lite", 1, WIDE)],
    ids=("glm", "v3", "wide"),
)
def test_drafts_of_the_mtp_layer_change_no_bit(
    family: str, seed: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Drafts of the model's own layer, alone and with n-grams beside it."""
    make_mtp_model(family, seed, tmp_path, **sizes)
    make_often_right(tmp_path)
    prompts = prompts_of(4)
    expected, _ = answers(tmp_path, prompts, is_alone=True)
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": chain_of(1, "mtp")},
        {"max_num_seqs": 16, "speculation": chain_of(3, "mtp"), "prefill_token_budget": 40},
        {"max_num_seqs": 16, "speculation": chain_of(3, "mtp", ngrams=NGram(min_length=1))},
        {"max_num_seqs": 8, "speculation": chain_of(5, "mtp"), "kv_cache_tokens": 640},
    ]
    assert_same_in_crowds(tmp_path, prompts, expected, modes)
    found, _ = answers(tmp_path, prompts, is_alone=True, speculation=chain_of(3, "mtp"))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_both_executors_draft_alike(tmp_path: Path) -> None:
    """In float32 as many drafts are accepted, but for near ties."""
    make_mtp_model("deepseek_v3", 0, tmp_path, qk_rope_head_dim=8)
    make_often_right(tmp_path)
    prompts, drafts = prompts_of(3), chain_of(3, "mtp")
    shares = []
    for executor in ("eager", "graph"):
        _, stats = answers(tmp_path, prompts, executor=executor, dtype="float32", speculation=drafts)
        shares.append(stats.num_accepted_tokens / stats.num_drafted_tokens)
    assert 0.05 < shares[0] == pytest.approx(shares[1], abs=0.01)


def test_drafts_of_files_in_fp8_change_no_bit(tmp_path: Path) -> None:
    """Weights of the model and of its MTP layer in blocks of FP8, as published."""
    plain, folder, prompts = tmp_path / "plain", tmp_path / "quantised", prompts_of(6)
    sizes = WIDE | {"hidden_size": 160, "moe_intermediate_size": 136, "intermediate_size": 144}
    make_mtp_model("glm4_moe_lite", 1, plain, **sizes, tie_word_embeddings=False)
    make_often_right(plain)
    quantise_folder(plain, folder, ignored=("lm_head", "embed_tokens", "mlp.gate.", "eh_proj", "shared_head"))
    expected, _ = answers(folder, prompts, is_alone=True, weights="stored")
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": chain_of(3, "mtp"), "weights": "stored"}
    ]
    assert_same_in_crowds(folder, prompts, expected, modes)
