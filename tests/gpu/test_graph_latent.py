"""Models with latent attention on CUDA graphs: the tokens of the eager executor in float32, and the same bits
alone and in a crowd, with drafts and without."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest
from draft_zoo import make_draft
from family_zoo import draw_model
from model_zoo import save_tokenizer
from mtp_zoo import make_mtp_model, make_often_right
from quantised_files import quantise_folder

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk.stats import EngineStats
from perf.harness.oracle import KnownAnswers, oracle_drafts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE = 160
MODELS = [(family, seed) for family in ("glm4_moe_lite", "deepseek_v3") for seed in range(4)]
"""With queries that have a latent and those that have none, with YaRN, and groups of experts."""
WIDE = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80, "kv_lora_rank": 512}
WIDE |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 48, "v_head_dim": 40, "q_lora_rank": 96}
"""Latents of published sizes."""
PREFIX = [3 + (7 * i) % 150 for i in range(256)]
NUM_TOKENS = 40
NEAR = 1e-3
"""In float32, log-probabilities differ by less, and tokens only where two are nearer than that."""


def saved(family: str, seed: int, folder: Path, **sizes: object) -> Path:
    draw_model(family, seed, **sizes).save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


def answers(
    folder: Path, prompts: list[list[int]], *, repeats: int = 1, is_alone: bool = False, **fields: object
) -> tuple[list[Completion], EngineStats]:
    """Answers to all prompts, computed together; of the last repeat. is_alone: one after the other, without
    prefix hits."""
    settings: dict[str, object] = {"max_num_seqs": 4, "max_model_len": 384, "kv_cache_tokens": 4096}
    settings |= {"dtype": "bfloat16", "executor": "graph", "prefill_token_budget": 96, "block_size": 16}
    if is_alone:
        settings["max_num_seqs"] = 1
    config = EngineConfig(device="cuda", **settings | fields)
    is_greedy = config.dtype == "float32"

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=2,
            temperature=0.0 if is_greedy or index % 2 else 0.7,
            seed=index,
            cache_salt=str(index) if is_alone else None,
        )

    async def main() -> tuple[list[Completion], EngineStats]:
        async with Engine(folder, config) as engine:
            for _ in range(repeats):
                streams = [engine.generate(prompt, params(index)) for index, prompt in enumerate(prompts)]
                found = [await stream for stream in streams]
            return found, engine.stats()

    return anyio.run(main)


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths, some of which repeat themselves."""
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(number)]

    shared = [0, 0, 1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 250, 256]
    return [PREFIX[:length] + tokens(rng.randint(1, 50)) for length in shared] + [tokens(6) * 6, tokens(70)]


@pytest.mark.parametrize(("family", "seed"), MODELS)
def test_graphs_equal_the_eager_executor(family: str, seed: int, tmp_path: Path) -> None:
    folder, prompts = saved(family, seed, tmp_path), prompts_of(1)[:10]
    expected, _ = answers(folder, prompts, executor="eager", dtype="float32")
    found, _ = answers(folder, prompts, dtype="float32")
    num_equal = 0
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            if entry.token_id != wanted.token_id:
                (_, best), (_, second) = wanted.top
                assert best - second < NEAR
                break  # the texts after it have nothing in common

            assert entry.logprob == pytest.approx(wanted.logprob, abs=NEAR)
            num_equal += 1
    assert num_equal > 0.9 * len(prompts) * NUM_TOKENS


def assert_same_in_crowds(
    folder: Path, prompts: list[list[int]], expected: list[Completion], modes: list[dict[str, object]]
) -> None:
    """Answers in each mode are the expected ones, with prefix hits, and with preemptions and rejected drafts
    in the modes that should have them."""
    for mode in modes:
        found, stats = answers(folder, prompts, repeats=2, **mode)
        different = [
            index
            for index, (one, other) in enumerate(zip(found, expected, strict=True))
            if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs)
        ]
        assert not different, f"{mode}: requests {different}"
        assert sum(one.usage.cached_tokens for one in found) > 0
        assert "kv_cache_tokens" not in mode or stats.num_preemptions > 0
        assert "speculation" not in mode or 0 < stats.num_accepted_tokens < stats.num_drafted_tokens


def chain_of(number: int, draft: Path | str | NGram, **fields: NGram) -> Speculation:
    return Speculation(draft=draft, shape=Chain(number), adaptive=False, **fields)


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
    folder, prompts = saved("glm4_moe_lite", 1, tmp_path, **WIDE), prompts_of(5)
    expected, _ = answers(folder, prompts, is_alone=True)
    sequences = {
        seed: [*prompt, *one.token_ids]
        for seed, (prompt, one) in enumerate(zip(prompts, expected, strict=True))
    }
    drafts = chain_of(3, NGram())
    with oracle_drafts(KnownAnswers(sequences, VOCAB_SIZE)):
        mode: dict[str, object] = {"max_num_seqs": 16, "speculation": drafts}
        assert_same_in_crowds(folder, prompts, expected, [mode])
        _, stats = answers(folder, prompts, speculation=drafts)
    assert all(count > 0 for count in stats.speculation.acceptance_histogram)


def test_an_eagle_head_changes_no_bit(tmp_path: Path) -> None:
    three = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    folder, prompts = saved("glm4_moe_lite", 9, tmp_path / "model", **three), prompts_of(3)
    make_draft("reference", tmp_path / "draft", folder)
    expected, _ = answers(folder, prompts, is_alone=True)
    found, stats = answers(folder, prompts, max_num_seqs=16, speculation=chain_of(3, tmp_path / "draft"))
    assert stats.num_drafted_tokens > 0
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


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
