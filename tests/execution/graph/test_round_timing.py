"""Timing of rounds at start, which must not affect what is served later."""

from __future__ import annotations

import pytest
import torch
from interpreted_device import InterpretedDevice
from scheduled_run import run_scheduled, sampling_of
from tiny_llama import tiny_llama

from drift_sdk import NGram
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor, time_rounds
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

IS_GPU = torch.cuda.is_available()
SHAPES = tiny_llama(tie_word_embeddings=True)
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=32, num_blocks=16, block_size=4, vocab_size=64)


class Clock:
    """A device whose replays take given times."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> Mark:
        return Mark(self)


class Mark:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self) -> None:
        self._at = self._clock.now

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Mark) -> float:
        return self._at - earlier._at


class TimedReplay:
    def __init__(self, clock: Clock, *seconds: float) -> None:
        self._clock = clock
        self._seconds = iter(seconds)

    def launch(self) -> None:
        self._clock.now += next(self._seconds)


def test_round_cost_is_the_median() -> None:
    clock = Clock()
    rounds = {(1, 0): TimedReplay(clock, 9.0, 1.0, 2.0), (8, 3): TimedReplay(clock, 4.0, 4.0, 90.0)}
    assert time_rounds(clock, rounds) == {(1, 0): 2.0, (8, 3): 4.0}


@pytest.mark.kernel
def test_timing_rounds_does_not_change_tokens() -> None:
    decoder = Decoder.random(
        read_spec(SHAPES), device="cuda" if IS_GPU else "cpu", dtype=torch.float32, seed=1
    )
    requests = [([5, 6, 5, 6, 5], sampling_of(5, 4)), ([9, 8], sampling_of(2, 3))]
    tokens = []
    for is_timed in (False, True):
        executor = GraphExecutor(
            GpuDevice(0) if IS_GPU else InterpretedDevice(),
            decoder,
            LIMITS,
            TunedTable(),
            GraphOptions(prefill_token_budget=16),
            drafter_factory=NGramDrafterFactory(NGram(min_length=1), (1,)),
        )
        if is_timed:
            costs = executor.round_costs()
            assert set(costs) == {(1, 0), (1, 1), (2, 0), (2, 1)}
            assert all(seconds > 0 for seconds in costs.values())
        tokens.append(run_scheduled(executor, requests, prefill_token_budget=16, draft_choices=(1,)))
        executor.close()
    assert tokens[0] == tokens[1]
