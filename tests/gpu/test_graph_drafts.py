"""Small models, heads that draft in one pass, and n-grams beside drafts do not change a bit of the output, of
a real model in bfloat16, and of small random ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import crowds
import pytest
import smollm2
import torch
from dflash_zoo import make_dflash
from family_zoo import draw_model
from hybrid_zoo import make_hybrid_model
from model_zoo import save_tokenizer
from safetensors.torch import save_file

from drift_sdk import Chain, Completion, Engine, EngineConfig, EngineStats, NGram, SamplingParams, Speculation
from drift_sdk.execution.drafter_factory import DFlashDrafterFactory
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.rounds.dflash import DFlashRoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.dflash import DFlashConfig, dflash_shapes
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import required_shapes
from perf.harness.oracle import KnownAnswers, OracleRoundDrafter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS, BATCH, NUM_DRAFTS = 300, 12, 4
SHARED = "<|im_start|>system\nYou answer at length, and repeat the question first.<|im_end|>\n"
TASKS = (
    "Repeat this list word for word, five times: red, green, blue, yellow, violet, black, white.",
    "Write a for loop in Python that prints the numbers from one to ten, then the same in C and Java.",
    "Tell me a story of an old harbour.",
)


def save_random_head(folder: Path, **options: int) -> Path:
    """An EAGLE-3 or P-EAGLE head of the model, with random weights. options: settings of its config."""
    target = resolve(smollm2.path()).config
    settings = target | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1} | options
    settings["draft_vocab_size"] = settings["vocab_size"]
    settings.pop("quantization_config", None)
    config = DraftConfig.from_hf(settings, read_spec(target))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in required_shapes(config).items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def save_random_dflash(folder: Path) -> Path:
    """A DFlash head of the model with seven masks, with random weights: its first layer and its last have
    windows, and rows see those after them."""
    target = resolve(smollm2.path()).config
    settings = target | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 200,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 14, 28], "causal": False},
    }
    settings.pop("quantization_config", None)
    config = DFlashConfig.from_hf(settings, read_spec(target))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in dflash_shapes(config, has_tables=False).items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def answers(speculation: Speculation | None) -> tuple[list[Completion], EngineStats]:
    """Requests of which half are greedy, that are more than the slots, and of which one is cancelled."""
    config = EngineConfig(
        device="cuda",
        executor="graph",
        dtype="bfloat16",
        max_num_seqs=8,
        max_model_len=1024,
        kv_cache_tokens=4096,  # so few that sequences are preempted
        speculation=speculation,
    )
    rng = random.Random(5)

    async def main() -> tuple[list[Completion], EngineStats]:
        async with Engine(smollm2.path(), config) as engine:
            streams = [
                engine.generate(
                    f"{SHARED}<|im_start|>user\n{TASKS[index % 3]} ({index})<|im_end|>\n"
                    "<|im_start|>assistant\n",
                    SamplingParams(
                        max_tokens=rng.randint(NUM_TOKENS // 2, NUM_TOKENS),
                        ignore_eos=True,
                        seed=index,
                        logprobs=0,
                        temperature=index % 2,
                        stop_token_ids=(17,) if index % 5 == 4 else (),
                    ),
                )
                for index in range(BATCH)
            ]
            other = engine.generate("Once upon a time", SamplingParams(max_tokens=400))
            async with other as stream:
                async for _ in stream:
                    break
            return [await stream for stream in streams], engine.stats()

    return anyio.run(main)


KINDS = ("itself", "itself and ngrams", "head and ngrams", "masks and ngrams", "dflash and ngrams")


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_change_the_output(kind: str, tmp_path: Path) -> None:
    plain, _ = answers(None)
    heads: dict[str, dict[str, int]] = {"head and ngrams": {}, "masks and ngrams": {"mask_token_id": 2}}
    draft = save_random_head(tmp_path, **heads[kind]) if kind in heads else smollm2.path()
    if kind == "dflash and ngrams":
        draft = save_random_dflash(tmp_path)
    ngrams = NGram() if kind.endswith("and ngrams") else None
    speculation = Speculation(draft=draft, ngrams=ngrams, shape=Chain(NUM_DRAFTS), adaptive=False)
    found, stats = answers(speculation)
    for one, other in zip(found, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    counts = stats.speculation
    print(kind, counts, stats.num_preemptions)  # noqa: T201 - shown on failure, or with -s
    assert counts.num_rounds > 100
    assert (counts.num_ngram_rounds > 0) == (ngrams is not None)
    if kind == "itself":
        # Drafts can differ from the model only because prompts are computed by other kernels.
        assert counts.num_accepted > 0.8 * counts.num_drafted
    else:
        assert 0 < counts.num_ngram_accepted <= counts.num_ngram_drafted


class OracleMasks:
    """A `RoundDrafter` that drafts from known answers, in the place of a DFlash head that computes all its
    drafts nevertheless."""

    is_ngram = None

    def __init__(self, head: DFlashRoundDrafter, oracle: OracleRoundDrafter) -> None:
        self._head, self._oracle = head, oracle
        self.aux_layers, self.kv_cache = head.aux_layers, head.kv_cache
        self.draft_extend, self.draft_extend_prefill = head.draft_extend, head.draft_extend_prefill

    def propose(self, rows: Rows, **sizes: int) -> None:
        self._head.propose(rows, **sizes)
        self._oracle.propose(rows, **sizes)


def save_target(family: str, folder: Path) -> Path:
    """A small model, and in the folder "head" a DFlash head for it."""
    if family == "qwen3_5":
        sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "head_dim": 32}
        make_hybrid_model(family, 1, folder, **sizes, attention_bias=False)
    else:
        draw_model(family, 1, hidden_size=64, head_dim=16).save_pretrained(folder)
    save_tokenizer(folder, crowds.VOCAB_SIZE)
    make_dflash(DFLASH_SEEDS[family], folder / "head", folder)
    return folder


DFLASH_SEEDS = {"qwen3": 0, "qwen3_5": 3}
"""Heads with four masks, of which each sees the others: without windows, and with them."""


@pytest.mark.parametrize("family", DFLASH_SEEDS)
def test_drafts_of_a_dflash_head_change_no_bit(family: str, tmp_path: Path) -> None:
    """In crowds with prefix hits, cut prompts and preemption; then with every number of accepted drafts."""
    folder, prompts = save_target(family, tmp_path), crowds.prompts_of(6)
    head = folder / "head"
    expected, _ = crowds.answers(folder, prompts, is_alone=True)
    modes: list[dict[str, object]] = [
        {"max_num_seqs": 16, "speculation": crowds.chain_of(4, head)},
        {"max_num_seqs": 16, "speculation": crowds.chain_of(3, head), "prefill_token_budget": 40},
        {"max_num_seqs": 16, "speculation": crowds.chain_of(4, head, ngrams=NGram(min_length=1))},
        {"max_num_seqs": 16, "speculation": Speculation(draft=head, shape=Chain(4))},
        {"max_num_seqs": 8, "speculation": crowds.chain_of(4, head), "kv_cache_tokens": 640},
    ]
    hits = "num_checkpoint_hits" if family == "qwen3_5" else "num_cached_tokens"
    for mode in modes:
        found, stats = crowds.answers(folder, prompts, repeats=2, **mode)
        assert not crowds.different(found, expected), mode
        assert getattr(stats, hits) > 0
        assert "kv_cache_tokens" not in mode or stats.num_preemptions > 0

    sequences = {
        seed: [*prompt, *one.token_ids]
        for seed, (prompt, one) in enumerate(zip(prompts, expected, strict=True))
    }
    known, make = KnownAnswers(sequences, crowds.VOCAB_SIZE), DFlashDrafterFactory.round_drafter

    def round_drafter(factory: DFlashDrafterFactory, resources: Any, *rest: Any) -> OracleMasks:
        oracle = OracleRoundDrafter(resources.table.columns.seed, known)
        return OracleMasks(make(factory, resources, *rest), oracle)

    with mock.patch.object(DFlashDrafterFactory, "round_drafter", round_drafter):
        crowds.assert_same_in_crowds(folder, prompts, expected, [modes[0], modes[4]], hits=hits)
        _, stats = crowds.answers(folder, prompts, speculation=crowds.chain_of(4, head))
    assert all(count > 0 for count in stats.speculation.acceptance_histogram)
