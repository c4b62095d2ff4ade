"""Mixed steps: chunks of prompts and decode rows in one pass, with drafts and without."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_zoo import make_draft
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from sampling_rows import FixedMask
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_after
from tiny_llama import tiny_llama

from drift_sdk._kernels.gemm.tuning import TunedTable, read_products
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.execution.eager.drafters import HybridDrafter, ModelDrafter, NGramDrafter
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.buckets import MixedBucket
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.graph.step_launcher import StepLauncher
from drift_sdk.execution.rounds.drafters import HybridRoundDrafter, ModelRoundDrafter, NGramRoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.speculation import NGram
from drift_sdk.steps import Executor, ExecutorLimits, SlotOutput, SlotSampling, StepPlan

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
TARGET = tiny_llama(vocab_size=96, num_hidden_layers=3)
SMALL = tiny_llama(vocab_size=96, num_hidden_layers=1, hidden_size=24, num_attention_heads=3)
DRAFTERS = {
    HybridDrafterFactory: (HybridRoundDrafter, HybridDrafter),
    ModelDrafterFactory: (ModelRoundDrafter, ModelDrafter),
    NGramDrafterFactory: (NGramRoundDrafter, NGramDrafter),
}
LIMITS = ExecutorLimits(max_num_seqs=3, max_model_len=40, num_blocks=32, block_size=4, vocab_size=96)
BUDGET, NUM_DRAFTS = 16, 2
CONSTRAINTS = {index: FixedMask(np.roll(np.array([-1, 0, 0], dtype=np.int32), index)) for index in (0, 4, 7)}
"""By index of the requests: of the first, token ids below 32 are allowed, of the others 32 to 63."""

Proposals = list[dict[int, list[int]]]
"""Of each round with drafts, the drafted tokens by slot."""


def requests_of() -> list[tuple[list[int], SlotSampling]]:
    """Prompts that are cut into chunks, that end while others decode, that continue cached prefixes, one of
    them with a single token, and one of a single token."""
    rng = random.Random(5)

    def drawn(number: int) -> list[int]:
        return [rng.randrange(3, 90) for _ in range(number)]

    shared = drawn(9)
    return [
        request(drawn(6), 14),
        request(
            [*shared, 7], 3, temperature=0.8, top_p=0.9, seed=3, num_logprobs=2, logprob_token_ids=(9, 70, 1)
        ),
        request([5], 2, temperature=1.0, seed=12),
        request(shared, 4),
        request([8, 9] * 5, 3, num_prompt_logprobs=1, presence_penalty=0.4, logit_bias=((17, 0.5),)),
        request([*shared, 27], 4, repetition_penalty=4.0, frequency_penalty=0.5),
        request([8, 9] * 5, 8, num_logprobs=0, logprob_token_ids=(40,)),
        request(drawn(16), 2),
    ]


def request(prompt: list[int], num_tokens: int, **changes: object) -> tuple[list[int], SlotSampling]:
    return prompt, sampling_of(len(prompt), num_tokens, **changes)


def run(executor: Executor, factory: DrafterFactory) -> tuple[list[list[int]], list[list[SlotOutput]]]:
    """The tokens of all requests, and the outputs of each step."""
    steps: list[list[SlotOutput]] = []
    tokens = run_scheduled(
        executor,
        requests_of(),
        prefill_token_budget=BUDGET,
        draft_choices=factory.draft_choices,
        has_draft_kv=factory.needs_draft_kv,
        wants_history=factory.needs_history,
        constraints=CONSTRAINTS,
        on_step=lambda plan, result: steps.append([*result.prefill, *result.decode]),
    )
    executor.close()
    return tokens, steps


def watch_mixed(patch: pytest.MonkeyPatch) -> list[tuple[StepPlan, MixedBucket, set[int]]]:
    """The plans that run as mixed steps, and the slots under a constraint."""
    found: list[tuple[StepPlan, MixedBucket, set[int]]] = []
    launch = StepLauncher._launch_mixed

    def recorded(self: StepLauncher, plan: StepPlan, bucket: MixedBucket, *rest: Any) -> None:
        found.append((plan, bucket, {*self._constraints}))
        launch(self, plan, bucket, *rest)

    patch.setattr(StepLauncher, "_launch_mixed", recorded)
    return found


def leaves_one_token(plan: StepPlan) -> bool:
    """True if a prefix hit leaves one token of a prompt."""
    placed = {assignment.slot for assignment in plan.assignments}
    return any(
        chunk.slot in placed and chunk.start > 0 and len(chunk.token_ids) == 1 for chunk in plan.prefill
    )


def watch_proposals(
    patch: pytest.MonkeyPatch, graph_drafter: Any, eager_drafter: Any
) -> tuple[Proposals, Proposals]:
    """The proposals of the drafters of the graph executor and of the eager executor. Only where replays run
    the step's Python code."""
    on_graphs: Proposals = []
    on_eager: Proposals = []
    if IS_GPU:  # a step that is captured must not wait for its results
        return on_graphs, on_eager

    patch.setattr(graph_drafter, "propose", recorded_rounds(graph_drafter.propose, on_graphs))
    patch.setattr(eager_drafter, "propose", recorded_drafts(eager_drafter.propose, on_eager))
    return on_graphs, on_eager


def recorded_rounds(propose: Any, found: Proposals) -> Any:
    def recorded(self: Any, rows: Any, *, num_slots: int, num_draft_tokens: int) -> None:
        propose(self, rows, num_slots=num_slots, num_draft_tokens=num_draft_tokens)
        slots, tokens = (column.view(num_slots, -1).tolist() for column in (rows.slot, rows.token))
        found.append(
            {
                own[0]: [token for slot, token in zip(own[1:], drawn[1:], strict=True) if slot >= 0]
                for own, drawn in zip(slots, tokens, strict=True)
                if own[0] >= 0
            }
        )

    return recorded


def recorded_drafts(propose: Any, found: Proposals) -> Any:
    def recorded(self: Any, slots: Any, limits: Any) -> Any:
        drafts = propose(self, slots, limits)
        found.append({id(slot): list(draft.token_ids) for slot, draft in zip(slots, drafts, strict=True)})
        return drafts

    return recorded


def drafted(proposals: Proposals) -> list[list[list[int]]]:
    """The drafts of rounds that have any, without their slots."""
    rounds = [sorted(tokens for tokens in each.values() if tokens) for each in proposals]
    return [each for each in rounds if each]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return drawn_decoder(read_spec(TARGET), "cuda" if IS_GPU else "cpu", seed=3)


@pytest.fixture(scope="module")
def expected(target: Decoder) -> list[list[int]]:
    """The tokens without drafts."""
    return run(EagerExecutor(target, LIMITS), NO_DRAFTER)[0]


def factory_of(kind: str, target: Decoder, tmp_path: Path) -> DrafterFactory:
    choices, ngram = (NUM_DRAFTS,), NGram(min_length=1)
    if kind == "ngram":
        return NGramDrafterFactory(ngram, choices)

    if kind == "model":
        small = drawn_decoder(read_spec(SMALL), "cuda" if IS_GPU else "cpu", seed=8)
        return ModelDrafterFactory(small, choices)

    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    make_draft("reference", tmp_path / "draft", tmp_path)
    eagle = EagleDrafterFactory(DraftDecoder.load(tmp_path / "draft", target), choices)
    return HybridDrafterFactory(eagle, ngram)


@pytest.mark.parametrize("kind", slow_after(1, ["eagle+ngram", "ngram", "model"]))
def test_steps_and_drafts_equal_those_of_the_eager_executor(
    kind: str, target: Decoder, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = factory_of(kind, target, tmp_path)
    on_graphs, on_eager = watch_proposals(monkeypatch, *DRAFTERS[type(factory)])
    graph = GraphExecutor(
        GpuDevice(0) if IS_GPU else InterpretedDevice(),
        target,
        LIMITS,
        TunedTable(),
        GraphOptions(prefill_token_budget=BUDGET, shape_log=tmp_path / "shapes.json"),
        drafter_factory=factory,
    )
    on_graphs.clear()  # those of captures
    launched = watch_mixed(monkeypatch)
    tokens, steps = run(graph, factory)
    eager_tokens, eager_steps = run(
        EagerExecutor(target, LIMITS, factory.eager_drafter(target, LIMITS)), factory
    )
    assert tokens == eager_tokens == expected
    found, others = ([[summary(output) for output in step] for step in each] for each in (steps, eager_steps))
    assert found == others
    given, other_given = given_logprobs(steps), given_logprobs(eager_steps)
    assert given == pytest.approx(other_given, abs=1e-4) and len(given) == 3 * 3 + 8
    assert sum(bucket.num_drafts == NUM_DRAFTS for _, bucket, _ in launched) > 1
    assert not any(leaves_one_token(plan) for plan, _, _ in launched)
    assert max(tokens[0]) < 32 <= min(tokens[4]) and max(tokens[4]) < 64
    assert any(row.slot in slots for plan, _, slots in launched for row in plan.decode)
    assert any(chunk.slot in slots and chunk.is_last for plan, _, slots in launched for chunk in plan.prefill)
    if kind == "model":
        check_products(tmp_path / "shapes.json", factory.draft)
    if not IS_GPU:
        assert drafted(on_graphs) == drafted(on_eager) != []
    rounds = [output for step in steps for output in step if output.num_drafted]
    assert {output.is_ngram for output in rounds} == ({False, True} if kind == "eagle+ngram" else {False})


def check_products(file: Path, small: Decoder) -> None:
    """Check that the logged products, which can be tuned, are those of the small model's weights."""
    layers = small.weights.layers
    weights = small.weights, *(part for layer in layers for part in (layer.mixer, layer.channel))
    roles = ("qkv", "output", "gate_up", "down", "head")
    found = {role: getattr(part, role) for part in weights for role in roles if hasattr(part, role)}
    logged = {each.role: (each.num_columns, each.inner) for each in read_products(file)}
    assert {role: logged[f"draft {role}"] for role in roles} == {
        role: tuple(weight.shape) for role, weight in found.items()
    }


def given_logprobs(steps: list[list[SlotOutput]]) -> list[float]:
    """The log-probabilities of given tokens, of all generated tokens."""
    entries = [entry for step in steps for output in step for entry in output.logprobs or ()]
    return [logprob for entry in entries for _, logprob in entry.given]


def summary(output: SlotOutput) -> tuple[object, ...]:
    scored = [
        [entry.token_id for entry in entries or ()] for entries in (output.logprobs, output.prompt_logprobs)
    ]
    drafts = output.num_drafted, output.num_accepted, output.is_ngram
    return output.token_ids, output.finish, drafts, scored
