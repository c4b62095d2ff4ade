"""The graph executor against the eager one: the same scheduler, the same requests, the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from interpreted_device import InterpretedDevice
from model_zoo import make_model

from drift_sdk._kernels.tuning import TunedTable
from drift_sdk.execution.device import GpuDevice
from drift_sdk.execution.eager import EagerExecutor
from drift_sdk.execution.graph import GraphExecutor
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.scheduling.delta import Delta
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import Executor, ExecutorLimits, SlotSampling

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"


def load(index: int, folder: Path) -> Decoder:
    make_model(index, folder)
    source = resolve(str(folder), revision=None, cache_dir=None, local_files_only=True)
    config = DecoderConfig.from_hf(source.config)
    return Decoder.load(config, source.tensors(), device=DEVICE, dtype=torch.float32)


def limits_of(decoder: Decoder, **changes: int) -> ExecutorLimits:
    fields = {"max_num_seqs": 3, "max_model_len": 64, "num_blocks": 24, "block_size": 8} | changes
    return ExecutorLimits(vocab_size=decoder.config.vocab_size, **fields)


def graph_executor(decoder: Decoder, limits: ExecutorLimits, **options: object) -> GraphExecutor:
    device = GpuDevice(0) if IS_GPU else InterpretedDevice()
    return GraphExecutor(device, decoder, limits, TunedTable(), prefill_token_budget=16, **options)


def sampling(num_prompt_tokens: int, **changes: object) -> SlotSampling:
    fields = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "stop_token_ids": (),
        "num_prompt_tokens": num_prompt_tokens,
        "max_length": num_prompt_tokens + 6,
    }
    return SlotSampling(**fields | changes)


def run(executor: Executor, requests: list[tuple[list[int], SlotSampling]]) -> dict[int, list[Delta]]:
    """Everybody's deltas, with two steps in flight."""
    limits = executor.limits
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            prefill_token_budget=16,
        )
    )
    sequences = [
        Sequence(
            request_id=str(index), prompt_ids=list(prompt), sampling=sampling, priority=0, arrival=index
        )
        for index, (prompt, sampling) in enumerate(requests)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    deltas: dict[int, list[Delta]] = {index: [] for index in range(len(requests))}
    while scheduler.has_work:
        plan = scheduler.schedule() if scheduler.num_in_flight < 2 else None
        if plan is not None:
            executor.launch(plan)
            if scheduler.num_in_flight < 2:
                continue
        for delta in scheduler.commit(executor.collect()):
            deltas[sequences.index(delta.sequence)].append(delta)
        scheduler.check_integrity()
    return deltas


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("is_exact", [False, True], ids=["prefill", "exact prefill"])
@pytest.mark.parametrize("index", [0, 13, 20])
def test_tokens_equal_the_eager_ones(index: int, is_exact: bool, tmp_path: Path) -> None:
    """Chunked prompts, prefix hits, more requests than slots, sampling, rules, stops, log-probabilities."""
    decoder = load(index, tmp_path)
    limits = limits_of(decoder)
    rng = random.Random(index)
    shared = [rng.randrange(3, 200) for _ in range(17)]
    prompts = [
        [rng.randrange(3, 200) for _ in range(21)],
        shared + [7],
        [5],
        shared + [9, 11, 12],
        [rng.randrange(3, 200) for _ in range(9)],
    ]
    changes: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "num_logprobs": 2},
        {"num_prompt_logprobs": 1, "num_logprobs": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 5, "seed": 2**40 + 1, "stop_token_ids": tuple(range(0, 500, 9))},
        {"logit_bias": ((17, 4.0),), "allowed_token_ids": (17, 18, 19, 40), "presence_penalty": 0.7},
    ]
    requests = [
        (prompt, sampling(len(prompt), **change)) for prompt, change in zip(prompts, changes, strict=True)
    ]
    expected = run(EagerExecutor(decoder, limits), requests)
    executor = graph_executor(decoder, limits, exact_prefill=is_exact)
    found = run(executor, requests)
    executor.close()
    for number in expected:
        assert tokens(found[number]) == tokens(expected[number])
        assert found[number][-1].finish == expected[number][-1].finish
        for delta, other in zip(found[number], expected[number], strict=True):
            compare(delta.logprobs, other.logprobs)
            compare(delta.prompt_logprobs, other.prompt_logprobs)


def compare(found: object, expected: object) -> None:
    assert (found is None) == (expected is None)
    for entry, other in zip(found or (), expected or (), strict=True):
        assert entry.token_id == other.token_id
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]
