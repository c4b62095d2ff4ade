"""Rounds with an EAGLE-3 draft: graph and eager executor emit, draft and accept the same tokens."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_zoo import make_draft
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from slow_cases import slow_rows_after
from tiny_llama import tiny_llama
from triton.runtime import interpreter

from drift_sdk._kernels.gemm.tuning import LoggedProduct, TunedTable, WatchedTable, read_products
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.drafter_factory import EagleDrafterFactory
from drift_sdk.execution.eager.drafters import EagleDrafter
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.startup.graph_startup import weights_to_tune
from drift_sdk.steps import Executor, ExecutorLimits
from perf.harness.manual_driver import ManualDriver

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
TARGET = tiny_llama(vocab_size=96, num_hidden_layers=4)
EXPERTS = TARGET | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 45,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
}
"""A target with experts and windows, and a hidden size that is a multiple of no tile."""
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=40, num_blocks=20, block_size=4, vocab_size=96)
BUDGET = 16

Round = list[tuple[tuple[int, ...], int, int]]


NO_TABLE = TunedTable()


def rounds(executor: Executor) -> list[Round]:
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    slots.fill(6, [13, 11])
    found = []
    while slots.active:
        outputs = slots.round(3).decode
        found.append([(output.token_ids, output.num_drafted, output.num_accepted) for output in outputs])
    executor.close()
    return found


def executors(
    tmp_path: Path,
    table: TunedTable = NO_TABLE,
    *,
    settings: dict[str, Any] = TARGET,
    variant: str = "reference",
    convention: str | None = None,
) -> tuple[GraphExecutor, EagerExecutor]:
    """Both executors of a target with four layers, and a draft of the zoo."""
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = read_spec(settings)
    target = drawn_decoder(config, "cuda" if IS_GPU else "cpu", seed=3)
    make_draft(variant, tmp_path / "draft", tmp_path)
    draft = DraftDecoder.load(tmp_path / "draft", target, aux_layer_convention=convention)
    graph = GraphExecutor(
        GpuDevice(0) if IS_GPU else InterpretedDevice(),
        target,
        LIMITS,
        table,
        GraphOptions(prefill_token_budget=BUDGET, shape_log=tmp_path / "shapes.json"),
        drafter_factory=EagleDrafterFactory(draft, (3,)),
    )
    return graph, EagerExecutor(target, LIMITS, EagleDrafter(draft, target, LIMITS))


def test_rounds_equal_those_of_the_eager_executor(tmp_path: Path) -> None:
    table = WatchedTable()
    graph, eager = executors(tmp_path, table)
    target, draft = eager._decoder, eager._drafter._draft
    assert len(set(draft.aux_layers)) < len(draft.aux_layers)  # a layer that is read twice
    expected = rounds(eager)
    assert rounds(graph) == expected
    assert len(expected) > 2

    # What start-up tunes are the weights that were asked for, and what is logged are the products that ran.
    tuned = {weight.key: weight for weight in weights_to_tune(target.weights, draft.weights)}
    assert table.used == table.untuned == set(tuned)
    assert sum(len(weight.tensors) for weight in tuned.values()) > len(tuned)
    check_log(read_products(tmp_path / "shapes.json"), len(expected), target, draft)


@pytest.mark.parametrize(
    "variant, convention, aux_layers",
    slow_rows_after(0, [("specforge", "boundary", (0, 1, 2)), ("ids only", None, (1, 2, 2))]),
)
def test_rounds_with_experts_equal_those_of_the_eager_executor(
    variant: str, convention: str | None, aux_layers: tuple[int, ...], tmp_path: Path
) -> None:
    """With a draft that has no lm_head, and with one whose layer ids are boundaries."""
    graph, eager = executors(tmp_path, settings=EXPERTS, variant=variant, convention=convention)
    assert eager._drafter._draft.aux_layers == aux_layers
    expected = rounds(eager)
    assert rounds(graph) == expected


@pytest.mark.parametrize("variant", slow_rows_after(0, [("peagle",), ("flat peagle",)]))
def test_drafts_of_one_pass_equal_those_of_the_eager_executor(variant: str, tmp_path: Path) -> None:
    graph, eager = executors(tmp_path, variant=variant)
    expected = rounds(eager)
    assert rounds(graph) == expected
    drafted = [each[1:] for found in expected for each in found]
    assert sum(number for number, _ in drafted) > 12


def check_log(logged: Counter[LoggedProduct], num_rounds: int, target: Decoder, draft: DraftDecoder) -> None:
    """Two slots, at the end one, draft three tokens each in every round, after two prompts whose first tokens
    are sampled in one step."""

    def count(role: str, rows_per_slot: int) -> int:
        return sum(
            number
            for each, number in logged.items()
            if each.role == role and each.num_rows in (rows_per_slot, 2 * rows_per_slot)
        )

    num_layers = target.spec.num_layers
    for role in ("qkv", "output", "gate_up", "down"):
        assert count(role, 4) == num_layers * num_rounds
        assert count(f"draft {role}", 4) == num_rounds  # the draft extension
        assert count(f"draft {role}", 1) == 2 * num_rounds  # between three drafts
    assert count("head", 4) == num_rounds
    assert count("draft head", 1) == 3 * num_rounds
    assert count("head", 1) == 1
    shapes = {(each.num_columns, each.inner) for each in logged}
    layers = *target.weights.layers, *draft.weights.layers
    parts = (part for layer in layers for part in (layer.mixer, layer.channel))
    weights = target.weights, draft.weights, *parts
    roles = ("qkv", "output", "gate_up", "down", "head", "fc")
    found = [getattr(part, role, None) for part in weights for role in roles]
    assert shapes == {tuple(weight.shape) for weight in found if weight is not None}


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
