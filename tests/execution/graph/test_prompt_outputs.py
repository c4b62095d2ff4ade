"""What requests report of their prompts on the graph executor: alone and in a crowd, and on the eager one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from interpreted_device import InterpretedDevice
from scheduled_run import run_scheduled, sampling_of
from tiny_llama import tiny_llama

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.graph.step_launcher import StepLauncher
from drift_sdk.execution.prompt_states import StateGatherer
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import Executor, ExecutorLimits, SlotOutput, SlotSampling, StepPlan, StepResult

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("steady_dots")]

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
LIMITS = ExecutorLimits(max_num_seqs=4, max_model_len=40, num_blocks=48, block_size=4, vocab_size=97)
BUDGET = 8

Request = tuple[list[int], SlotSampling]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    spec = read_spec(tiny_llama(vocab_size=97))
    return Decoder.random(spec, device=DEVICE, dtype=torch.float32, seed=3)


def graph_executor(decoder: Decoder) -> GraphExecutor:
    device = GpuDevice(0) if IS_GPU else InterpretedDevice()
    options = GraphOptions(prefill_token_budget=BUDGET)
    return GraphExecutor(device, decoder, LIMITS, TunedTable(), options)


def outputs_of(executor: Executor, requests: list[Request]) -> tuple[list[SlotOutput], int]:
    """The outputs with the first tokens, in the order of the requests, and the number of prefix hits."""
    firsts: dict[int, SlotOutput] = {}
    arrivals: dict[int, int] = {}
    hits = 0

    def note(plan: StepPlan, result: StepResult) -> None:
        nonlocal hits
        for assignment in plan.assignments:
            arrivals[assignment.slot] = assignment.arrival
        placed = {assignment.slot for assignment in plan.assignments}
        hits += sum(chunk.start > 0 and chunk.slot in placed for chunk in plan.prefill)
        for chunk, output in zip(plan.prefill, result.prefill, strict=True):
            if chunk.is_last:
                firsts[arrivals[chunk.slot]] = output

    run_scheduled(executor, requests, prefill_token_budget=BUDGET, depth=1, on_step=note)
    return [firsts[index] for index in range(len(requests))], hits


def requests_of() -> list[Request]:
    rng = random.Random(8)

    def request(prompt: list[int], num_tokens: int, **changes: object) -> Request:
        return prompt, sampling_of(len(prompt), num_tokens, **changes)

    shared = [rng.randrange(3, 90) for _ in range(9)]
    return [
        request([rng.randrange(3, 90) for _ in range(6)], 9),
        request([*shared, 7, 8], 1, prompt_states="last"),
        request([*shared, 7, 9], 1, prompt_states="mean"),
        request([5], 1, prompt_states="mean"),
        request([*shared, 11], 1, prompt_states="last"),
        request([*shared, 11, 12, 13], 2, prompt_states="all"),
        request([7], 1, prompt_states="last"),
        request([*shared, 21, 22, 23], 1, num_prompt_logprobs=1, first_prompt_logprob=9),
        request([*shared, 21, 24], 1, num_prompt_logprobs=0, first_prompt_logprob=10),
        request([*shared, 21, 22, 24, *shared, 30], 1, num_prompt_logprobs=0),
    ]


def test_outputs_are_the_same_alone_and_in_a_crowd(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    num_mixed = 0
    launch = StepLauncher._launch_mixed

    def counting(*arguments: object) -> None:
        nonlocal num_mixed
        num_mixed += 1
        launch(*arguments)

    monkeypatch.setattr(StepLauncher, "_launch_mixed", counting)
    requests = requests_of()
    executor = graph_executor(decoder)
    found, num_hits = outputs_of(executor, requests)
    executor.close()
    single_executor = graph_executor(decoder)
    alone = [outputs_of(single_executor, [request])[0][0] for request in requests]
    single_executor.close()
    eager, _ = outputs_of(EagerExecutor(decoder, LIMITS), requests)
    num_compared = num_scored = 0
    for (prompt, sampling), output, single, other in zip(requests, found, alone, eager, strict=True):
        assert output.prompt_states == single.prompt_states
        assert output.prompt_logprobs == single.prompt_logprobs
        if output.prompt_logprobs is not None and other.prompt_logprobs is not None:
            tokens = [entry.token_id for entry in output.prompt_logprobs]
            assert tokens == prompt[sampling.first_prompt_logprob :] != []
            logprobs = [[entry.logprob for entry in each.prompt_logprobs or ()] for each in (output, other)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
            num_scored += 1
        assert (output.prompt_states is None) == (sampling.prompt_states is None)
        if output.prompt_states is not None and other.prompt_states is not None:
            num_rows = len(prompt) if sampling.prompt_states == "all" else 1
            assert output.prompt_states.numpy().shape == (num_rows, decoder.spec.hidden_size)
            assert np.abs(output.prompt_states.numpy() - other.prompt_states.numpy()).max() < 1e-5
            num_compared += 1
    assert num_compared == 6 and num_scored == 3 and num_mixed > 0 and num_hits > 0


def test_the_mean_does_not_depend_on_chunks() -> None:
    rows = torch.randn(301, 24, generator=torch.Generator().manual_seed(1)) * 7
    found = set()
    for size in (1, 7, 64, 301):
        gatherer = StateGatherer("mean")
        parts = rows.split(size)
        for index, part in enumerate(parts):
            gatherer.add(part, lambda hidden: hidden, is_last=index == len(parts) - 1)
        found.add(gatherer.result())
    (states,) = found
    assert np.abs(states.numpy()[0] - rows.double().mean(0).numpy()).max() < 1e-7
