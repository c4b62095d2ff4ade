"""The executor over several GPUs against the one over one GPU: same scheduler, same requests, same steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted_device import InterpretedDevice
from lockstep_devices import Lockstep, LockstepDevice, LockstepReplay
from scheduled_run import run_scheduled, sampling_of

from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.gemm.tuning import TunedGemm, TunedTable
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.exchange import Exchange, open_exchanges
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory, NGramDrafterFactory
from drift_sdk.execution.forward.forward_pass import ForwardPass
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.graph import graph_executor as parallel_executor_module
from drift_sdk.execution.graph.gpu_graphs import GpuModel, GraphOptions
from drift_sdk.execution.graph.graph_executor import (
    PEER_TIMEOUT_S,
    GraphExecutor,
    ParallelExecutor,
    peer_timeout,
)
from drift_sdk.execution.rounds.drafters import NGramRoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.shard import Shard, cut_head, load_shard
from drift_sdk.spec.model import ModelSpec
from drift_sdk.speculation import NGram
from drift_sdk.steps import ExecutorLimits, SlotSampling

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_tensor_parallel.py has GPUs"),
]

SIZES = {
    "model_type": "qwen2",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
BUDGET = 8
Request = tuple[list[int], SlotSampling]


def config_of(**changes: object) -> ModelSpec:
    return read_spec(SIZES | changes)


def limits_of(config: ModelSpec) -> ExecutorLimits:
    return ExecutorLimits(
        vocab_size=config.vocab_size, max_num_seqs=2, max_model_len=32, num_blocks=16, block_size=4
    )


def requests_of(seed: int) -> list[Request]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 200) for _ in range(length)] for length in (10, 3, 6, 2)]
    changes = (
        {"logit_bias": ((17, 0.5),), "allowed_token_ids": tuple(range(10, 300))},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "num_logprobs": 2},
        {"repetition_penalty": 1.4, "allowed_token_ids": tuple(range(4))},
        {"allowed_token_ids": tuple(range(4, 9))},
    )
    return [
        (prompt, sampling_of(len(prompt), 3, **change))
        for prompt, change in zip(prompts, changes, strict=True)
    ]


def parallel_executor(
    config: ModelSpec, group: Lockstep, factory: DrafterFactory = NO_DRAFTER, **options: object
) -> ParallelExecutor:
    placement = {"device": torch.device("cpu"), "dtype": torch.float32}
    models = []
    for device in group.devices:
        shard = Shard(rank=device.rank, size=len(group.devices))
        decoder = load_shard(config, random_tensors(config, **placement), shard, **placement)
        cut_head(decoder, shard)
        models.append(GpuModel(device=device, decoder=decoder, tuned=TunedTable(), drafter_factory=factory))
    options = {"prefill_token_budget": BUDGET, **options}
    return ParallelExecutor(models, limits_of(config), GraphOptions(**options))


def single_executor(config: ModelSpec, factory: DrafterFactory = NO_DRAFTER) -> GraphExecutor:
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32)
    options = GraphOptions(prefill_token_budget=BUDGET)
    limits = limits_of(config)
    return GraphExecutor(InterpretedDevice(), decoder, limits, TunedTable(), options, drafter_factory=factory)


def test_tokens_are_those_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, mixed steps, reused slots, sampling rules; of a model with biases."""
    config, requests = config_of(), requests_of(1)
    one = single_executor(config)
    expected = run_scheduled(one, requests, prefill_token_budget=BUDGET)
    one.close()
    group = Lockstep(2, monkeypatch)
    executor = parallel_executor(config, group)
    assert run_scheduled(executor, requests, prefill_token_budget=BUDGET) == expected
    assert group.num_exchanges > 0
    executor.close()
    assert all(device.is_closed for device in group.devices)


def test_drafts_on_each_gpu_do_not_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """N-grams, one layer, a head that is the embedding, and a vocabulary that two GPUs do not divide.

    The second GPU drafts something else, which it must not verify.
    """
    propose, num_calls = NGramRoundDrafter.propose, 0

    def propose_on_each(rounds: NGramRoundDrafter, rows: Rows, **sizes: int) -> None:
        nonlocal num_calls
        num_calls += 1
        propose(rounds, rows, **sizes)
        if num_calls % 2 == 0:
            rows.token[1::3] = 9

    verified: list[list[int]] = []
    run = ForwardPass.run

    def noting_run(forward: ForwardPass, num_layers: int | None = None) -> None:
        verified.append(forward._rows.token.tolist())
        run(forward, num_layers)

    config = config_of(model_type="qwen3", num_hidden_layers=1, tie_word_embeddings=True, vocab_size=301)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    requests = [(prompt, sampling_of(len(prompt), 5))]
    one = single_executor(config)
    expected = run_scheduled(one, requests, prefill_token_budget=BUDGET)
    one.close()
    monkeypatch.setattr(NGramRoundDrafter, "propose", propose_on_each)
    monkeypatch.setattr(ForwardPass, "run", noting_run)
    executor = parallel_executor(config, Lockstep(2, monkeypatch), NGramDrafterFactory(NGram(), (2,)))
    drafted: list[int] = []
    tokens = run_scheduled(
        executor,
        requests,
        prefill_token_budget=BUDGET,
        draft_choices=(2,),
        on_step=lambda plan, result: drafted.extend(output.num_drafted for output in result.decode),
    )
    executor.close()
    assert tokens == expected and sum(drafted) > 0
    assert verified[::2] == verified[1::2]


def test_products_have_the_slices_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is part of the bits. Here output and down have four, two of them on each GPU."""
    config = config_of(num_hidden_layers=1, hidden_size=256, intermediate_size=512, head_dim=128)
    asked: dict[tuple[int, int], int | None] = {}
    gemm = TunedTable.gemm

    def noting(table: TunedTable, num_columns: int, inner: int, **options: Any) -> TunedGemm:
        if not options.get("is_gated") and not options.get("is_whole"):
            asked[num_columns, inner] = options["slices"]
        return gemm(table, num_columns, inner, **options)

    monkeypatch.setattr(TunedTable, "gemm", noting)
    executor = parallel_executor(config, Lockstep(2, monkeypatch))
    run_scheduled(executor, [([5], sampling_of(1, 1))], prefill_token_budget=BUDGET)
    executor.close()
    assert asked == {(512, 256): num_slices(1024, 256), (256, 256): num_slices(256, 512) // 2}
    assert num_slices(1024, 256) == 2 and num_slices(256, 512) == 4


def test_a_gpu_that_does_not_come_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Lockstep(2, monkeypatch)
    executor = parallel_executor(config_of(num_hidden_layers=1), group)
    group.is_last_silent = True
    with pytest.raises(ExecutorError, match="GPU 0 of a tensor-parallel model has waited too long"):
        run_scheduled(executor, [([5], sampling_of(1, 2))], prefill_token_budget=BUDGET)
    executor.close()
    assert all(device.is_closed for device in group.devices)


def test_a_replay_that_cannot_be_launched_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Lockstep(2, monkeypatch)
    executor = parallel_executor(config_of(num_hidden_layers=1), group)

    def fail(step: object) -> None:
        raise RuntimeError("no launch")

    monkeypatch.setattr(group, "launch", fail)
    with pytest.raises(ExecutorError, match="no launch"):
        run_scheduled(executor, [([5], sampling_of(1, 2))], prefill_token_budget=BUDGET)
    executor.close()


def test_rounds_are_timed_on_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that all read the first entry of the ring again."""
    group = Lockstep(2, monkeypatch)
    executor = parallel_executor(config_of(num_hidden_layers=1), group)
    expected = executor.round_costs().keys()
    assert expected == {(1, 0), (2, 0)} and group.num_exchanges > 0
    assert [int(gpu.resources.ring.next_index) for gpu in executor._gpus] == [0, 0]
    assert run_scheduled(executor, [([5], sampling_of(1, 2))], prefill_token_budget=BUDGET)
    executor.close()


def test_gpus_wait_for_each_other_for_less_time_than_the_host_for_a_step() -> None:
    assert peer_timeout(None) == peer_timeout(1000.0) == PEER_TIMEOUT_S
    assert peer_timeout(4.0) == 2.0


def test_all_gpus_are_armed_when_the_executor_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none before: their steps are run one after the other at start."""
    limits: list[int] = []
    capture = LockstepDevice.capture

    def noted(device: LockstepDevice, step: Callable[[], None]) -> LockstepReplay:
        limits.extend(int(exchange._memory.limit) for exchange in opened)
        return capture(device, step)

    opened: list[Exchange] = []
    monkeypatch.setattr(LockstepDevice, "capture", noted)
    monkeypatch.setattr(
        parallel_executor_module,
        "open_exchanges",
        lambda *arguments: opened.extend(open_exchanges(*arguments)) or opened,
    )
    executor = parallel_executor(config_of(num_hidden_layers=1), Lockstep(2, monkeypatch), step_timeout_s=4.0)
    assert len(limits) > 0 and set(limits) == {0}
    assert [int(exchange._memory.limit) for exchange in opened] == [2 * 10**9] * 2
    executor.close()
