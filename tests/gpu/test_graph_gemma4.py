"""Models of the kinds of Gemma 4 on CUDA graphs: near the eager executor, and the same bits alone and in a
crowd, in prefix hits, with drafts and without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import pytest
import transformers
from family_zoo import draw_config
from gguf import GGMLQuantizationType as Q
from gguf_files import write_gguf
from hybrid_parity import stacked_and_each
from model_zoo import random_model, save_tokenizer
from msgspec.structs import replace
from quantised_files import write_checkpoint
from safetensors.torch import load_file, save_file

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk.stats import EngineStats
from perf.harness.oracle import KnownAnswers, oracle_drafts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE = 160
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
PREFIX = [3 + (7 * i) % 150 for i in range(256)]
NUM_TOKENS = 40
# In float32, log-probabilities differ by less, and tokens only where two are nearer than that.
NEAR = 1e-3


def saved(kind: str, folder: Path) -> Path:
    return save(config_of(kind), 3, folder)


def config_of(kind: str) -> Any:
    return transformers.Gemma4TextConfig(**KINDS[kind])


def save(config: Any, seed: int, folder: Path) -> Path:
    random_model(transformers.Gemma4ForCausalLM, config, seed=seed).save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def chain_of(number: int, draft: NGram) -> Speculation:
    return Speculation(draft=draft, shape=Chain(number), adaptive=False)


def answers(
    folder: Path, prompts: list[list[int]], *, repeats: int = 1, is_alone: bool = False, **fields: object
) -> tuple[list[Completion], EngineStats]:
    """Answers to all prompts, computed together; of the last repeat. is_alone: one after the other, without
    prefix hits."""
    settings: dict[str, object] = {"max_num_seqs": 4, "max_model_len": 384, "kv_cache_tokens": 8192}
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
@pytest.mark.parametrize(("family", "seed"), DRAWN)
def test_graphs_equal_the_eager_executor_in_float32(
    family: str, seed: int, fast_prompts: bool, tmp_path: Path
) -> None:
    folder, prompts = save(draw_config(family, seed), seed, tmp_path), prompts_of(seed)
    fields: dict[str, object] = {"dtype": "float32", "max_num_seqs": 16}
    expected, _ = answers(folder, prompts, executor="eager", **fields)
    found, stats = answers(folder, prompts, fast_prompts=fast_prompts, **fields)
    assert stats.num_cached_tokens > 0
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            if entry.token_id != wanted.token_id:
                assert abs(entry.logprob - wanted.logprob) < 0.1  # a near tie; what follows differs
                break

            assert entry.logprob == pytest.approx(wanted.logprob, abs=NEAR)


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_as_near_float32_as_the_eager_executor(
    kind: str, fast_prompts: bool, tmp_path: Path
) -> None:
    folder, rng = saved(kind, tmp_path), random.Random(1)
    # Without a common beginning: an expert that is another one there would count in all.
    sequences = [[rng.randrange(3, VOCAB_SIZE) for _ in range(90)] for _ in range(24)]
    expected = scores(folder, sequences, executor="eager", dtype="float32")
    rounded = scores(folder, sequences, executor="eager", dtype="bfloat16")
    found = scores(folder, sequences, executor="graph", dtype="bfloat16", fast_prompts=fast_prompts)

    def error(other: list[float]) -> float:
        return mean(abs(a - b) for a, b in zip(expected, other, strict=True))

    assert len(found) > 1000
    assert error(found) < 1.25 * error(rounded)


def different(found: Sequence[Completion], expected: Sequence[Completion]) -> list[int]:
    """The requests whose tokens or log-probabilities differ."""
    return [
        index
        for index, (one, other) in enumerate(zip(found, expected, strict=True))
        if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs)
    ]


def assert_same_in_crowds(
    folder: Path, prompts: list[list[int]], expected: list[Completion], modes: Sequence[dict[str, object]]
) -> None:
    """Answers in each mode are the expected ones, with prefix hits, and with preemptions and rejected drafts
    in the modes that should have them."""
    for mode in modes:
        found, stats = answers(folder, prompts, repeats=2, **mode)
        assert not different(found, expected), mode
        assert stats.num_cached_tokens > 0
        assert "kv_cache_tokens" not in mode or stats.num_preemptions > 0
        assert "speculation" not in mode or 0 < stats.num_accepted_tokens < stats.num_drafted_tokens


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
    folder, prompts = saved(kind, tmp_path), prompts_of(5)
    expected, _ = answers(folder, prompts, is_alone=True)
    sequences = {
        seed: [*prompt, *one.token_ids]
        for seed, (prompt, one) in enumerate(zip(prompts, expected, strict=True))
    }
    drafts, more = (chain_of(number, NGram()) for number in (3, 7))
    with oracle_drafts(KnownAnswers(sequences, VOCAB_SIZE)):
        modes: list[dict[str, object]] = [
            {"max_num_seqs": 16, "speculation": drafts},
            {"max_num_seqs": 8, "speculation": more, "kv_cache_tokens": 448},
        ]
        assert_same_in_crowds(folder, prompts, expected, modes)
        _, stats = answers(folder, prompts, speculation=drafts)
    assert all(count > 0 for count in stats.speculation.acceptance_histogram)


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
