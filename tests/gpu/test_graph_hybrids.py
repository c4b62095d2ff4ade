"""Models with recurrent layers on CUDA graphs: near the eager executor in float32, and the same bits alone
and in a crowd, from checkpoints, with drafts and without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import anyio
import pytest
from hybrid_parity import stacked_and_each
from hybrid_zoo import make_hybrid_model
from kept_rows import keep_rejected_inputs
from model_zoo import save_tokenizer
from mtp_zoo import add_mtp, make_often_right
from quantised_files import quantise_folder
from safetensors.torch import load_file, save_file

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk.stats import EngineStats
from perf.harness.oracle import KnownAnswers, oracle_drafts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE = 160
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
PREFIX = [3 + (7 * i) % 150 for i in range(256)]
NUM_TOKENS = 40
UNQUANTISED = (
    "lm_head",
    "embed_tokens",
    "in_proj_a",
    "in_proj_b",
    "mlp.gate.",
    "shared_expert_gate",
    "mtp.fc",
)
"""Parts of the names of matrices that published files in FP8 have in bfloat16."""


def saved(family: str, folder: Path) -> Path:
    """A model whose heads the kernels compute."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "head_dim": 32}
    make_hybrid_model(family, 1, folder, **sizes, attention_bias=False)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


def saved_with_mtp(family: str, folder: Path) -> Path:
    """A model with an MTP layer whose drafts are often right, and often wrong."""
    add_mtp(saved(family, folder))
    make_often_right(folder)
    return folder


def chain_of(number: int, draft: str | NGram, **fields: NGram) -> Speculation:
    return Speculation(draft=draft, shape=Chain(number), adaptive=False, **fields)


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

    def params(index: int) -> SamplingParams:
        temperature = 0.0 if index % 2 else 0.7
        return SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=1,
            temperature=temperature,
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


def scores(folder: Path, sequences: list[list[int]], **fields: object) -> list[float]:
    """Log-probabilities of all tokens of prompts."""
    settings: dict[str, object] = {"max_num_seqs": 4, "max_model_len": 384, "kv_cache_tokens": 4096}
    config = EngineConfig(device="cuda", prefill_token_budget=96, block_size=16, **settings | fields)
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)

    async def main() -> list[float]:
        found = []
        async with Engine(folder, config) as engine:
            for sequence in sequences:
                completion = await engine.generate(sequence, params)
                found += [entry.logprob for entry in completion.prompt_logprobs or () if entry is not None]
        return found

    return anyio.run(main)


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_are_as_near_float32_as_the_eager_executor(
    family: str, fast_prompts: bool, tmp_path: Path
) -> None:
    folder, sequences = saved(family, tmp_path), prompts_of(1)
    expected = scores(folder, sequences, executor="eager", dtype="float32")
    rounded = scores(folder, sequences, executor="eager", dtype="bfloat16")
    found = scores(folder, sequences, executor="graph", dtype="bfloat16", fast_prompts=fast_prompts)

    def error(other: list[float]) -> float:
        return mean(abs(a - b) for a, b in zip(expected, other, strict=True))

    assert len(found) > 1000
    assert error(found) < 1.25 * error(rounded)


def assert_same_in_crowds(
    folder: Path, prompts: list[list[int]], expected: list[Completion], modes: Sequence[dict[str, object]]
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
        assert stats.num_checkpoint_hits > 0
        assert "kv_cache_tokens" not in mode or stats.num_preemptions > 0
        assert "speculation" not in mode or 0 < stats.num_accepted_tokens < stats.num_drafted_tokens


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
def test_oracle_drafts_change_no_bit(family: str, tmp_path: Path) -> None:
    """Every number of accepted drafts, whatever the model would draft."""
    folder, prompts = saved(family, tmp_path), prompts_of(5)
    expected, _ = answers(folder, prompts, is_alone=True)
    sequences = {
        seed: [*prompt, *one.token_ids]
        for seed, (prompt, one) in enumerate(zip(prompts, expected, strict=True))
    }
    drafts, more = (chain_of(number, NGram()) for number in (3, 7))
    with oracle_drafts(KnownAnswers(sequences, VOCAB_SIZE)):
        assert_same_in_crowds(
            folder,
            prompts,
            expected,
            [
                {"max_num_seqs": 16, "speculation": drafts},
                {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 640},
            ],
        )
        _, stats = answers(folder, prompts, speculation=drafts)
    assert all(count > 0 for count in stats.speculation.acceptance_histogram)


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
