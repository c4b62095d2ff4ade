"""The times that the graph executor takes from the marks around its steps."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from interpreted_device import InterpretedDevice
from scheduled_run import run_scheduled, sampling_of

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: kernels run on the CPU"),
]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
LIMITS = ExecutorLimits(vocab_size=64, max_num_seqs=2, max_model_len=16, num_blocks=8, block_size=4)


class CountedEvent:
    """A mark whose time is the number of marks before it."""

    is_done = False

    def __init__(self, marks: count[int]) -> None:
        self._marks, self._at = marks, -1

    def record(self) -> None:
        self._at = next(self._marks)

    def wait(self, timeout_s: float | None = None) -> None:
        self.is_done = True

    def seconds_since(self, earlier: CountedEvent) -> float:
        assert 0 <= earlier._at < self._at
        return float(self._at - earlier._at)


class CountedDevice(InterpretedDevice):
    """A device that counts the marks of its events."""

    def __init__(self) -> None:
        self._marks = count()

    def event(self) -> CountedEvent:
        return CountedEvent(self._marks)


def test_time_between_steps_is_measured() -> None:
    """Steps are launched ahead, and events are used again."""
    decoder = Decoder.random(read_spec(CONFIG), device="cpu", dtype=torch.float32, seed=1)
    options = GraphOptions(prefill_token_budget=8)
    executor = GraphExecutor(CountedDevice(), decoder, LIMITS, TunedTable(), options)
    assert executor.is_done
    idle: list[float] = []
    run_scheduled(
        executor,
        [([1, 2, 3], sampling_of(3, 5)), ([4, 5], sampling_of(2, 4))],
        prefill_token_budget=8,
        on_step=lambda plan, result: idle.append(result.idle_s),
    )
    executor.close()
    assert len(idle) > 4
    assert idle == [0.0, *[1.0] * (len(idle) - 1)]  # one mark after the end of the step before
