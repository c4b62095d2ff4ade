"""The graph executor with latent attention against the eager executor: chunks, mixed steps, and drafts of
n-grams and of EAGLE-3 that are accepted and rejected."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec.structs
import pytest
import torch
from draft_zoo import make_draft
from family_zoo import draw_model
from gguf import GGMLQuantizationType
from hybrid_parity import load
from interpreted_device import InterpretedDevice
from latent_gguf import write_latent_gguf
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_after
from tolerances import bound

from drift_sdk import EngineConfig
from drift_sdk._kernels.experts.routing import ExpertRows, choose_experts, list_rows
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.stages import NO_STAGE_MARKS
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DrafterFactory,
    EagleDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.forward import attention, channels, latent_attention
from drift_sdk.execution.forward.kernel_weights import KernelWeight, arrange_decoder
from drift_sdk.execution.graph.gpu_graphs import GraphOptions, StartupHooks
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.models.kv_cache import KVScales
from drift_sdk.scheduling import planning
from drift_sdk.spec.model import Router
from drift_sdk.speculation import NGram
from drift_sdk.startup.executor_factory import _graph_options
from drift_sdk.steps import EXPANDED_TILE, ExecutorLimits, SlotSampling, StepPlan, StepResult

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: kernels run on the CPU"),
]

CONFIG: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
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
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
EXPANDED = CONFIG | {"v_head_dim": 20}
NO_RANK = CONFIG | {"q_lora_rank": None, "attention_bias": True, "num_attention_heads": 5}
LIMITS = ExecutorLimits(vocab_size=96, max_num_seqs=3, max_model_len=96, num_blocks=24, block_size=16)
BUDGET, NUM_DRAFTS = 32, 2
LOGPROB_BOUND = bound(16.0, inner=80, depth=12)

Step = tuple[StepPlan, StepResult]


def decoder_of(config: dict[str, Any]) -> Decoder:
    return Decoder.random(read_spec(config), device="cpu", dtype=torch.float32, seed=3)


def decoder_in_fp8() -> Decoder:
    """With a KV cache of e4m3, whose scales differ between layers. Latents have no scale of values."""
    decoder = decoder_of(CONFIG)
    scales = KVScales(torch.tensor([[0.02], [0.3], [0.007]]), torch.full((3, 1), torch.nan))
    decoder.weights = replace(decoder.weights, kv_scales=scales)
    return decoder


def requests_of(num_tokens: int) -> list[tuple[list[int], SlotSampling]]:
    """Prompts of several lengths; two of them begin alike, and one repeats itself."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, 96) for _ in range(number)]

    shared = tokens(34)
    prompts = [[*shared, *tokens(5)], tokens(1), [*shared, *tokens(12)], tokens(5) * 5, tokens(2)]
    return [(prompt, sampling_of(len(prompt), num_tokens, num_logprobs=1)) for prompt in prompts]


def run(
    executor: EagerExecutor | GraphExecutor,
    num_tokens: int,
    *,
    num_drafts: int = 0,
    has_history: bool = False,
) -> tuple[list[list[int]], list[Step]]:
    steps: list[Step] = []
    tokens = run_scheduled(
        executor,
        requests_of(num_tokens),
        prefill_token_budget=BUDGET,
        draft_choices=(0, num_drafts) if num_drafts else (),
        wants_history=has_history,
        on_step=lambda plan, result: steps.append((plan, result)),
    )
    executor.close()
    return tokens, steps


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is not initialised has NaN."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        found = empty(*args, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    with mock.patch.object(torch, "empty", poisoned):
        yield


def graph_executor(decoder: Decoder, factory: DrafterFactory = NO_DRAFTER) -> GraphExecutor:
    options = GraphOptions(prefill_token_budget=BUDGET)
    with poisoned_memory():
        return GraphExecutor(
            InterpretedDevice(), decoder, LIMITS, TunedTable(), options, drafter_factory=factory
        )


@pytest.mark.parametrize("config", slow_after(1, [CONFIG, NO_RANK]), ids=("ranks", "no rank"))
def test_steps_equal_those_of_the_eager_executor(config: dict[str, Any]) -> None:
    decoder = decoder_of(config)
    expected_tokens, expected = run(EagerExecutor(decoder, LIMITS), 4)
    executor = graph_executor(decoder)
    mixed = executor._graphs.mixed.values()
    tokens, found = run(executor, 4)
    assert tokens == expected_tokens
    assert len({token for each in tokens for token in each}) > 8
    assert sum(replay.num_launches for replay in mixed) > 0
    for (plan, result), (expected_plan, expected_result) in zip(found, expected, strict=True):
        assert plan == expected_plan
        outputs, others = result.prefill + result.decode, expected_result.prefill + expected_result.decode
        for output, other in zip(outputs, others, strict=True):
            for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=LOGPROB_BOUND)


@pytest.fixture
def _expands_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts are expanded too, but for their last tokens."""
    monkeypatch.setattr(planning, "MIN_EXPANDED_PROMPT", 2)
    monkeypatch.setattr(planning, "EXPANDED_BORDER", 4)


@pytest.mark.usefixtures("_expands_all")
def test_expanded_prompts_equal_those_of_the_eager_executor() -> None:
    decoder = decoder_of(EXPANDED)
    expected_tokens, expected = run(EagerExecutor(decoder, LIMITS), 4)
    executor = graph_executor(decoder)
    mixed = executor._graphs.mixed.values()
    tokens, found = run(executor, 4)
    assert tokens == expected_tokens
    assert len({token for each in tokens for token in each}) > 8
    assert sum(replay.num_launches for replay in mixed) > 0
    chunks = [(chunk, bool(plan.decode)) for plan, _ in found for chunk in plan.prefill]
    assert {is_mixed for chunk, is_mixed in chunks if chunk.num_expanded} == {False, True}
    assert any(0 < chunk.num_expanded < len(chunk.token_ids) for chunk, _ in chunks)
    assert any(chunk.start and chunk.num_expanded for chunk, _ in chunks)
    for (_, result), (_, expected_result) in zip(found, expected, strict=True):
        outputs, others = result.prefill + result.decode, expected_result.prefill + expected_result.decode
        for output, other in zip(outputs, others, strict=True):
            for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=LOGPROB_BOUND)


@pytest.mark.usefixtures("_expands_all", "steady_dots")
def test_expanded_prompts_have_the_same_bits_alone_and_in_a_crowd() -> None:
    """The last prompt is another one with its answer, of which no row is shared."""
    decoder = decoder_of(EXPANDED)

    def logprobs(requests: list[tuple[list[int], SlotSampling]]) -> list[list[Any]]:
        found: dict[int, list[Any]] = {}
        options = GraphOptions(prefill_token_budget=BUDGET)
        executor = GraphExecutor(InterpretedDevice(), decoder, LIMITS, TunedTable(), options)
        slots: dict[int, int] = {}

        def note(plan: StepPlan, result: StepResult) -> None:
            slots.update({each.slot: each.arrival for each in plan.assignments})
            rows = zip([*plan.prefill, *plan.decode], [*result.prefill, *result.decode], strict=True)
            for row, output in rows:
                found.setdefault(slots[row.slot], []).extend(output.logprobs or ())

        run_scheduled(executor, requests, prefill_token_budget=BUDGET, on_step=note)
        executor.close()
        return [found[index] for index in range(len(requests))]

    requests = requests_of(6)[:4]
    alone = [logprobs([request])[0] for request in requests]
    answer = [entry.token_id for entry in alone[0]]
    turn = [*requests[0][0], *answer, 7, 8]
    requests.append((turn, sampling_of(len(turn), 6, num_logprobs=1)))
    alone += logprobs(requests[-1:])
    assert logprobs(requests) == alone
    assert len({entry.token_id for each in alone for entry in each}) > 8


def test_an_executor_with_the_limits_of_another_expands_as_many_keys() -> None:
    """As an engine that wakes up: the first one got fewer blocks than it made its buffers for."""
    decoder, options = decoder_of(EXPANDED), GraphOptions(prefill_token_budget=16)
    limits = msgspec.structs.replace(LIMITS, max_num_seqs=1, max_model_len=3 * EXPANDED_TILE, num_blocks=24)
    hooks = StartupHooks(fit_blocks=lambda num_graphs: (EXPANDED_TILE // limits.block_size, 0))
    first = GraphExecutor(InterpretedDevice(), decoder, limits, TunedTable(), options, hooks=hooks)
    assert first.limits.max_model_len == first.max_expanded_tokens == EXPANDED_TILE
    second = GraphExecutor(InterpretedDevice(), decoder, first.limits, TunedTable(), options)
    assert second.max_expanded_tokens == first.max_expanded_tokens


def test_a_latency_target_leaves_prompts_absorbed() -> None:
    """A chunk of few tokens takes about as long as one of many where all keys before it are expanded."""
    decoder = decoder_of(EXPANDED)
    for target in ({}, {"target_latency_ms_p50": 20.0}, {"target_latency_ms_p95": 20.0}):
        options = _graph_options(EngineConfig(**target, prefill_token_budget=16), None, NO_STAGE_MARKS)
        executor = GraphExecutor(InterpretedDevice(), decoder, LIMITS, TunedTable(), options)
        assert (executor.max_expanded_tokens == 0) == bool(target)
        executor.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_expands_all")
def test_keys_of_another_head_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, expand = decoder_of(EXPANDED), attention.expand_latents
    expected, _ = run(EagerExecutor(decoder, LIMITS), 4)

    def expand_wrongly(*args: Any) -> None:
        expand(*args[:3], args[3].roll(1, 0), *args[4:])

    monkeypatch.setattr(attention, "expand_latents", expand_wrongly)
    found, _ = run(graph_executor(decoder), 4)
    assert found != expected


@pytest.mark.slow
def test_steps_of_a_gguf_file_equal_those_of_its_numbers(tmp_path: Path) -> None:
    """What the file has in blocks is quantised in memory."""
    sizes = {"hidden_size": 64, "q_lora_rank": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 16, "rope_interleave": True}
    model = draw_model("glm4_moe_lite", 1, **CONFIG | sizes | heads)
    model.save_pretrained(tmp_path)
    write_latent_gguf(tmp_path, tmp_path / "model.gguf", lambda name: GGMLQuantizationType.Q8_0)
    stored, numbers = load(tmp_path / "model.gguf", "stored"), load(tmp_path / "twin")
    expected, _ = run(EagerExecutor(numbers, LIMITS), 4)
    assert run(EagerExecutor(stored, LIMITS), 4)[0] == expected
    arrange_decoder(stored)
    matrices = stored.weights.layers[1].mixer.matrices
    assert len(matrices) == 3 and all(isinstance(each, KernelWeight) for each in matrices.values())
    assert run(graph_executor(stored), 4)[0] == expected
    assert len({token for each in expected for token in each}) > 8


@pytest.mark.slow
def test_rows_of_experts_are_routed_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that the kernel takes, which is computed in three launches here. Only where there is
    latent attention: other models keep the bits that they have."""
    routers: list[Router] = []
    joined: list[int] = []

    def route(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        row_slot: torch.Tensor,
        rows: ExpertRows,
        router: Router,
        correction: torch.Tensor | None,
        num_joined: int,
    ) -> None:
        routers.append(router)
        joined.append(num_joined)
        logits = (x @ weight.T)[None]
        options = {"dtype": torch.float32, "correction_bias": correction, "num_joined": num_joined}
        choose_experts(logits, bias, row_slot, rows, router, **options)
        list_rows(rows)

    decoder = decoder_of(CONFIG)
    expected, _ = run(EagerExecutor(decoder, LIMITS), 4)
    monkeypatch.setattr(channels, "has_cuda_route", lambda *_: True)
    monkeypatch.setattr(channels, "cuda_route", route)
    monkeypatch.setattr(channels, "choose_experts", None)
    tokens, _ = run(graph_executor(decoder), 4)
    assert tokens == expected
    assert len(routers) > 8 and {router.kind for router in routers} == {"sigmoid"} and set(joined) == {1}
    ungrouped = decoder_of({**CONFIG, "model_type": "glm4_moe", "num_key_value_heads": 3, "head_dim": 8})
    with pytest.raises(ExecutorError, match="'NoneType' object is not callable"):
        run(graph_executor(ungrouped), 1)


@pytest.mark.slow
def test_a_key_that_is_not_normalised_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(CONFIG)
    expected, _ = run(EagerExecutor(decoder, LIMITS), 4)
    store = latent_attention.store_latents

    def store_unweighted(*args: Any, **options: Any) -> None:
        store(*args[:7], torch.ones_like(args[7]) * 2, **options)

    monkeypatch.setattr(latent_attention, "store_latents", store_unweighted)
    found, _ = run(graph_executor(decoder), 4)
    assert found != expected


def test_latents_in_fp8_are_those_of_the_eager_executor() -> None:
    decoder = decoder_in_fp8()
    expected, _ = run(EagerExecutor(decoder, LIMITS), 4)
    assert run(graph_executor(decoder), 4)[0] == expected
    assert run(EagerExecutor(decoder_of(CONFIG), LIMITS), 4)[0] != expected


@pytest.mark.slow
def test_latents_that_are_stored_with_another_scale_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, store = decoder_in_fp8(), latent_attention.store_latents

    def store_with_another_scale(*args: Any, **options: Any) -> None:
        kv = msgspec.structs.replace(args[6], key_scale=args[6].key_scale * 1.5)
        store(*args[:6], kv, *args[7:], **options)

    monkeypatch.setattr(latent_attention, "store_latents", store_with_another_scale)
    expected, _ = run(EagerExecutor(decoder, LIMITS), 4)
    assert run(graph_executor(decoder), 4)[0] != expected


@pytest.mark.slow
@pytest.mark.parametrize("has_fp8", [False, True])
def test_ngram_drafts_do_not_change_tokens(has_fp8: bool) -> None:
    decoder = decoder_in_fp8() if has_fp8 else decoder_of(CONFIG)
    expected, _ = run(EagerExecutor(decoder, LIMITS), 14)
    factory = NGramDrafterFactory(NGram(min_length=1), (NUM_DRAFTS,))
    tokens, steps = run(graph_executor(decoder, factory), 14, num_drafts=NUM_DRAFTS, has_history=True)
    assert tokens == expected
    assert_some_accepted(steps)


@pytest.mark.slow
def test_an_eagle_head_does_not_change_tokens(tmp_path: Path) -> None:
    decoder = decoder_of(CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    make_draft("reference", tmp_path / "draft", tmp_path)
    draft = DraftDecoder.load(tmp_path / "draft", decoder)
    expected, _ = run(EagerExecutor(decoder, LIMITS), 14)
    factory = EagleDrafterFactory(draft, (NUM_DRAFTS,), is_adaptive=False)
    tokens, steps = run(graph_executor(decoder, factory), 14, num_drafts=NUM_DRAFTS)
    assert tokens == expected
    assert sum(each.num_drafted for _, result in steps for each in result.decode) > 0


def assert_some_accepted(steps: list[Step]) -> None:
    outputs = [output for _, result in steps for output in result.decode]
    drafted, accepted = (
        sum(getattr(each, name) for each in outputs) for name in ("num_drafted", "num_accepted")
    )
    assert 0 < accepted < drafted
