"""Graphs with copied kernels are, kernel by kernel, the graphs that launches of all layers give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama

pytest.importorskip("cuda.core")

from cuda.bindings import driver

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device import captured_kernels
from drift_sdk.execution.device.captured_kernels import CapturedKernel, capture_in_progress
from drift_sdk.execution.device.device import GpuDevice, Replay
from drift_sdk.execution.device.kernel_copies import KernelCopy
from drift_sdk.execution.forward import repeated_layers
from drift_sdk.execution.forward.kernel_weights import arrange_decoder
from drift_sdk.execution.graph.executor import GraphExecutor, GraphOptions
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.steps import ExecutorLimits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HOST_STACK = 0x7FFC << 32
"""No lower address is on the stack of a process's first thread."""
NUM_LAYERS = 5
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def kernels_of_graph() -> list[CapturedKernel | None]:
    """All kernels of the graph that is captured, the last one first; None for other nodes."""
    tail = capture_in_progress()
    assert tail is not None
    node, found = tail._last_node(), list[CapturedKernel | None]()
    while node is not None:
        error, nodes, edges, number = driver.cuGraphNodeGetDependencies(node, 2)
        assert not error and number <= 1
        is_dependent = number == 1 and edges[0].type == captured_kernels.PROGRAMMATIC
        found.append(captured_kernels._kernel(node, is_dependent))
        node = nodes[0] if number else None
    return found


def description(kernel: CapturedKernel | None) -> object:
    """A kernel but for addresses of the host's stack, which cuBLAS leaves in parameters."""
    if kernel is None:
        return None

    words = [[word for word in each if word < HOST_STACK] for each in kernel.words]
    return kernel.function, kernel.sizes, kernel.cluster, kernel.is_dependent, words


class ComparingDevice(GpuDevice):
    """A GPU that captures each step twice, with copies of kernels and without.

    graphs: the kernels of both graphs of each step.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.graphs: list[list[list[CapturedKernel | None]]] = []
        self._others: list[Replay] = []

    def capture(self, step: Callable[[], None]) -> Replay:
        graphs = list[list[CapturedKernel | None]]()

        def noted() -> None:
            step()
            if capture_in_progress() is not None:
                graphs.append(kernels_of_graph())

        replay = super().capture(noted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repeated_layers, "capture_in_progress", lambda: None)
            self._others.append(super().capture(noted))
        self.graphs.append(graphs)
        return replay

    def finish_captures(self) -> None:
        super().finish_captures()
        for each in self._others:
            each.close()


@pytest.mark.parametrize("form", ["expanded", "fp8"])
@pytest.mark.parametrize("is_exact", [False, True])
def test_copied_kernels_are_those_of_launches(
    form: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[KernelCopy] = []
    launch = KernelCopy.launch

    def counted(copy: KernelCopy, addresses: Any) -> None:
        copied.append(copy)
        launch(copy, addresses)

    monkeypatch.setattr(KernelCopy, "launch", counted)
    config = DecoderConfig.from_hf(tiny_llama(**LLAMA_8B, num_hidden_layers=NUM_LAYERS))
    device = torch.device("cuda", 0)
    decoder = Decoder.random(config, device=device, dtype=torch.bfloat16, form=form, kv_form=None, seed=3)
    arrange_decoder(decoder)
    limits = ExecutorLimits(
        vocab_size=config.vocab_size, max_num_seqs=64, max_model_len=1024, num_blocks=64, block_size=64
    )
    options = GraphOptions(prefill_token_budget=512, fast_prompts=not is_exact)
    comparing = ComparingDevice(0)
    GraphExecutor(comparing, decoder, limits, TunedTable(), options).close()
    for with_copies, without in comparing.graphs:
        assert [*map(description, with_copies)] == [*map(description, without)]
    num_kernels = sum(len(graphs[0]) for graphs in comparing.graphs)
    assert len(copied) * 10 > num_kernels, "those of the layers behind the first two of a kind"
