"""The commit kernel against a walk of each slot by hand, and against its reference."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from references.commit import commit_reference
from references.simulated import commit_simulated_reference

from drift_sdk._kernels.commit import (
    FINISHED_LENGTH,
    FINISHED_STOP,
    RECORD_HEADER_WORDS,
    CommitTensors,
    commit,
    record_words,
)
from drift_sdk._kernels.sampling.rows import MAX_TOP, SampleBuffers
from drift_sdk._kernels.slots import SlotColumns, SlotFlag, SlotState
from perf.harness.simulated_acceptance import SimulatedRounds, commit_simulated

pytestmark = pytest.mark.kernel

VOCAB_SIZE = 70
POISON = torch.iinfo(torch.int32).max
ENTRY, NUM_ENTRIES = 1, 3


@dataclass
class Slot:
    """A slot before a round: drafts, the tokens of its rows but the first (-1: no row), and chosen, the
    tokens behind all of its rows."""

    length: int
    max_length: int
    drafts: list[int]
    chosen: list[int]
    stop_ids: Sequence[int] = ()
    has_penalties: bool = False
    num_logprobs: int = -1

    def walk(self) -> tuple[list[int], int, int]:
        """Tokens emitted, why the slot ends, drafts that were right."""
        tokens: list[int] = []
        num_accepted = 0
        for draft, token in zip([*self.drafts, -1], self.chosen, strict=True):
            tokens.append(token)
            num_accepted += draft == token
            if token in self.stop_ids:
                return tokens, FINISHED_STOP, num_accepted

            if self.length + len(tokens) >= self.max_length:
                return tokens, FINISHED_LENGTH, num_accepted

            if draft != token:
                return tokens, 0, num_accepted

        raise AssertionError("the last row has no draft behind it")


class Round:
    """Slots (None: padding) of larger tables. Everything that a round must not read or not leave is poisoned:
    other slots' columns, and all results."""

    def __init__(self, slots: list[Slot | None], rows_per_slot: int, device: str) -> None:
        self.slots, self.rows_per_slot = slots, rows_per_slot
        num_slots, num_rows = len(slots) + 2, len(slots) * rows_per_slot
        generator = torch.Generator().manual_seed(num_rows)

        def poisoned(*shape: int) -> torch.Tensor:
            return torch.full(shape, POISON, dtype=torch.int32)

        self.state = SlotState(*(poisoned(num_slots) for _ in range(4)))
        self.columns = SlotColumns.allocate(num_slots, VOCAB_SIZE, "cpu")
        for name in ("flags", "num_logprobs", "stop_bits"):
            getattr(self.columns, name).fill_(POISON)
        self.columns.counts.random_(0, 9, generator=generator)
        self.row_slot, self.row_token = poisoned(num_rows).fill_(-1), poisoned(num_rows).fill_(-1)
        self.buffers = SampleBuffers.allocate(num_rows, VOCAB_SIZE, "cpu")
        for name in ("chosen_logprob", "top_logprob"):
            getattr(self.buffers, name).normal_(generator=generator)
        self.buffers.top_token.random_(-1, VOCAB_SIZE, generator=generator)
        self.buffers.chosen.fill_(POISON)
        for index, slot in enumerate(slots):
            if slot is not None:
                self._fill(index, slot)

        words = len(slots) * record_words(rows_per_slot) + 3
        self.output_ring = poisoned(NUM_ENTRIES, words)
        self.emitted = poisoned(len(slots) + 1)
        self.current_entry = torch.tensor([ENTRY], dtype=torch.int32)
        self.next_entry = poisoned(1).fill_(len(slots) % NUM_ENTRIES)
        self.is_ngram = torch.arange(len(slots), dtype=torch.int32) % 2
        self._move(device)

    def slot_id(self, index: int) -> int:
        return len(self.slots) - index

    def _fill(self, index: int, slot: Slot) -> None:
        number, first = self.slot_id(index), index * self.rows_per_slot
        self.state.length[number], self.state.max_length[number] = slot.length, slot.max_length
        self.state.finish[number], self.state.last_token[number] = 0, 3
        flags = SlotFlag.PENALTIES if slot.has_penalties else SlotFlag.BIAS | SlotFlag.STOPS
        self.columns.flags[number], self.columns.num_logprobs[number] = int(flags), slot.num_logprobs
        self.columns.stop_bits[number] = 0
        for token in slot.stop_ids:
            word = int(self.columns.stop_bits[number, token // 32]) & 0xFFFFFFFF | 1 << token % 32
            self.columns.stop_bits[number, token // 32] = word - (1 << 32 if word >> 31 else 0)

        rows = slice(first, first + self.rows_per_slot)
        self.row_slot[rows] = torch.tensor([number, *(number if d >= 0 else -1 for d in slot.drafts)])
        # The token of a row without a slot is ignored, even where it is right.
        drafts = (token if d < 0 else d for d, token in zip(slot.drafts, slot.chosen, strict=False))
        self.row_token[rows] = torch.tensor([3, *drafts])
        self.buffers.chosen[rows] = torch.tensor(slot.chosen)

    def _move(self, device: str) -> None:
        for name in ("row_slot", "row_token", "is_ngram", "emitted", "current_entry", "next_entry"):
            setattr(self, name, getattr(self, name).to(device))
        self.state = SlotState(
            *(getattr(self.state, name).to(device) for name in SlotState.__struct_fields__)
        )
        self.columns, self.buffers = (
            type(tables)(**{name: getattr(tables, name).to(device) for name in tables.__slots__})
            for tables in (self.columns, self.buffers)
        )
        if device == "cuda":
            self.output_ring = self.output_ring.pin_memory()

    @property
    def tensors(self) -> CommitTensors:
        """The argument of `commit`."""
        return CommitTensors(
            row_slot=self.row_slot,
            row_token=self.row_token,
            buffers=self.buffers,
            state=self.state,
            slots=self.columns,
            emitted=self.emitted[:-1],
            output_ring=self.output_ring,
            current_entry=self.current_entry,
            next_entry=self.next_entry,
            rows_per_slot=self.rows_per_slot,
            is_ngram=self.is_ngram,
        )

    def run(self) -> None:
        commit(self.tensors)
        if self.output_ring.is_pinned():
            torch.cuda.synchronize()

    def run_simulated(self, rounds: SimulatedRounds) -> list[int]:
        """Commit simulated rounds. Returns the number of tokens of each slot."""
        commit_simulated(self.tensors, rounds)
        return self.emitted[:-1].tolist()

    def results(self) -> dict[str, list[int]]:
        """Everything that a commit writes, except `chosen`."""
        state = {name: getattr(self.state, name).tolist() for name in SlotState.__struct_fields__}
        return state | {
            "counts": self.columns.counts.tolist(),
            "emitted": self.emitted.tolist(),
            "output_ring": self.output_ring.tolist(),
            "next_entry": self.next_entry.tolist(),
        }

    def check(self) -> None:
        """Run, and compare every word, written or not, with the walks and with the reference's."""
        twin = copy.deepcopy(self)
        commit_reference(twin.tensors)
        counts = self.columns.counts.cpu().clone()
        state = {name: getattr(self.state, name).tolist() for name in SlotState.__struct_fields__}
        emitted = [0] * len(self.slots)
        output_ring = torch.full_like(self.output_ring, POISON)
        words = record_words(self.rows_per_slot)
        for index, slot in enumerate(self.slots):
            record = output_ring[ENTRY, index * words : (index + 1) * words]
            record[:RECORD_HEADER_WORDS] = 0
            if slot is None:
                continue

            tokens, finish, num_accepted = slot.walk()
            number = self.slot_id(index)
            emitted[index] = len(tokens)
            state["length"][number] += len(tokens)
            state["last_token"][number] = tokens[-1]
            state["finish"][number] = finish
            if slot.has_penalties:
                for token in tokens:
                    counts[number, token] += 1

            num_drafted = sum(draft >= 0 for draft in slot.drafts)
            header = [len(tokens), finish, num_drafted, num_accepted, self.is_ngram[index].item()]
            record[:RECORD_HEADER_WORDS] = torch.tensor(header)
            for depth, token in enumerate(tokens):
                self._record_row(record, index * self.rows_per_slot + depth, depth, token, slot)

        self.run()
        assert self.emitted.tolist() == [*emitted, POISON]
        assert {name: getattr(self.state, name).tolist() for name in state} == state
        assert torch.equal(self.columns.counts.cpu(), counts)
        assert torch.equal(self.output_ring, output_ring)
        assert self.next_entry.item() == (len(self.slots) + 1) % NUM_ENTRIES
        assert self.results() == twin.results()

    def _record_row(self, record: torch.Tensor, row: int, depth: int, token: int, slot: Slot) -> None:
        first = RECORD_HEADER_WORDS + depth * (2 + 2 * MAX_TOP)
        record[first] = token
        if slot.num_logprobs < 0:
            return

        record[first + 1] = self.buffers.chosen_logprob[row].cpu().view(torch.int32)
        record[first + 2 : first + 2 + MAX_TOP] = self.buffers.top_token[row]
        values = self.buffers.top_logprob[row].cpu().view(torch.int32)
        record[first + 2 + MAX_TOP : first + 2 + 2 * MAX_TOP] = values


def random_slot(rng: random.Random, num_drafts: int) -> Slot | None:
    """A slot with random drafts, or padding. Drafts are right more often than not, so that walks are long; a
    slot has no more rows than it has room for."""
    if rng.random() < 0.15:
        return None

    length = rng.randint(1, 40)
    room = rng.choice([1, 2, 3, 4, 99])
    num_own = min(rng.choice([0, num_drafts, num_drafts]), room - 1)
    chosen = [rng.randrange(VOCAB_SIZE) for _ in range(num_drafts + 1)]
    drafts = [token if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE) for token in chosen[:num_own]]
    some = [*rng.sample(range(VOCAB_SIZE), 3), rng.choice(chosen), 31, 63]
    return Slot(
        length=length,
        max_length=length + room,
        drafts=drafts + [-1] * (num_drafts - num_own),
        chosen=chosen[: num_own + 1] + [-1] * (num_drafts - num_own),
        stop_ids=rng.choice([(), (), some]),
        has_penalties=rng.random() < 0.5,
        num_logprobs=rng.choice([-1, 0, 3, 20]),
    )


@pytest.mark.parametrize("rows_per_slot", [1, 3, 4])
@pytest.mark.parametrize("num_slots", [1, 40])
def test_commit_of_random_rounds(num_slots: int, rows_per_slot: int, device: str) -> None:
    for seed in range(20 if num_slots == 1 else 3):
        rng = random.Random(f"{seed} {num_slots} {rows_per_slot}")
        slots = [random_slot(rng, rows_per_slot - 1) for _ in range(num_slots)]
        Round(slots, rows_per_slot, device).check()


def test_commit_ends_at_wrong_draft_stop_id_or_length_limit(device: str) -> None:
    chosen = [11, 12, 13, 14]
    right = [11, 12, 13]
    cases = [
        (Slot(5, 99, right, chosen), 4, 0, 3),
        (Slot(5, 99, [11, 60, 13], chosen), 2, 0, 1),  # drafts behind a wrong one are ignored
        (Slot(5, 99, [60, 12, 13], chosen), 1, 0, 0),
        (Slot(5, 99, [11, -1, -1], [11, 12, -1, -1]), 2, 0, 1),
        (Slot(5, 99, [-1, -1, -1], [11, -1, -1, -1]), 1, 0, 0),
        (Slot(5, 99, right, chosen, stop_ids=[12]), 2, FINISHED_STOP, 2),
        (Slot(5, 99, right, chosen, stop_ids=[14, 15]), 4, FINISHED_STOP, 3),
        (Slot(5, 7, [11, -1, -1], [11, 12, -1, -1]), 2, FINISHED_LENGTH, 1),
        (Slot(5, 7, [11, -1, -1], [11, 12, -1, -1], stop_ids=[12]), 2, FINISHED_STOP, 1),
        (Slot(5, 9, right, chosen), 4, FINISHED_LENGTH, 3),
        (Slot(5, 6, [-1, -1, -1], [11, -1, -1, -1]), 1, FINISHED_LENGTH, 0),
        (Slot(5, 99, [11, 11, 11], [11, 11, 11, 11], has_penalties=True), 4, 0, 3),
    ]
    for slot, num_tokens, finish, num_accepted in cases:
        tokens, why, num_right = slot.walk()
        assert (len(tokens), why, num_right) == (num_tokens, finish, num_accepted)

    Round([None, *(slot for slot, *_ in cases), None], 4, device).check()


def simulated_rounds(trace: list[int], num_slots: int, device: str) -> SimulatedRounds:
    num_rounds = torch.zeros(num_slots + 2, dtype=torch.int32, device=device)
    return SimulatedRounds(torch.tensor(trace, dtype=torch.int32, device=device), num_rounds)


@pytest.mark.parametrize("trace", [[1], [4], [3, 3, 3, 3, 4], [2, 1, 4, 4, 1, 3, 2]])
def test_simulated_rounds_emit_the_numbers_of_the_trace(trace: list[int], device: str) -> None:
    num_slots, drafts, chosen = 3, [20, 21, 22], [11, 12, 13, 14]
    simulated = simulated_rounds(trace, num_slots, device)
    emitted: list[list[int]] = []
    for _ in range(2 * len(trace)):
        slots: list[Slot | None] = [Slot(5, 999, drafts, chosen) for _ in range(num_slots)]
        step = Round(slots, 4, device)
        twin, twin_rounds = copy.deepcopy(step), copy.deepcopy(simulated)
        emitted.append(step.run_simulated(simulated))
        commit_simulated_reference(twin.tensors, twin_rounds)
        assert step.results() == twin.results()
        assert torch.equal(simulated.num_rounds, twin_rounds.num_rounds)
        tokens = step.buffers.chosen.view(num_slots, 4).tolist()
        for number, row in zip(emitted[-1], tokens, strict=True):
            assert row[:number] == drafts[: number - 1] + [chosen[number - 1]]

    starts = []
    for index, of_slot in enumerate(zip(*emitted, strict=True)):
        number = step.slot_id(index)
        first = number * simulated.stride % len(trace)
        starts.append(first)
        assert list(of_slot) == (trace[first:] + trace[:first]) * 2
        assert sum(of_slot) == 2 * sum(trace)
    assert len(set(starts)) == min(len(trace), num_slots)


def test_simulated_rounds_end_without_draft_at_stop_id_and_at_length_limit(device: str) -> None:
    slots = [
        Slot(5, 999, [20, -1, -1], [11, 12, -1, -1]),
        Slot(5, 999, [-1, -1, -1], [11, -1, -1, -1]),
        Slot(5, 7, [20, -1, -1], [11, 12, -1, -1]),
        Slot(5, 999, [20, 21, 22], [11, 12, 13, 14], stop_ids=[21]),
        None,
    ]
    step = Round(slots, 4, device)
    simulated = simulated_rounds([4], len(slots), device)
    twin, twin_rounds = copy.deepcopy(step), copy.deepcopy(simulated)
    assert step.run_simulated(simulated) == [2, 1, 2, 2, 0]
    commit_simulated_reference(twin.tensors, twin_rounds)
    assert step.results() == twin.results()
    assert [step.state.finish[step.slot_id(index)].item() for index in range(4)] == [
        0, 0, FINISHED_LENGTH, FINISHED_STOP,
    ]  # fmt: skip
    assert simulated.num_rounds.tolist() == [0, 0, 1, 1, 1, 1, 0]  # padding has no slot


def test_simulated_rounds_of_one_row_are_not_counted(device: str) -> None:
    slots: list[Slot | None] = [Slot(5, 999, [], [11]), Slot(5, 999, [], [12])]
    simulated = simulated_rounds([3, 4], 2, device)
    assert Round(slots, 1, device).run_simulated(simulated) == [1, 1]
    assert simulated.num_rounds.tolist() == [0] * 4


def test_simulated_rounds_do_not_compare_drafts(device: str) -> None:
    """A right draft beyond the trace's number is not accepted, a wrong one within it is."""
    slots: list[Slot | None] = [Slot(5, 999, [11, 12, 13], [11, 12, 13, 14])]
    step = Round(slots, 4, device)
    assert step.run_simulated(simulated_rounds([2], 1, device)) == [2]
    slots = [Slot(5, 999, [20, 12, 13], [11, 12, 13, 14])]
    step = Round(slots, 4, device)
    assert step.run_simulated(simulated_rounds([2], 1, device)) == [2]
    assert step.buffers.chosen.tolist()[:2] == [20, 12]


def test_commit_names_wrong_arguments(device: str) -> None:
    step = Round([Slot(5, 99, [11], [11, 12])], 2, device)
    for name, value, message in (
        ("row_token", step.row_token[:1], r"row_token: \[1\] torch.int32: expected \[2\] torch.int32"),
        ("row_slot", step.row_slot[:1], "row_slot: 1 rows: expected 2 of each of 1 slots"),
        ("next_entry", step.next_entry.long(), r"next_entry: \[1\] torch.int64: expected \[1\] torch.int32"),
        (
            "output_ring",
            step.output_ring[:, :80].contiguous(),
            f"output_ring: 80 words an entry: expected at least {record_words(2)}",
        ),
    ):
        other = copy.copy(step)
        setattr(other, name, value)
        with pytest.raises(ValueError, match=message):
            other.run()
        with pytest.raises(ValueError, match=message):
            other.run_simulated(simulated_rounds([2], 1, device))

    with pytest.raises(ValueError, match=r"num_rounds: \[4\] torch.int32: expected \[3\] torch.int32"):
        step.run_simulated(simulated_rounds([2], 2, device))
