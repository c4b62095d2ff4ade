"""Rounds that a model's own MTP layer drafts: both executors draft, accept and emit the same tokens. The
kernels in CUDA C++ are replaced by their reference."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from interpreted_device import InterpretedDevice
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_after
from tiny_llama import tiny_hybrid

from drift_sdk._kernels.gemm.tuning import WatchedTable
from drift_sdk.execution.drafter_factory import EagleDrafterFactory
from drift_sdk.execution.eager.drafters import EagleDrafter
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.forward import draft as draft_forward
from drift_sdk.execution.forward import latent_attention
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_decoder
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.rounds.eagle import EagleRoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder, random_mtp
from drift_sdk.quantised.formats import quantise_fp8
from drift_sdk.quantised.weight import dense
from drift_sdk.startup.graph_startup import weights_to_tune
from drift_sdk.steps import ExecutorLimits, SlotSampling, StepResult

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.usefixtures("gated_delta_reference"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: kernels run on the CPU"),
]

DENSE = tiny_hybrid(mtp_num_hidden_layers=1)
EXPERTS = DENSE | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
NEXT = EXPERTS | {"model_type": "qwen3_next", "mlp_only_layers": [0], "norm_topk_prob": False}
NEXT.pop("mtp_num_hidden_layers")
PLAIN_BEHIND = EXPERTS | {
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": True,
    "attention_bias": True,
}
LATENTS = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "num_attention_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
GROUPS = LATENTS | {
    "model_type": "deepseek_v3",
    "mlp_layer_types": None,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "attention_bias": True,
    "n_group": 3,
    "topk_group": 2,
}
LIMITS = ExecutorLimits(vocab_size=40, max_num_seqs=3, max_model_len=128, num_blocks=24, block_size=16)
BUDGET, NUM_CHECKPOINTS, NUM_DRAFTS = 48, 4, 2

Request = tuple[list[int], SlotSampling]
Drafts = list[tuple[int, ...]]


def models(settings: dict[str, Any], *, draft_seed: int = 4) -> tuple[Decoder, DraftDecoder]:
    target = Decoder.random(read_spec(settings), device="cpu", dtype=torch.float32, seed=3)
    draft = random_mtp(target, draft_seed)
    generator = torch.Generator().manual_seed(5)
    norms = {
        name: torch.empty_like(getattr(draft.weights, name)).normal_(0.0, 0.5, generator=generator)
        for name in ("embedding_norm", "hidden_norm", "final_norm")
    }
    draft.weights = dataclasses.replace(draft.weights, **norms)
    return target, draft


def requests_of() -> list[Request]:
    """Prompts of which some begin alike, one goes on from a checkpoint, and one is a single token."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, 40) for _ in range(number)]

    shared = tokens(40)
    prompts = [[*shared, *tokens(12)], tokens(1), [*shared, *tokens(3)], [*shared, *tokens(30)]]
    return [(prompt, sampling_of(len(prompt), 11)) for prompt in prompts]


def run(executor: EagerExecutor | GraphExecutor) -> tuple[list[list[int]], list[StepResult]]:
    results: list[StepResult] = []
    tokens = run_scheduled(
        executor,
        requests_of(),
        prefill_token_budget=BUDGET,
        draft_choices=(0, NUM_DRAFTS),
        has_draft_kv=True,
        num_checkpoints=NUM_CHECKPOINTS,
        on_step=lambda plan, result: results.append(result),
    )
    executor.close()
    return tokens, results


def graph_executor(target: Decoder, draft: DraftDecoder, table: WatchedTable) -> GraphExecutor:
    options = GraphOptions(prefill_token_budget=BUDGET, num_checkpoints=NUM_CHECKPOINTS)
    factory = EagleDrafterFactory(draft, (NUM_DRAFTS,))
    return GraphExecutor(InterpretedDevice(), target, LIMITS, table, options, drafter_factory=factory)


def note_drafts(monkeypatch: pytest.MonkeyPatch) -> tuple[Drafts, Drafts]:
    """The drafts of the eager and of the graph executor, in order."""
    of_eager: Drafts = []
    of_graph: Drafts = []
    propose, propose_rows = EagleDrafter.propose, EagleRoundDrafter.propose

    def eager(self: EagleDrafter, *inputs: Any) -> Any:
        drafts = propose(self, *inputs)
        of_eager.extend(tuple(draft.token_ids) for draft in drafts if draft.token_ids)
        return drafts

    def graph(self: EagleRoundDrafter, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        propose_rows(self, rows, num_slots=num_slots, num_draft_tokens=num_draft_tokens)
        tokens, slots = (each.view(num_slots, -1)[:, 1:] for each in (rows.token, rows.slot))
        drafts = [tuple(own[slot >= 0].tolist()) for own, slot in zip(tokens, slots, strict=True)]
        of_graph.extend(draft for draft in drafts if draft)

    monkeypatch.setattr(EagleDrafter, "propose", eager)
    monkeypatch.setattr(EagleRoundDrafter, "propose", graph)
    return of_eager, of_graph


@pytest.mark.parametrize(
    "settings",
    slow_after(1, [LATENTS, DENSE, EXPERTS, GROUPS, NEXT, PLAIN_BEHIND]),
    ids=["latents", "dense", "experts", "groups", "next", "plain behind"],
)
def test_rounds_equal_those_of_the_eager_executor(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seeds with which some drafts of each are accepted by chance.
    target, draft = models(settings, draft_seed=7 if settings is DENSE else 4)
    plain, _ = run(EagerExecutor(target, LIMITS))
    of_eager, of_graph = note_drafts(monkeypatch)
    expected, expected_results = run(EagerExecutor(target, LIMITS, EagleDrafter(draft, target, LIMITS)))
    assert expected == plain
    table = WatchedTable()
    found, results = run(graph_executor(target, draft, table))
    assert found == expected
    assert of_graph == of_eager
    assert sum(each.num_accepted for result in expected_results for each in result.decode) > 0
    assert len(set(of_eager)) > 10 and any(len(drafts) == NUM_DRAFTS for drafts in of_eager)
    for result, other in zip(results, expected_results, strict=True):
        pairs = zip(result.decode, other.decode, strict=True)
        assert all((a.num_drafted, a.num_accepted) == (b.num_drafted, b.num_accepted) for a, b in pairs)
    assert table.used == {weight.key for weight in weights_to_tune(target.weights, draft.weights)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["gate", "norm", "joint"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models(DENSE)
    of_eager, of_graph = note_drafts(monkeypatch)
    run(EagerExecutor(target, LIMITS, EagleDrafter(draft, target, LIMITS)))
    add_norm = draft_forward.add_norm
    if fault == "gate":
        monkeypatch.setattr(draft_forward, "gate_attention", lambda attended, gate: None)
    elif fault == "norm":
        monkeypatch.setattr(
            draft_forward, "add_norm", lambda *inputs, norm_kind, **rest: add_norm(*inputs, **rest)
        )
    else:
        monkeypatch.setattr(draft_forward, "_residual", lambda config: "feature")
    run(graph_executor(target, draft, WatchedTable()))
    assert of_graph != of_eager


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["first key", "place", "output", "head norm"])
def test_planted_faults_of_latents_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models(LATENTS)
    of_eager, of_graph = note_drafts(monkeypatch)
    run(EagerExecutor(target, LIMITS, EagleDrafter(draft, target, LIMITS)))
    heads = draft_forward.LatentHeads
    if fault == "first key":  # the place before the first row, which is never written, is seen
        monkeypatch.setattr(torch, "empty", torch.zeros)
        monkeypatch.setattr(draft_forward, "DRAFT_KV_OFFSET", 0)
    elif fault == "place":  # keys are rotated by their places, queries by theirs less one

        def split(product: Any, slot: Any, position: torch.Tensor, *rest: Any) -> None:
            split_queries(product, slot, (position - 1).clamp(min=0), *rest)

        split_queries = latent_attention.split_queries
        monkeypatch.setattr(latent_attention, "split_queries", split)
    elif fault == "output":  # the residual stream is the next feature
        monkeypatch.setattr(
            draft_forward.DraftForward, "output", lambda self, num_rows: self.hidden(num_rows)
        )
    else:
        run_heads = heads.run

        def without_norm(self: Any, x: Any, weights: Any, *rest: Any) -> torch.Tensor:
            ones = torch.ones_like(weights.latent_norm)
            return run_heads(self, x, dataclasses.replace(weights, latent_norm=2 * ones), *rest)

        monkeypatch.setattr(heads, "run", without_norm)
    run(graph_executor(target, draft, WatchedTable()))
    assert of_graph != of_eager


def test_a_quantised_head_is_arranged_once() -> None:
    """Target and draft have the same, and the same embedding."""
    target = Decoder.random(read_spec(DENSE | {"hidden_size": 64}), device="cpu", dtype=torch.float32, seed=3)
    target.weights = dataclasses.replace(target.weights, head=quantise_fp8(dense(target.weights.head)))
    draft = random_mtp(target)
    arrange_decoder(target, draft)
    assert isinstance(target.weights.head, KernelWeight)
    assert draft.weights.head is target.weights.head
    assert draft.weights.embedding is target.weights.embedding
