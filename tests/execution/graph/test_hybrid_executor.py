"""The graph executor with recurrent layers against the eager executor: chunks cut anywhere, checkpoints,
drafts that are rejected. The kernels in CUDA C++ are replaced by their reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from interpreted_device import InterpretedDevice
from kept_rows import keep_rejected_inputs
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_after
from tiny_llama import tiny_hybrid
from tolerances import bound

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.speculation import NGram
from drift_sdk.steps import ExecutorLimits, SlotSampling, StepPlan, StepResult

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.usefixtures("gated_delta_reference"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: kernels run on the CPU"),
]

CONFIG = tiny_hybrid(
    vocab_size=120,
    intermediate_size=32,
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
)
LIMITS = ExecutorLimits(vocab_size=120, max_num_seqs=3, max_model_len=128, num_blocks=24, block_size=16)
BUDGET = 48
NUM_CHECKPOINTS = 4
LOGPROB_BOUND = bound(16.0, inner=80, depth=12)

Request = tuple[list[int], SlotSampling]
Step = tuple[StepPlan, StepResult]


@pytest.fixture
def decoder() -> Decoder:
    return Decoder.random(read_spec(CONFIG), device="cpu", dtype=torch.float32, seed=3)


def requests_of(num_tokens: int) -> list[Request]:
    """Prompts that end before, at and behind borders; three of them begin alike, so that the third goes on
    from a checkpoint."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, 120) for _ in range(number)]

    shared, repeated = tokens(40), tokens(5) * 6
    prompts = [[*shared, *tokens(12)], tokens(1), [*shared, *tokens(3)], repeated, [*shared, *tokens(30)]]
    prompts.append(tokens(1))  # in a slot whose last border was another one
    return [(prompt, sampling_of(len(prompt), num_tokens, num_logprobs=1)) for prompt in prompts]


def run(
    executor: EagerExecutor | GraphExecutor, requests: list[Request], *, num_drafts: int = 0
) -> tuple[list[list[int]], list[Step]]:
    steps: list[Step] = []
    tokens = run_scheduled(
        executor,
        requests,
        prefill_token_budget=BUDGET,
        draft_choices=(0, num_drafts) if num_drafts else (),
        wants_history=num_drafts > 0,
        num_checkpoints=NUM_CHECKPOINTS,
        on_step=lambda plan, result: steps.append((plan, result)),
    )
    executor.close()
    return tokens, steps


def graph_executor(decoder: Decoder, num_drafts: int = 0, **options: object) -> GraphExecutor:
    found = GraphOptions(prefill_token_budget=BUDGET, num_checkpoints=NUM_CHECKPOINTS, **options)
    factory = (
        {"drafter_factory": NGramDrafterFactory(NGram(min_length=1), (num_drafts,))} if num_drafts else {}
    )
    return GraphExecutor(InterpretedDevice(), decoder, LIMITS, TunedTable(), found, **factory)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is not initialised has NaN."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        found = empty(*args, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    with mock.patch.object(torch, "empty", poisoned):
        yield


@pytest.mark.parametrize("fast_prompts", slow_after(1, [False, True]))
def test_steps_equal_those_of_the_eager_executor(decoder: Decoder, fast_prompts: bool) -> None:
    requests = requests_of(3)
    expected_tokens, expected = run(EagerExecutor(decoder, LIMITS), requests)
    with poisoned_memory():
        executor = graph_executor(decoder, fast_prompts=fast_prompts)
    mixed = executor._graphs.mixed.values()
    tokens, found = run(executor, requests)
    assert tokens == expected_tokens
    assert fast_prompts or sum(replay.num_launches for replay in mixed) > 0
    for (plan, result), (expected_plan, expected_result) in zip(found, expected, strict=True):
        assert plan == expected_plan
        outputs, others = result.prefill + result.decode, expected_result.prefill + expected_result.decode
        for output, other in zip(outputs, others, strict=True):
            assert output.token_ids == other.token_ids
            for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=LOGPROB_BOUND)
    plans = [plan for plan, _ in expected]
    assert sum(len(chunk.checkpoints) for plan in plans for chunk in plan.prefill) > 1
    assert any(each.checkpoint is not None for plan in plans for each in plan.assignments)


@pytest.mark.slow
def test_rejected_drafts_leave_no_trace(decoder: Decoder) -> None:
    requests = requests_of(14)
    expected, _ = run(EagerExecutor(decoder, LIMITS), requests)
    with poisoned_memory():
        executor = graph_executor(decoder, 2)
    tokens, steps = run(executor, requests, num_drafts=2)
    assert tokens == expected
    outputs = [output for _, result in steps for output in result.decode]
    drafted, accepted = (
        sum(getattr(each, name) for each in outputs) for name in ("num_drafted", "num_accepted")
    )
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_a_rejected_row_in_a_state_is_noticed(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts there is none."""
    requests = requests_of(14)
    expected, _ = run(EagerExecutor(decoder, LIMITS), requests)
    keep_rejected_inputs(monkeypatch)
    plain, _ = run(graph_executor(decoder), requests)
    assert plain == expected
    found, _ = run(graph_executor(decoder, 2), requests, num_drafts=2)
    assert found != expected
