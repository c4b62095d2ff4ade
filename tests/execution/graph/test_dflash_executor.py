"""Rounds that a DFlash head drafts: both executors draft, accept and emit the same tokens. The kernels in
CUDA C++ are replaced by their reference."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dflash_zoo import NUM_HEADS, make_dflash
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from oracle_drafter import OracleDrafter
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_rows_after
from tiny_llama import tiny_hybrid, tiny_llama

from drift_sdk._kernels.gemm.tuning import TunedTable, WatchedTable, read_products
from drift_sdk.execution.drafter_factory import (
    DFlashDrafterFactory,
    DrafterFactory,
    HybridDrafterFactory,
)
from drift_sdk.execution.eager.drafters import DFlashDrafter
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.rounds.dflash import DFlashRoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.speculation import NGram
from drift_sdk.startup.graph_startup import weights_to_tune
from drift_sdk.steps import ExecutorLimits, SlotSampling, StepPlan, StepResult

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.usefixtures("gated_delta_reference"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: kernels run on the CPU"),
]

PLAIN = tiny_llama(vocab_size=128, num_hidden_layers=3)
HYBRID = tiny_hybrid(vocab_size=128)
TARGETS = {"plain": PLAIN, "hybrid": HYBRID}
LIMITS = ExecutorLimits(vocab_size=128, max_num_seqs=3, max_model_len=64, num_blocks=10, block_size=8)
"""So few blocks that sequences are preempted."""
BUDGET, NUM_CHECKPOINTS, NUM_TOKENS = 24, 4, 16
NO_TABLE = TunedTable()

Request = tuple[list[int], SlotSampling]
Drafts = list[tuple[int, ...]]


def models(name: str, seed: int, folder: Path) -> tuple[Decoder, DFlashDecoder]:
    (folder / "config.json").write_text(json.dumps(TARGETS[name]))
    target = drawn_decoder(read_spec(TARGETS[name]), "cpu", seed=3)
    make_dflash(seed, folder / "draft", folder)
    return target, DFlashDecoder.load(resolve(folder / "draft", role="draft"), target)


def requests_of(vocab_size: int = 128) -> list[Request]:
    """Prompts of which some begin alike, one goes on from a checkpoint, and one is a single token; half of
    the requests are greedy."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(number)]

    shared = tokens(20)
    prompts = [[*shared, *tokens(6)], tokens(1), [*shared, *tokens(3)], [*shared, *tokens(15)]]
    return [
        (prompt, sampling_of(len(prompt), NUM_TOKENS, seed=index, temperature=0.8 * (index % 2)))
        for index, prompt in enumerate(prompts)
    ]


class Run(NamedTuple):
    tokens: list[list[int]]
    steps: list[tuple[StepPlan, StepResult]]

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Drafted and accepted tokens of each slot and round."""
        rows = [each for _, result in self.steps for each in result.decode]
        return [(each.num_drafted, each.num_accepted) for each in rows]

    @property
    def num_preemptions(self) -> int:
        assigned = [each.arrival for plan, _ in self.steps for each in plan.assignments]
        return len(assigned) - len(set(assigned))

    @property
    def num_hits(self) -> int:
        """Sequences that begin behind cached tokens."""
        pairs = [(plan, {each.slot for each in plan.assignments}) for plan, _ in self.steps]
        return sum(chunk.start > 0 and chunk.slot in new for plan, new in pairs for chunk in plan.prefill)


def run(executor: EagerExecutor | GraphExecutor, num_drafts: int, *, has_history: bool = False) -> Run:
    steps: list[tuple[StepPlan, StepResult]] = []
    tokens = run_scheduled(
        executor,
        requests_of(),
        prefill_token_budget=BUDGET,
        draft_choices=(0, num_drafts) if num_drafts else (),
        wants_history=has_history,
        num_checkpoints=NUM_CHECKPOINTS,
        on_step=lambda plan, result: steps.append((plan, result)),
    )
    executor.close()
    return Run(tokens, steps)


def graph_executor(
    target: Decoder, factory: DrafterFactory, table: TunedTable = NO_TABLE, shape_log: Path | None = None
) -> GraphExecutor:
    options = GraphOptions(prefill_token_budget=BUDGET, num_checkpoints=NUM_CHECKPOINTS, shape_log=shape_log)
    return GraphExecutor(InterpretedDevice(), target, LIMITS, table, options, drafter_factory=factory)


def note_drafts(
    monkeypatch: pytest.MonkeyPatch, oracle: OracleDrafter | None = None
) -> tuple[Drafts, Drafts]:
    """The drafts of the eager and of the graph executor, in order. oracle: its drafts are verified in their
    place."""
    of_eager: Drafts = []
    of_graph: Drafts = []
    propose, propose_rows = DFlashDrafter.propose, DFlashRoundDrafter.propose

    def eager(self: DFlashDrafter, slots: Any, limits: Any) -> Any:
        drafts = propose(self, slots, limits)
        of_eager.extend(tuple(draft.token_ids) for draft in drafts if draft.token_ids)
        return drafts if oracle is None else oracle.propose(slots, limits)

    def graph(self: DFlashRoundDrafter, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        propose_rows(self, rows, num_slots=num_slots, num_draft_tokens=num_draft_tokens)
        slots, tokens, positions = (
            each.view(num_slots, -1) for each in (rows.slot, rows.token, rows.position)
        )
        for slot, token, position in zip(slots, tokens, positions, strict=True):
            drafted = token[1:][slot[1:] >= 0]
            if not len(drafted):
                continue

            of_graph.append(tuple(drafted.tolist()))
            if oracle is not None:
                seed = int(self._table.columns.seed[slot[0]])
                right = oracle.draft(seed, int(position[0]) + 1, len(drafted))
                token[1 : 1 + len(right)] = torch.tensor(right)

    monkeypatch.setattr(DFlashDrafter, "propose", eager)
    monkeypatch.setattr(DFlashRoundDrafter, "propose", graph)
    return of_eager, of_graph


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_HEADS))
@pytest.mark.parametrize("name", TARGETS)
def test_rounds_equal_those_of_the_eager_executor(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the head itself, as many as the head drafts or one less. Where many are accepted, nothing is
    preempted: `test_any_number_of_drafts_is_accepted` is about that."""
    target, draft = models(name, seed, tmp_path)
    num_drafts = draft.config.num_masks - seed % 2
    plain = run(EagerExecutor(target, LIMITS), 0)
    of_eager, of_graph = note_drafts(monkeypatch)
    expected = run(EagerExecutor(target, LIMITS, DFlashDrafter(draft, LIMITS)), num_drafts)
    table, factory, log = WatchedTable(), DFlashDrafterFactory(draft, (num_drafts,)), tmp_path / "shapes.json"
    found = run(graph_executor(target, factory, table, log), num_drafts)
    assert of_graph == of_eager
    assert found.tokens == expected.tokens == plain.tokens
    assert found.counts == expected.counts
    assert len(set(of_eager)) > 10 and any(len(drafts) == num_drafts for drafts in of_eager)
    assert table.used == {weight.key for weight in weights_to_tune(target.weights, draft.weights)}
    logged, weights = read_products(log), draft.weights
    sizes = {(each.role, each.num_columns, each.inner) for each in logged if each.role.startswith("draft ")}
    expected_sizes = {("draft fc", *weights.fc.shape), ("draft head", *weights.head.shape)}
    for index, layer in enumerate(weights.layers):
        matrices = layer.mixer.matrices | {"gate_up": layer.channel.gate_up, "down": layer.channel.down}
        matrices["context"] = weights.context_projection(index)[0]
        expected_sizes |= {(f"draft {name}", *matrix.shape) for name, matrix in matrices.items()}
    assert sizes == expected_sizes
    num_rows = {each.num_rows for each in logged if each.role == "draft qkv"}
    assert num_rows <= {slots * (1 + draft.config.num_masks) for slots in (1, 2, 3)}


@pytest.mark.parametrize(
    ("name", "seed"), slow_rows_after(1, [("hybrid", 3), ("hybrid", 6), ("plain", 0), ("plain", 3)])
)
def test_any_number_of_drafts_is_accepted(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of an oracle in place of the head's, which the executors compute nevertheless, in a crowd with
    prefix hits, chunks of prompts and preemptions."""
    target, draft = models(name, seed, tmp_path)
    num_drafts = draft.config.num_masks
    plain = run(EagerExecutor(target, LIMITS), 0)
    answers = {
        sampling.seed: [*prompt, *tokens]
        for (prompt, sampling), tokens in zip(requests_of(), plain.tokens, strict=True)
    }
    oracle = OracleDrafter(answers, 0.3, LIMITS.vocab_size)
    of_eager, of_graph = note_drafts(monkeypatch, oracle)
    expected = run(EagerExecutor(target, LIMITS, DFlashDrafter(draft, LIMITS)), num_drafts)
    oracle.histogram.clear()
    found = run(graph_executor(target, DFlashDrafterFactory(draft, (num_drafts,))), num_drafts)
    assert found.tokens == plain.tokens
    assert found.counts == expected.counts
    assert of_graph == of_eager
    assert sorted(oracle.histogram) == list(range(num_drafts + 1))
    num_drafted, num_accepted = (sum(column) for column in zip(*found.counts, strict=True))
    assert 10 < num_accepted < num_drafted - 10
    assert found.num_hits > 0 and found.num_preemptions > 0


@pytest.mark.slow
def test_ngrams_beside_a_head(tmp_path: Path) -> None:
    target, draft = models("plain", 0, tmp_path)
    plain = run(EagerExecutor(target, LIMITS), 0)
    factory = HybridDrafterFactory(DFlashDrafterFactory(draft, (3,)), NGram(min_length=1))
    eager = EagerExecutor(target, LIMITS, factory.eager_drafter(target, LIMITS))
    expected = run(eager, 3, has_history=True)
    found = run(graph_executor(target, factory), 3, has_history=True)
    assert found.tokens == expected.tokens == plain.tokens
    assert found.counts == expected.counts
    kinds = {each.is_ngram for _, result in found.steps for each in result.decode if each.num_drafted}
    assert kinds == {False, True}
