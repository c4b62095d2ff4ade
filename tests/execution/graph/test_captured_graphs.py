"""Start of a graph executor: warm-up, then the size of the KV cache, then captures, the largest first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted_device import FirstRunDevice, InterpretedDevice, InterpretedReplay
from tiny_llama import tiny_llama
from torch import Tensor

from drift_sdk import NGram
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory, NGramDrafterFactory
from drift_sdk.execution.forward.attention import AttentionForward
from drift_sdk.execution.forward.channels import MlpForward
from drift_sdk.execution.forward.forward_pass import ResidualStream
from drift_sdk.execution.forward.products import ExactProducts, LibraryProducts
from drift_sdk.execution.graph.gpu_graphs import GraphOptions, StartupHooks
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

pytestmark = pytest.mark.interpreter

LIMITS = ExecutorLimits(max_num_seqs=4, max_model_len=64, num_blocks=16, block_size=4, vocab_size=64)
NUM_BLOCKS = 9


class RecordingDevice(InterpretedDevice):
    """A device that records what happens while an executor starts."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def warm_up(self, step: Callable[[], None]) -> None:
        self.calls.append("warm up")

    def capture(self, step: Callable[[], None]) -> InterpretedReplay:
        self.calls.append("capture")
        return super().capture(step)

    def finish_captures(self) -> None:
        self.calls.append("finish")
        super().finish_captures()


@pytest.mark.parametrize("has_drafter", [False, True])
def test_cache_is_sized_between_warm_up_and_captures(has_drafter: bool) -> None:
    device = RecordingDevice()
    decoder = Decoder.random(read_spec(tiny_llama()), device="cpu", dtype=torch.float32)
    drafter_factory: DrafterFactory = NGramDrafterFactory(NGram(), (1, 3)) if has_drafter else NO_DRAFTER
    counts: list[int] = []
    fractions: list[float] = []

    def fit_blocks(num_graphs: int) -> tuple[int, int]:
        device.calls.append("fit")
        counts.append(num_graphs)
        return NUM_BLOCKS, 0

    def report(stage: str, fraction: float) -> None:
        if stage == "capture graphs":
            fractions.append(fraction)

    executor = GraphExecutor(
        device,
        decoder,
        LIMITS,
        TunedTable(),
        GraphOptions(prefill_token_budget=40),
        drafter_factory=drafter_factory,
        hooks=StartupHooks(fit_blocks=fit_blocks, report=report),
    )
    # Of prompts, rounds, first tokens, mixed steps and scored rows, and with a drafter of draft extensions.
    num_kinds = 6 if has_drafter else 5
    num_graphs = device.calls.count("capture")
    assert device.calls == ["warm up"] * num_kinds + ["fit"] + ["capture"] * num_graphs + ["finish"]
    assert counts == [num_graphs]
    assert fractions == [index / num_graphs for index in range(num_graphs)]
    assert (executor.limits.num_blocks, executor.limits.max_model_len) == (NUM_BLOCKS, NUM_BLOCKS * 4)

    graphs = executor._graphs
    assert graphs is not None
    drafts = [3, 1, 0] if has_drafter else [0]
    assert list(graphs.prefill) == [48, 32, 16]  # the budget, rounded up to 16 rows
    assert list(graphs.draft_extend) == ([48, 32, 16] if has_drafter else [])
    assert list(graphs.decode) == [(slots, number) for slots in (4, 2, 1) for number in drafts]
    halves = [(slots, number) for slots in (4, 2, 1) for number in drafts if number]
    assert list(graphs.draft) == list(graphs.verify) == halves
    assert list(graphs.first_tokens) == [4, 2, 1]
    executor.close()


def test_first_runs_compute_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only one layer launches has to be loaded before the step is captured."""
    num_layers = 6
    found: dict[type, list[int]] = {ExactProducts: [], LibraryProducts: []}

    def mix(forward: AttentionForward, x: Tensor, weights: object, spec: object, index: int) -> Any:
        found[type(forward._products)].append(index)
        return x, None

    def apply(forward: MlpForward, weights: object, spec: object, index: int) -> Any:
        found[type(forward._products)].append(index)
        return forward._normed, None

    monkeypatch.setattr(AttentionForward, "run", mix)
    monkeypatch.setattr(MlpForward, "run", apply)
    for name in ("add_mixer", "add_channel"):
        monkeypatch.setattr(ResidualStream, name, lambda *_: None)
    config = read_spec(tiny_llama(num_hidden_layers=num_layers))
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32)
    options = GraphOptions(prefill_token_budget=16, fast_prompts=True)
    GraphExecutor(FirstRunDevice(), decoder, LIMITS, TunedTable(), options).close()
    for indices in found.values():
        every = [index for layer in range(num_layers) for index in (layer, layer)]
        assert indices == every * (len(indices) // len(every))
        assert indices
