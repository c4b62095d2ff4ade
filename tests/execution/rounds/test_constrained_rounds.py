"""Slots under a constraint that draft: the same tokens as without drafts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import numpy as np
import pytest
import torch
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from msgspec import Struct
from numpy.typing import NDArray
from scheduled_run import sampling_of
from tiny_llama import tiny_llama
from tolerances import bound

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.slots import num_mask_words
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.device.resources import Ring
from drift_sdk.execution.drafter_factory import (
    DrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.rounds.drafters import RoundDrafter
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.speculation import NGram
from drift_sdk.steps import Executor, ExecutorLimits, SlotSampling, StepPlan

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
VOCAB_SIZE = 70
NUM_DRAFTS = 3
EOS, NEVER = 2, 1
LOGPROB_BOUND = bound(16.0, inner=16, depth=2)
FREE = range(20, 28)
LIMITS = ExecutorLimits(max_num_seqs=3, max_model_len=32, num_blocks=48, block_size=4, vocab_size=VOCAB_SIZE)
SHAPES = tiny_llama(
    vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, head_dim=8, rms_norm_eps=1e-6
)


class Script:
    """A `TokenConstraint` with a period of four tokens: a fixed token, one that alternates, a free one, and
    one that is determined by the free one or, later on, the end of the sequence."""

    is_slow = False

    def __init__(self) -> None:
        self.said: list[int] = []
        self.asked: list[tuple[int, ...]] = []
        self.num_allowed: list[int] = []

    def masks(self, draft_token_ids: Tokens[int]) -> NDArray[np.int32]:
        """As for a grammar, rows after a draft that is not allowed or ends the text are zero."""
        assert all(0 <= token < VOCAB_SIZE for token in draft_token_ids), draft_token_ids
        rows = np.zeros((len(draft_token_ids) + 1, num_mask_words(VOCAB_SIZE)), np.uint32)
        said = [*self.said]
        for row, token in zip(rows, (*draft_token_ids, EOS), strict=True):
            allowed = allowed_after(said)
            for one in allowed:
                row[one // 32] |= np.uint32(1 << one % 32)
            if token not in allowed or token == EOS:
                break
            said.append(token)

        if draft_token_ids:
            self.asked.append(tuple(draft_token_ids))
            self.num_allowed.append(len(said) - len(self.said))
        return rows.view(np.int32)

    def mask_ahead(self) -> None:
        return None

    def advance(self, token_ids: Tokens[int]) -> None:
        for token in token_ids:
            assert token in allowed_after(self.said), (self.said, token)
            self.said.append(token)


def allowed_after(said: Tokens[int]) -> set[int]:
    rounds, phase = divmod(len(said), 4)
    if phase == 0:
        return {10}
    if phase == 1:
        return {11 + rounds % 2}
    if phase == 2:
        return set(FREE)

    return {30 + said[-1]} if rounds < 2 else {30 + said[-1], EOS} if rounds < 4 else {EOS}


class Case(Struct):
    prompt: list[int]
    sampling: SlotSampling
    is_constrained: bool = True
    max_drafts: int | None = None


def case_of(seed: int, prompt: list[int], num_tokens: int, **changes: Any) -> Case:
    fields = {name: changes.pop(name) for name in ("is_constrained", "max_drafts") if name in changes}
    changes = {"seed": seed, "stop_token_ids": (EOS,), **changes}
    return Case(prompt, sampling_of(len(prompt), num_tokens, **changes), **fields)


CASES = [
    case_of(0, [5, 6, 7, 8], 26, logit_bias=((EOS, -9.0),)),
    case_of(1, [10, 11, 21, 51, 10, 12], 26, temperature=1.5, top_p=0.9, num_logprobs=1),
    case_of(2, [5, 5, 5, 5], 9, is_constrained=False),
    case_of(3, [9, 10], 9, repetition_penalty=1.5, frequency_penalty=0.4),
    case_of(4, [9, 10, 11], 6, max_drafts=0),
    case_of(5, [10, 11], 7, temperature=1.0, max_drafts=1),
]


class Oracle:
    """A RoundDrafter that drafts given tokens: told [S, max_model_len] int32, by slot and position."""

    aux_layers: Tokens[int] = ()
    kv_cache = None
    is_ngram = None

    def __init__(self, device: torch.device) -> None:
        self.told = torch.zeros(LIMITS.max_num_seqs, LIMITS.max_model_len, dtype=torch.int32, device=device)

    def propose(self, rows: Any, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        slot, position = (column.view(num_slots, -1)[:, 1:].long() for column in (rows.slot, rows.position))
        tokens = self.told[slot.clamp(min=0), position.clamp(max=LIMITS.max_model_len - 1)]
        rows.token.view(num_slots, -1)[:, 1:].copy_(tokens)

    def draft_extend(self, verified: Any) -> None:
        pass

    def draft_extend_prefill(self, chunks: Any) -> None:
        pass


class OracleFactory(NGramDrafterFactory):
    """Gives an executor this oracle as its drafter."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(NGram(), (NUM_DRAFTS,))
        self._oracle = oracle

    def round_drafter(self, *_: object) -> Oracle:
        return self._oracle


NGRAM_DRAFTERS = NGramDrafterFactory(NGram(min_length=1), (NUM_DRAFTS,))


class Run(Struct):
    """Outputs of all cases.

    num_split: rounds in which a constrained slot may draft. num_mixed: those of them that have unconstrained
    slots too. num_ngrams: rounds of a slot in which n-grams were taken in place of a model's drafts.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    scripts: list[Script]
    num_accepted: int = 0
    num_split: int = 0
    num_mixed: int = 0
    num_ngrams: int = 0


def run(
    executor: Executor,
    cases: Tokens[Case],
    *,
    num_drafts: int,
    has_draft_kv: bool = False,
    on_plan: Callable[[StepPlan], None] = lambda plan: None,
) -> Run:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=LIMITS.max_num_seqs,
            num_blocks=LIMITS.num_blocks,
            block_size=LIMITS.block_size,
            prefill_token_budget=16,
            draft_choices=(num_drafts,) if num_drafts else (),
            is_draft_adaptive=False,
            has_draft_kv=has_draft_kv,
            wants_history=True,
        )
    )
    found = Run([[] for _ in cases], [[] for _ in cases], [Script() for _ in cases])
    sequences = [
        Sequence(
            request_id=str(index),
            prompt_ids=list(case.prompt),
            sampling=case.sampling,
            priority=0,
            arrival=index,
            constraint=found.scripts[index] if case.is_constrained else None,
            max_draft_tokens=case.max_drafts,
        )
        for index, case in enumerate(cases)
    ]
    for sequence in sequences:
        scheduler.add(sequence)

    constrained: dict[int, bool] = {}
    while scheduler.has_work:
        plan = scheduler.schedule() if scheduler.num_in_flight < 2 else None
        if plan is not None:
            for assignment in plan.assignments:
                constrained[assignment.slot] = assignment.constraint is not None
            if any(row.num_draft_tokens > 0 and constrained[row.slot] for row in plan.decode):
                found.num_split += 1
                found.num_mixed += not all(constrained[row.slot] for row in plan.decode)
            on_plan(plan)
            executor.launch(plan)
            continue

        for delta in scheduler.commit(executor.collect()):
            index = sequences.index(delta.sequence)
            found.tokens[index] += delta.output.token_ids
            found.logprobs[index] += [entry.logprob for entry in delta.output.logprobs or ()]
            found.num_accepted += delta.output.num_accepted
            found.num_ngrams += delta.output.is_ngram
            if delta.sequence.constraint is not None:
                found.scripts[index].advance(delta.output.token_ids)

    executor.close()
    return found


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = read_spec(SHAPES)
    return drawn_decoder(config, "cuda" if IS_GPU else "cpu", seed=1)


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> Run:
    found = run(EagerExecutor(decoder, LIMITS), CASES, num_drafts=0)
    assert {len(tokens) for tokens in found.tokens} == {6, 7, 9, 12, 20}
    return found


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ring entry of each wait of the host between the halves of a round."""
    found: list[int] = []
    wait = Ring.wait

    def counted(ring: Ring, entry: int) -> NDArray[np.int32]:
        found.append(entry)
        return wait(ring, entry)

    monkeypatch.setattr(Ring, "wait", counted)
    return found


def graph_executor(decoder: Decoder, drafter_factory: DrafterFactory = NGRAM_DRAFTERS) -> GraphExecutor:
    return GraphExecutor(
        GpuDevice(0) if IS_GPU else InterpretedDevice(),
        decoder,
        LIMITS,
        TunedTable(),
        GraphOptions(prefill_token_budget=16),
        drafter_factory=drafter_factory,
    )


def check(found: Run, expected: Run, waits: list[int]) -> None:
    assert found.tokens == expected.tokens
    for logprobs, others in zip(found.logprobs, expected.logprobs, strict=True):
        assert logprobs == pytest.approx(others, abs=LOGPROB_BOUND)
    assert len(waits) == found.num_split > found.num_mixed > 0
    assert found.num_accepted > 0


def outcomes(found: Run) -> set[str]:
    """How much of the drafts of constrained slots was allowed: "all", "some", "none", or "ends" where the
    first token that is not allowed is the end of the sequence."""
    kinds = set()
    for script in found.scripts:
        for asked, num_allowed in zip(script.asked, script.num_allowed, strict=True):
            if num_allowed < len(asked) and asked[num_allowed] == EOS:
                kinds.add("ends")
            elif num_allowed == len(asked):
                kinds.add("all")
            else:
                kinds.add("some" if num_allowed else "none")

    return kinds


def test_constrained_slots_with_ngram_drafts(decoder: Decoder, expected: Run, waits: list[int]) -> None:
    found = run(graph_executor(decoder), CASES, num_drafts=NUM_DRAFTS)
    check(found, expected, waits)
    assert outcomes(found) == {"all", "some", "none"}


@pytest.mark.slow
def test_constrained_slots_with_ngrams_beside_a_model(
    decoder: Decoder, expected: Run, waits: list[int]
) -> None:
    factory = HybridDrafterFactory(ModelDrafterFactory(decoder, (NUM_DRAFTS,)), NGram(min_length=1))
    cases = [0, 2]
    found = run(
        graph_executor(decoder, factory),
        [CASES[index] for index in cases],
        num_drafts=NUM_DRAFTS,
        has_draft_kv=True,
    )
    assert found.tokens == [expected.tokens[index] for index in cases]
    assert len(waits) == found.num_split > found.num_mixed > 0
    assert 0 < found.num_ngrams < found.num_accepted


def test_constrained_slots_with_scripted_drafts(decoder: Decoder, expected: Run, waits: list[int]) -> None:
    oracle = Oracle(decoder.device)
    executor = graph_executor(decoder, OracleFactory(oracle))

    def tell(plan: StepPlan) -> None:
        for assignment in plan.assignments:
            index = assignment.sampling.seed
            with executor._device.work():
                story = torch.tensor(story_of(index, expected.tokens[index]), dtype=torch.int32)
                oracle.told[assignment.slot].copy_(story)

    found = run(executor, CASES, num_drafts=NUM_DRAFTS, on_plan=tell)
    check(found, expected, waits)
    assert outcomes(found) == {"all", "some", "none", "ends"}


def story_of(index: int, tokens: list[int]) -> list[int]:
    """A case's tokens by position, some replaced by a token that no mask allows, some by another token that
    the mask allows; after the end the story continues."""
    prompt = CASES[index].prompt
    story = [*prompt]
    for number, token in enumerate(tokens):
        if (number + index) % 5 == 4:
            token = NEVER
        elif token in FREE and (number + index) % 3 == 0:
            token = FREE[(token + 1) % len(FREE)]
        story.append(token)

    return story + [10] * (LIMITS.max_model_len - len(story))


def test_host_does_not_wait_for_unconstrained_drafts(
    decoder: Decoder, expected: Run, waits: list[int]
) -> None:
    cases = [2, 4]
    found = run(graph_executor(decoder), [CASES[index] for index in cases], num_drafts=NUM_DRAFTS)
    assert found.tokens == [expected.tokens[index] for index in cases]
    assert waits == [] and found.num_split == 0
    assert not any(script.asked for script in found.scripts)


def test_reused_slot_drops_its_constraint(decoder: Decoder, expected: Run, waits: list[int]) -> None:
    cases = [5, 4, 4, 2]
    found = run(graph_executor(decoder), [CASES[index] for index in cases], num_drafts=NUM_DRAFTS)
    assert found.tokens == [expected.tokens[index] for index in cases]
    assert len(waits) == found.num_split


def test_oracle_is_a_round_drafter() -> None:
    drafter: RoundDrafter = Oracle(torch.device("cpu"))
    assert drafter.aux_layers == ()
