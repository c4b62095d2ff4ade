"""Drafts on two GPUs: the rounds of the eager executor with the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_zoo import make_dflash
from draft_zoo import make_draft
from drawn_decoder import drawn_decoder
from lockstep_devices import Lockstep
from slow_cases import slow_after
from tiny_llama import tiny_llama

from drift_sdk import DynamicTree, NGram
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.drafter_factory import (
    DFlashDrafterFactory,
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
)
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GpuModel, GraphOptions
from drift_sdk.execution.graph.graph_executor import ParallelExecutor
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import random_tensors
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.models.shard import Shard, cut_head, load_shard
from drift_sdk.steps import Executor, ExecutorLimits
from perf.harness.manual_driver import ManualDriver

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_tensor_parallel.py has GPUs"),
]

TARGET = tiny_llama(
    vocab_size=96,
    num_hidden_layers=3,
    num_key_value_heads=2,
    head_dim=64,
    hidden_size=16,
    intermediate_size=128,
)
LIMITS = ExecutorLimits(max_num_seqs=1, max_model_len=24, num_blocks=8, block_size=4, vocab_size=96)
BUDGET = 16
SHAPE = DynamicTree(top_k=2, depth=2, num_draft_tokens=3)


def rounds(executor: Executor, max_depth: int | None) -> list[Any]:
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    slots.fill(6, [10])
    found = []
    while slots.active:
        outputs = slots.round(SHAPE.num_draft_tokens, max_depth=max_depth).decode
        found.append([(each.token_ids, each.num_drafted, each.num_accepted) for each in outputs])
    executor.close()
    return found


@pytest.mark.parametrize("kind", slow_after(1, ["trees of a head", "a model and n-grams", "masks"]))
def test_rounds_are_those_of_the_whole_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU has the whole draft. The head here uses the target's embedding and rows of its whole head."""
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    make_draft("ids only", tmp_path / "draft", tmp_path)
    make_dflash(0, tmp_path / "masks", tmp_path)
    config = read_spec(TARGET)
    target = drawn_decoder(config, "cpu", seed=3)
    small = drawn_decoder(read_spec(TARGET | {"num_hidden_layers": 1}), "cpu", seed=5)
    choices, has_trees = (SHAPE.num_draft_tokens,), kind == "trees of a head"
    max_depth = SHAPE.depth if has_trees else None

    def factory_of(decoder: Any) -> DrafterFactory:
        if has_trees:
            draft = DraftDecoder.load(tmp_path / "draft", decoder)
            return EagleDrafterFactory(draft, choices, tree=SHAPE)

        if kind == "masks":
            head = DFlashDecoder.load(resolve(tmp_path / "masks", role="draft"), decoder)
            return DFlashDrafterFactory(head, choices)

        return HybridDrafterFactory(ModelDrafterFactory(small, choices), NGram(min_length=1))

    whole = factory_of(target)
    expected = rounds(EagerExecutor(target, LIMITS, whole.eager_drafter(target, LIMITS)), max_depth)

    models = []
    for device in (group := Lockstep(2, monkeypatch)).devices:
        shard = Shard(rank=device.rank, size=2)
        place = {"device": torch.device("cpu"), "dtype": torch.float32}
        decoder = load_shard(config, random_tensors(config, seed=3, **place), shard, **place)
        factory = factory_of(decoder)
        cut_head(decoder, shard)
        models.append(GpuModel(device=device, decoder=decoder, tuned=TunedTable(), drafter_factory=factory))
    options = GraphOptions(prefill_token_budget=BUDGET)
    assert rounds(ParallelExecutor(models, LIMITS, options), max_depth) == expected
    assert any(num_drafted for outputs in expected for _, num_drafted, _ in outputs)
    assert group.num_exchanges > 0
