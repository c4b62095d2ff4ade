"""Rounds with trees of an EAGLE-3 draft: graph and eager executor draft and accept the same trees."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from draft_zoo import make_draft
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from msgspec.structs import replace
from tiny_llama import tiny_llama

from drift_sdk import DynamicTree, NGram, StaticTree
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.drafter_factory import (
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
)
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder, random_mtp
from drift_sdk.steps import Executor, ExecutorLimits
from perf.harness import manual_driver
from perf.harness.manual_driver import ManualDriver

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
TARGET = tiny_llama(
    vocab_size=96, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, hidden_size=16
)
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=40, num_blocks=20, block_size=4, vocab_size=96)
BUDGET = 16
MTP_SEED = 10
"""Of weights whose layer is right once in either tree."""
STATIC = StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
DYNAMIC = DynamicTree(top_k=3, depth=3, num_draft_tokens=7)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, DraftDecoder]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "config.json").write_text(json.dumps(TARGET))
    target = drawn_decoder(read_spec(TARGET), "cuda" if IS_GPU else "cpu", seed=3)
    make_draft("reference", folder / "draft", folder)
    return target, DraftDecoder.load(folder / "draft", target)


def rounds(
    executor: Executor, num_drafts: int, depth: int | None, logprobs: list[float] | None = None
) -> list[Any]:
    """logprobs: takes those of given tokens."""
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    slots.fill(6, [12, 10])
    found = []
    while slots.active:
        outputs = slots.round(num_drafts, max_depth=depth).decode
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        if logprobs is not None:
            logprobs += [logprob for entry in entries for _, logprob in entry.given]
        found.append(
            [
                (
                    output.token_ids,
                    output.num_drafted,
                    output.num_accepted,
                    output.accepted_nodes,
                    output.is_ngram,
                    output.violation,
                )
                for output in outputs
            ]
        )
    executor.close()
    return found


def graph_executor(
    models: tuple[Decoder, DraftDecoder], factory: DrafterFactory, *, has_checks: bool
) -> GraphExecutor:
    return GraphExecutor(
        GpuDevice(0) if IS_GPU else InterpretedDevice(),
        models[0],
        LIMITS,
        TunedTable(),
        GraphOptions(prefill_token_budget=BUDGET, has_checks=has_checks),
        drafter_factory=factory,
    )


@pytest.mark.parametrize(
    ("shape", "has_checks"), [(STATIC, True), (DYNAMIC, False)], ids=["static", "dynamic"]
)
def test_rounds_equal_those_of_the_eager_executor(
    models: tuple[Decoder, DraftDecoder], shape: Any, has_checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of given tokens follow the accepted path."""
    given = {"num_logprobs": 0, "logprob_token_ids": (3, 50)}
    greedy = manual_driver._greedy
    monkeypatch.setattr(manual_driver, "_greedy", lambda *lengths: replace(greedy(*lengths), **given))
    factory = EagleDrafterFactory(models[1], (shape.num_draft_tokens,), tree=shape)
    eager = EagerExecutor(models[0], LIMITS, factory.eager_drafter(models[0], LIMITS))
    logprobs: list[list[float]] = [[], []]
    expected = rounds(eager, shape.num_draft_tokens, shape.depth, logprobs[0])
    executor = graph_executor(models, factory, has_checks=has_checks)
    assert rounds(executor, shape.num_draft_tokens, shape.depth, logprobs[1]) == expected
    assert len(expected) > 2 and any(output[3] for outputs in expected for output in outputs)
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    assert len(logprobs[1]) == 2 * sum(len(output[0]) for outputs in expected for output in outputs) > 0


@pytest.mark.parametrize("kind", ["head", "model and ngrams"])
def test_checked_chains_equal_those_of_the_eager_executor(
    models: tuple[Decoder, DraftDecoder], kind: str
) -> None:
    factory: DrafterFactory = EagleDrafterFactory(models[1], (2,))
    if kind == "model and ngrams":
        factory = HybridDrafterFactory(ModelDrafterFactory(models[0], (2,)), NGram(min_length=1))
    eager = EagerExecutor(models[0], LIMITS, factory.eager_drafter(models[0], LIMITS))
    expected = rounds(eager, 2, None)
    found = rounds(graph_executor(models, factory, has_checks=True), 2, None)
    assert [[each[:3] + each[4:] for each in outputs] for outputs in found] == [
        [each[:3] + each[4:] for each in outputs] for outputs in expected
    ]


MTP = {
    "model_type": "glm4_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_trees_of_an_mtp_layer_equal_those_of_the_eager_executor(shape: Any) -> None:
    device = "cuda" if IS_GPU else "cpu"
    target = Decoder.random(read_spec(MTP), device=device, dtype=torch.float32, seed=MTP_SEED)
    models = target, random_mtp(target, 4)
    factory = EagleDrafterFactory(models[1], (shape.num_draft_tokens,), tree=shape)
    eager = EagerExecutor(target, LIMITS, factory.eager_drafter(target, LIMITS))
    expected = rounds(eager, shape.num_draft_tokens, shape.depth)
    assert any(output[3] for outputs in expected for output in outputs)
    executor = graph_executor(models, factory, has_checks=False)
    assert rounds(executor, shape.num_draft_tokens, shape.depth) == expected
