"""Replayed graphs compute the same bits as their kernels launched one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from scheduled_run import run_scheduled, sampling_of
from torch import Tensor

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.forward.caches import PagedKVCache
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits, SlotOutput, SlotSampling, StepPlan, StepResult

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE = 1000
BUDGET = 48
SHAPES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


class LaunchedReplay:
    """A replay that runs its step, which was not captured."""

    def __init__(self, device: GpuDevice, step: Callable[[], None]) -> None:
        self._device, self._step = device, step

    def launch(self) -> None:
        with self._device.work():
            self._step()

    def close(self) -> None:
        pass


class LaunchingDevice(GpuDevice):
    """A GPU whose replays launch the kernels one by one."""

    def capture(self, step: Callable[[], None]) -> LaunchedReplay:
        with self.work():
            step()  # a capture runs the step first too
        return LaunchedReplay(self, step)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = read_spec({"model_type": "llama", **SHAPES})
    return Decoder.random(config, device="cuda", dtype=torch.bfloat16, seed=1)


def cache_of(executor: GraphExecutor) -> PagedKVCache:
    assert executor._graphs is not None
    return executor._graphs._steps._model.cache


@pytest.fixture(scope="module", params=[False, True], ids=["prefill", "exact prefill"])
def executors(decoder: Decoder, request: pytest.FixtureRequest) -> Iterator[list[GraphExecutor]]:
    """An executor that replays graphs, and one that launches kernels."""
    limits = ExecutorLimits(
        max_num_seqs=6, max_model_len=256, num_blocks=64, block_size=16, vocab_size=VOCAB_SIZE
    )
    options = GraphOptions(prefill_token_budget=BUDGET, fast_prompts=not request.param)
    found = [
        GraphExecutor(device, decoder, limits, TunedTable(), options)
        for device in (GpuDevice(0), LaunchingDevice(0))
    ]
    torch.cuda.synchronize()  # steps that were run instead of captured may still be in their stream
    for executor in found:
        cache = cache_of(executor)
        pairs = (tensor for pair in cache.groups for tensor in pair)
        for tensor in (*executor._resources.workspace._buffers.values(), *pairs):
            tensor.flatten().view(torch.uint8).fill_(255)  # the same in both executors: NaN, -1
    torch.cuda.synchronize()
    yield found
    for executor in found:
        executor.close()


def requests() -> list[tuple[list[int], SlotSampling]]:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    changes: list[dict[str, object]] = [
        {"num_logprobs": 3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "num_logprobs": 2},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "num_logprobs": 0},
        {
            "temperature": 1.0,
            "top_k": 5,
            "seed": 2**40 + 1,
            "stop_token_ids": tuple(range(0, VOCAB_SIZE, 40)),
        },
        {"temperature": 1.2, "min_p": 0.05, "seed": 7, "presence_penalty": 0.7},
        # More updates than one ring entry holds.
        {"logit_bias": tuple((token, rng.uniform(-4, 4)) for token in range(700)), "num_logprobs": 1},
        {"allowed_token_ids": tuple(range(3, 600, 7)), "temperature": 0.5, "seed": 11},
    ]
    found = []
    for index in range(14):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 70))]
        prompt = shared[: rng.choice([0, 16, 40])] + own
        found.append((prompt, sampling_of(len(prompt), rng.randint(5, 24), **changes[index % len(changes)])))
    return found


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN."""
    return tensor.flatten().view(torch.uint8).cpu()


class Step(NamedTuple):
    """A step's plan and outputs, and the contents of slot table and workspace after it."""

    plan: StepPlan
    outputs: tuple[SlotOutput, ...]
    state: dict[str, Tensor]


def steps_of(executor: GraphExecutor) -> list[Step]:
    """Run all requests with one step in flight."""
    found: list[Step] = []
    resources = executor._resources
    tensors = {"slot table": resources.table.words, **resources.workspace._buffers}

    def note(plan: StepPlan, result: StepResult) -> None:
        state = {name: bits(tensor) for name, tensor in tensors.items()}
        found.append(Step(plan, result.prefill + result.decode, state))

    run_scheduled(executor, requests(), prefill_token_budget=BUDGET, depth=1, on_step=note)
    return found


def test_replays_equal_launches_in_every_step(executors: list[GraphExecutor]) -> None:
    """Compare outputs, slot tables and all buffers of the workspace after each step, and the KV cache at the
    end."""
    steps, others = map(steps_of, executors)
    assert len(steps) == len(others) > 40
    for number, (step, other) in enumerate(zip(steps, others, strict=True)):
        assert step.plan == other.plan
        assert step.outputs == other.outputs, f"step {number}"
        differing = [name for name in step.state if not torch.equal(step.state[name], other.state[name])]
        assert not differing, f"step {number}: {differing}"

    (pair,), (others,) = (cache_of(executor).groups for executor in executors)
    for name, one, two in zip(pair._fields, pair, others, strict=True):
        assert torch.equal(bits(one), bits(two)), name
        assert one.isfinite().float().mean() > 0.1


def test_replays_equal_launches_with_two_steps_in_flight(executors: list[GraphExecutor]) -> None:
    one, other = (
        run_scheduled(executor, requests(), prefill_token_budget=BUDGET, depth=2) for executor in executors
    )
    assert one == other
    assert sum(map(len, one)) > 100 and len({token for tokens in one for token in tokens}) > 60
