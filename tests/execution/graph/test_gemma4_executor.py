"""The graph executor with models of the kinds of Gemma 4 against the eager executor: heads of two sizes, keys
that are values, layers that read the keys of others, inputs of layers, experts beside an MLP."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_after, slow_rows_after
from tolerances import bound

from drift_sdk._kernels.gemm.tuning import TunedTable, WatchedTable
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.forward.kernel_weights import arrange_decoder
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.speculation import NGram
from drift_sdk.startup.graph_startup import weights_to_tune
from drift_sdk.steps import ExecutorLimits, SlotOutput, SlotSampling

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "sliding_window": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
KINDS = {
    "12B and 31B": COMMON,
    "26B": COMMON
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
        "num_key_value_heads": 1,
    },
    "E2B and E4B": COMMON
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 120,
    },
    "wide heads": COMMON | {"num_key_value_heads": 4, "global_head_dim": 264},
}
LIMITS = ExecutorLimits(vocab_size=120, max_num_seqs=3, max_model_len=72, num_blocks=32, block_size=8)
BUDGET = 24
NO_TABLE = TunedTable()
LOGPROB_BOUND = bound(16.0, inner=280, depth=12)

Request = tuple[list[int], SlotSampling]


def requests_of(num_tokens: int) -> list[Request]:
    """Prompts shorter and longer than the window and than a step; three begin alike, one repeats itself."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, 120) for _ in range(number)]

    shared = tokens(19)
    prompts = [[*shared, *tokens(8)], tokens(1), [*shared, *tokens(3)], tokens(4) * 4, [*shared, *tokens(30)]]
    return [(prompt, sampling_of(len(prompt), num_tokens, num_logprobs=1)) for prompt in prompts]


def run(
    executor: EagerExecutor | GraphExecutor, requests: list[Request], *, num_drafts: int = 0
) -> tuple[list[list[int]], list[SlotOutput]]:
    outputs: list[SlotOutput] = []
    tokens = run_scheduled(
        executor,
        requests,
        prefill_token_budget=BUDGET,
        draft_choices=(0, num_drafts) if num_drafts else (),
        wants_history=num_drafts > 0,
        on_step=lambda plan, result: outputs.extend([*result.prefill, *result.decode]),
    )
    executor.close()
    return tokens, outputs


def graph_executor(
    decoder: Decoder, num_drafts: int = 0, table: TunedTable = NO_TABLE, **options: bool
) -> GraphExecutor:
    found = GraphOptions(prefill_token_budget=BUDGET, **options)
    factory = {}
    if num_drafts:
        factory = {"drafter_factory": NGramDrafterFactory(NGram(min_length=1), (num_drafts,))}
    return GraphExecutor(InterpretedDevice(), decoder, LIMITS, table, found, **factory)


def decoder_of(kind: str) -> Decoder:
    return drawn_decoder(read_spec(KINDS[kind]), DEVICE, seed=3)


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize(
    ("kind", "fast_prompts"),
    slow_rows_after(len(KINDS) + 1, [(kind, is_fast) for is_fast in (False, True) for kind in KINDS]),
)
def test_steps_equal_those_of_the_eager_executor(kind: str, fast_prompts: bool) -> None:
    decoder, requests = decoder_of(kind), requests_of(3)
    expected_tokens, expected = run(EagerExecutor(decoder, LIMITS), requests)
    arrange_decoder(decoder)
    table = WatchedTable(element_bytes=4)
    executor = graph_executor(decoder, table=table, fast_prompts=fast_prompts)
    mixed = executor._graphs.mixed.values()
    tokens, found = run(executor, requests)
    assert tokens == expected_tokens
    assert sum(replay.num_launches for replay in mixed) > 0
    assert table.used == {weight.key for weight in weights_to_tune(decoder.weights, None)}
    for output, other in zip(found, expected, strict=True):
        assert output.token_ids == other.token_ids
        for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=LOGPROB_BOUND)


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_rejected_drafts_change_no_token(kind: str) -> None:
    decoder, requests = decoder_of(kind), requests_of(8)
    expected, _ = run(EagerExecutor(decoder, LIMITS), requests)
    tokens, outputs = run(graph_executor(decoder, 2), requests, num_drafts=2)
    assert tokens == expected
    drafted, accepted = (
        sum(getattr(each, name) for each in outputs) for name in ("num_drafted", "num_accepted")
    )
    assert 0 < accepted < drafted


@pytest.mark.usefixtures("steady_dots")
@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_tokens_have_the_bits_that_they_have_alone(kind: str) -> None:
    """Beside other rows, behind prefix hits, in other chunks, and verified with drafts."""
    decoder, requests = decoder_of(kind), requests_of(5)
    alone = Counter(
        each for request in requests for each in scored(run(graph_executor(decoder), [request])[1])
    )
    assert alone.total() == 5 * len(requests)
    assert Counter(scored(run(graph_executor(decoder), requests)[1])) == alone
    _, outputs = run(graph_executor(decoder, 2), requests, num_drafts=2)
    assert Counter(scored(outputs)) == alone
    assert sum(each.num_accepted for each in outputs) > 0


def scored(outputs: list[SlotOutput]) -> list[tuple[int, float]]:
    """All tokens, with their log-probabilities."""
    return [(entry.token_id, entry.logprob) for each in outputs for entry in each.logprobs or ()]
