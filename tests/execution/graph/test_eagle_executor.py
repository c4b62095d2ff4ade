"""Rounds with an EAGLE-3 draft: graph and eager executor emit, draft and accept the same tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_zoo import make_draft
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from tiny_llama import tiny_llama
from triton.runtime import interpreter

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.drafter_factory import EagleDrafterFactory
from drift_sdk.execution.eager.drafters import EagleDrafter
from drift_sdk.execution.eager.executor import EagerExecutor
from drift_sdk.execution.graph.executor import GraphExecutor, GraphOptions
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.profiling.manual_driver import ManualDriver
from drift_sdk.steps import Executor, ExecutorLimits

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
TARGET = tiny_llama(vocab_size=96, num_hidden_layers=4)
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=40, num_blocks=20, block_size=4, vocab_size=96)
BUDGET = 16

Round = list[tuple[tuple[int, ...], int, int]]


def rounds(executor: Executor) -> list[Round]:
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    slots.fill(6, [13, 11])
    found = []
    while slots.active:
        outputs = slots.round(3).decode
        found.append([(output.token_ids, output.num_drafted, output.num_accepted) for output in outputs])
    executor.close()
    return found


def executors(tmp_path: Path) -> tuple[GraphExecutor, EagerExecutor]:
    """Both executors of a target with four layers; the draft names one of them twice as aux layer."""
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    config = DecoderConfig.from_hf(TARGET)
    target = drawn_decoder(config, "cuda" if IS_GPU else "cpu", seed=3)
    make_draft("reference", tmp_path / "draft", tmp_path)
    draft = DraftDecoder.load(tmp_path / "draft", target)
    assert len(set(draft.aux_layers)) < len(draft.aux_layers)
    graph = GraphExecutor(
        GpuDevice(0) if IS_GPU else InterpretedDevice(),
        target,
        LIMITS,
        TunedTable(),
        GraphOptions(prefill_token_budget=BUDGET),
        drafter_factory=EagleDrafterFactory(draft, (3,)),
    )
    return graph, EagerExecutor(target, LIMITS, EagleDrafter(draft, target, LIMITS))


def test_rounds_equal_those_of_the_eager_executor(tmp_path: Path) -> None:
    graph, eager = executors(tmp_path)
    expected = rounds(eager)
    assert rounds(graph) == expected
    assert len(expected) > 2


@pytest.mark.interpreter
def test_kernels_that_start_dependents_early_follow_long_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel after them may start before the product or attention kernel before them has ended, and read
    older values."""
    early = {"_add_norm", "_rotate_and_store", "_add_partitions"}
    launched: list[str] = []
    launch = interpreter.GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        # A norm of the residual stream alone, without a product, waits before it starts dependents.
        launched.append("" if kwargs.get("NUM_SLICES") == 0 else self.fn.__name__)
        launch(self, *args, **kwargs)

    def recording(name: str) -> Callable[..., Any]:
        multiply = getattr(torch, name)

        def recorded_multiply(*args: Any, **kwargs: Any) -> Any:
            launched.append(name)
            return multiply(*args, **kwargs)

        return recorded_multiply

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, recording(name))
    graph, _ = executors(tmp_path)
    slots = ManualDriver(graph, prefill_token_budget=BUDGET)
    slots.fill(6, [13, 11])
    slots.round(3)
    graph.close()
    pairs = set(itertools.pairwise(launched))
    assert {after for _, after in pairs} >= early
    before_early = {before for before, after in pairs if after in early}
    assert before_early <= {"_multiply", "_gated_multiply", "_attend", "mm", "addmm"}
