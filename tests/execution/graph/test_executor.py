"""The graph executor against the eager executor: same scheduler, same requests, same steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreted_device import InterpretedDevice
from model_zoo import make_model
from numpy.typing import NDArray
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_rows_after
from tolerances import bound

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_decoder
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVScales
from drift_sdk.quantised.formats import quantise_fp8
from drift_sdk.quantised.weight import dense
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import Executor, ExecutorLimits, SlotOutput, SlotSampling, StepPlan, StepResult

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
NUM_TOKENS = 12 if IS_GPU else 3
LOGPROB_BOUND = bound(16.0, inner=80, depth=4)


def tiny(family: str, num_layers: int, heads: tuple[int, int, int], **more: object) -> dict[str, object]:
    num_heads, num_kv_heads, head_dim = heads
    return {
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "rope_theta": 1000.0,
        **more,
    }


# Every program of every kernel is interpreted, so these models have few. A GPU runs models of the zoo.
TINY_MODELS = {
    "llama": tiny("llama", 2, (3, 1, 8), tie_word_embeddings=True),
    "qwen2": tiny("qwen2", 1, (2, 2, 16)),
    "qwen3": tiny("qwen3", 1, (4, 2, 6)),
    "gpt_oss": tiny(
        "gpt_oss",
        1,
        (2, 1, 8),
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        quantization_config={"quant_method": "mxfp4"},
    ),
}
ON_CPU = ("llama", "qwen2", "qwen3")
MODELS: list[str | int] = [0, 13, 20, 26, 28, 29, 30, 31, 32, "gpt_oss"] if IS_GPU else [*ON_CPU]

Request = tuple[list[int], SlotSampling]
Step = tuple[StepPlan, StepResult]


def load(model: str | int, folder: Path) -> Decoder:
    """A tiny model by its family, or one of the zoo by its number."""
    if isinstance(model, str):
        config = read_spec(TINY_MODELS[model])
        device = "cuda" if IS_GPU else "cpu"
        return Decoder.random(config, device=device, dtype=torch.float32, seed=1)

    make_model(model, folder)
    source = resolve(str(folder), revision=None, cache_dir=None, local_files_only=True)
    config = read_spec(source.config)
    return Decoder.load(config, source.tensors(), device="cuda", dtype=torch.float32)


def limits_of(decoder: Decoder) -> ExecutorLimits:
    return ExecutorLimits(
        vocab_size=decoder.spec.vocab_size, max_num_seqs=3, max_model_len=32, num_blocks=24, block_size=4
    )


def graph_executor(decoder: Decoder, limits: ExecutorLimits, budget: int, **options: object) -> GraphExecutor:
    device = GpuDevice(0) if IS_GPU else InterpretedDevice()
    return GraphExecutor(
        device, decoder, limits, TunedTable(), GraphOptions(prefill_token_budget=budget, **options)
    )


def requests_of(seed: int) -> list[Request]:
    rng = random.Random(seed)

    def random_tokens(number: int) -> list[int]:
        return [rng.randrange(3, 200) for _ in range(number)]

    shared = random_tokens(9)
    stops = tuple(range(0, 300, 2))
    return [
        request(random_tokens(10), logit_bias=((17, 0.5), (40, -0.5))),
        request([*shared, 7], temperature=0.8, top_p=0.9, seed=3, num_logprobs=2, num_prompt_logprobs=2),
        request([5], temperature=1.0, top_k=5, seed=2**40 + 1, stop_token_ids=stops),
        request([*shared, 9, 11], repetition_penalty=1.4, frequency_penalty=0.5, num_logprobs=0),
        request(random_tokens(6), allowed_token_ids=(17, 18, 19, 40), presence_penalty=0.7, num_logprobs=1),
        request([*shared[:3], 8], num_prompt_logprobs=1, stop_token_ids=stops, min_length=6),
    ]


def request(prompt: list[int], **changes: object) -> Request:
    return prompt, sampling_of(len(prompt), NUM_TOKENS, **changes)


def run(executor: Executor, requests: list[Request], budget: int) -> tuple[list[list[int]], list[Step]]:
    steps: list[Step] = []
    tokens = run_scheduled(
        executor,
        requests,
        prefill_token_budget=budget,
        on_step=lambda plan, result: steps.append((plan, result)),
    )
    executor.close()
    return tokens, steps


# The interpreter is slow, so two cases are left out: the families differ in a bias and two norms, which both
# ways of prefill compute. Experts are left to a GPU and to tests/execution/forward.
CASES = [
    (model, is_exact)
    for model in MODELS
    for is_exact in (False, True)
    if IS_GPU or (model, is_exact) not in (("qwen2", True), ("qwen3", False))
]


@pytest.mark.parametrize(("model", "is_exact"), slow_rows_after(2, CASES))
def test_steps_equal_those_of_the_eager_executor(model: str | int, is_exact: bool, tmp_path: Path) -> None:
    decoder = load(model, tmp_path)
    limits, requests = limits_of(decoder), requests_of(MODELS.index(model))
    # Chunks of exact prefill fill whole tiles of rows.
    budget = 8 if is_exact else 16
    expected_tokens, expected = run(EagerExecutor(decoder, limits), requests, budget)
    executor = graph_executor(decoder, limits, budget, fast_prompts=not is_exact)
    tokens, found = run(executor, requests, budget)
    assert tokens == expected_tokens
    for (plan, result), (expected_plan, expected_result) in zip(found, expected, strict=True):
        assert plan == expected_plan
        for output, other in zip(result.prefill, expected_result.prefill, strict=True):
            compare(output, other)
        for output, other in zip(result.decode, expected_result.decode, strict=True):
            compare(output, other)

    check_that_all_occurred(expected)


def test_steps_with_quantised_weights_equal_those_of_the_eager_executor() -> None:
    """The head is quantised too, as files may store it."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    config = read_spec(tiny("qwen2", 1, (2, 1, 32), **sizes))
    decoder = Decoder.random(config, device="cuda" if IS_GPU else "cpu", dtype=torch.float32, form="int4")
    decoder.weights = replace(decoder.weights, head=quantise_fp8(dense(decoder.weights.head)))
    limits, requests = limits_of(decoder), requests_of(0)[1:3]
    expected_tokens, expected = run(EagerExecutor(decoder, limits), requests, 16)
    arrange_decoder(decoder)
    assert isinstance(decoder.weights.head, KernelWeight)
    tokens, found = run(graph_executor(decoder, limits, 16), requests, 16)
    assert tokens == expected_tokens
    for (_, result), (_, expected_result) in zip(found, expected, strict=True):
        for output, other in zip(result.decode, expected_result.decode, strict=True):
            compare(output, other)


@pytest.mark.parametrize("is_exact", [False, True])
def test_steps_with_a_cache_of_e4m3_are_near_those_of_the_eager_executor(is_exact: bool) -> None:
    """A key that lies between two codes may be rounded to either: sums differ in the last bits."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = read_spec(TINY_MODELS["llama"] | sizes)
    device = torch.device("cuda" if IS_GPU else "cpu")
    decoder = Decoder.random(config, device=device, dtype=torch.float32, kv_form="fp8", seed=1)
    scales = [torch.tensor([numbers], device=device) for numbers in ((0.3, 0.01), (1.5, 0.02))]
    decoder.weights = replace(decoder.weights, kv_scales=KVScales(*scales))
    limits, requests = limits_of(decoder), requests_of(0)[1:4:2]
    expected_tokens, expected = run(EagerExecutor(decoder, limits), requests, 8)
    tokens, found = run(graph_executor(decoder, limits, 8, fast_prompts=not is_exact), requests, 8)
    assert tokens == expected_tokens
    for (_, result), (_, expected_result) in zip(found, expected, strict=True):
        for output, other in zip(result.decode, expected_result.decode, strict=True):
            for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=0.01)


def compare(found: SlotOutput, expected: SlotOutput) -> None:
    assert found.token_ids == expected.token_ids
    assert found.finish == expected.finish
    # A slot that had finished before has None or ().
    compare_logprobs(found.logprobs or None, expected.logprobs or None)
    compare_logprobs(found.prompt_logprobs, expected.prompt_logprobs)


def compare_logprobs(
    found: tuple[TokenLogprobs, ...] | None, expected: tuple[TokenLogprobs, ...] | None
) -> None:
    assert (found is None) == (expected is None)
    for entry, other in zip(found or (), expected or (), strict=True):
        assert entry.token_id == other.token_id
        assert entry.logprob == pytest.approx(other.logprob, abs=LOGPROB_BOUND)
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]
        values, others = ([value for _, value in one.top] for one in (entry, other))
        assert values == pytest.approx(others, abs=LOGPROB_BOUND)


def check_that_all_occurred(steps: list[Step]) -> None:
    """Check that the steps contained chunked prompts, prefix hits, reused slots, both finish reasons, prefill
    and decode rows in one step, and log-probabilities of both kinds."""
    plans = [plan for plan, _ in steps]
    chunks = [chunk for plan in plans for chunk in plan.prefill]
    assignments = [assignment for plan in plans for assignment in plan.assignments]
    outputs = [output for _, result in steps for output in (*result.prefill, *result.decode)]
    assert any(not chunk.is_last for chunk in chunks)
    assert any(assignment.cached_token_ids for assignment in assignments)
    assert len({assignment.slot for assignment in assignments}) < len(assignments)
    assert {output.finish for output in outputs} == {None, "stop", "length"}
    assert any(plan.prefill and plan.decode for plan in plans)
    assert any(output.logprobs for output in outputs) and any(output.prompt_logprobs for output in outputs)


class Counted:
    """A constraint that is never advanced: token 7 is next, and 8 wherever a row is launched ahead."""

    is_slow = False

    def masks(self, draft_token_ids: Sequence[int]) -> NDArray[np.int32]:
        return only(7)[np.newaxis]

    def mask_ahead(self) -> NDArray[np.int32]:
        return only(8)


def only(token_id: int) -> NDArray[np.int32]:
    words = np.zeros(10, np.int32)
    words[token_id // 32] = 1 << token_id % 32
    return words


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_launched_ahead_has_its_own_mask(depth: int) -> None:
    """Also beside a prompt, in a mixed step."""
    decoder = load("qwen2", Path())
    executor = graph_executor(decoder, limits_of(decoder), 8)
    requests = [request([5, 6, 9]), request([9] * 12), request([4, 3])]
    found = run_scheduled(
        executor,
        requests,
        prefill_token_budget=8,
        depth=depth,
        constraints={0: Counted(), 2: Counted()},
    )
    executor.close()
    expected = [7, *[7 if depth == 1 else 8] * (NUM_TOKENS - 1)]
    assert found[0] == found[2] == expected and {7, 8}.isdisjoint(found[1])
