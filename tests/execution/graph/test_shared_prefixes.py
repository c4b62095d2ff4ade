"""Steps of sequences that share a prefix: the same tokens and log-probabilities as without sharing."""

from __future__ import annotations

import pytest
import torch
from interpreted_device import InterpretedDevice
from scheduled_run import run_scheduled, sampling_of
from tiny_llama import tiny_llama

from drift_sdk._kernels.attention.plan import AttentionPlan, BlockTable, PlannedRows, plan_attention
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.forward import attention
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import ExecutorLimits, StepPlan, StepResult

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("steady_dots")]

IS_GPU = torch.cuda.is_available()
LIMITS = ExecutorLimits(max_num_seqs=3, max_model_len=192, num_blocks=36, block_size=16, vocab_size=64)
BUDGET = 16


def test_sequences_that_share_a_prefix_get_the_bits_of_each_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences with 144 tokens in common, and a fourth in the slot of one that has ended."""
    config = read_spec(tiny_llama(max_position_embeddings=192))
    decoder = Decoder.random(config, device="cuda" if IS_GPU else "cpu", dtype=torch.float32, seed=1)
    prefix = [(7 * index) % 61 + 3 for index in range(144)]
    prompts = [[*prefix, 5 + index] for index in range(4)]
    requests = [
        (prompt, sampling_of(len(prompt), num_tokens, num_logprobs=1))
        for prompt, num_tokens in zip(prompts, (12, 4, 8, 4), strict=True)
    ]
    found: set[tuple[int, ...]] = set()
    plans: dict[tuple[int, int], AttentionPlan] = {}  # by identity and number of sequences

    def note_companions() -> None:
        """After a step, because nothing can be read from a GPU while a step is captured."""
        for (_, number), plan in plans.items():
            num_keys = plan.shared.num_keys[:number].tolist()
            companions = plan.shared.companions[:number].tolist()
            found.update(tuple(row) for row, keys in zip(companions, num_keys, strict=True) if keys)

    def run(is_shared: bool) -> tuple[list[list[int]], list[tuple[TokenLogprobs, ...] | None]]:
        def plan(
            rows: PlannedRows, plan: AttentionPlan, blocks: BlockTable | None = None, group: int = 1
        ) -> None:
            plan_attention(rows, plan, blocks if is_shared else None, group)
            if is_shared and blocks is not None and rows.num_sequences > 1:
                plans[id(plan), rows.num_sequences] = plan

        monkeypatch.setattr(attention, "plan_attention", plan)
        device = GpuDevice(0) if IS_GPU else InterpretedDevice()
        executor = GraphExecutor(
            device, decoder, LIMITS, TunedTable(), GraphOptions(prefill_token_budget=BUDGET)
        )
        logprobs: list[tuple[TokenLogprobs, ...] | None] = []

        def on_step(_: StepPlan, result: StepResult) -> None:
            logprobs.extend(output.logprobs for output in result.decode)
            note_companions()

        tokens = run_scheduled(executor, requests, prefill_token_budget=BUDGET, on_step=on_step)
        plans.clear()
        executor.close()
        return tokens, logprobs

    assert run(is_shared=True) == run(is_shared=False)
    assert any(row[2] >= 0 for row in found)  # all three were companions
