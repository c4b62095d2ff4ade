"""Building the plan of one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import BlockUpdate, DecodeRow, PrefillChunk, SlotAssignment, StepPlan, Verification

__all__ = ["PlannedStep", "StepBuilder", "check_in_flight"]


class PlannedStep(NamedTuple):
    """A plan with the sequences of its chunks and rows: at its commit, a slot may hold another sequence."""

    plan: StepPlan
    prefill: list[Sequence]
    decode: list[Sequence]


class StepBuilder:
    """Collects the parts of a step's plan.

    num_draft_tokens:  of the batch; a row may have fewer. verification: of the decode part.
    wants_history:     assignments carry the token ids of prefix hits.
    """

    def __init__(
        self, num_draft_tokens: int, *, wants_history: bool, verification: Verification = "whole"
    ) -> None:
        self.num_draft_tokens: int = num_draft_tokens
        self.verification: Verification = verification
        self.prefill: list[Sequence] = []
        self.decode: list[Sequence] = []
        self._wants_history = wants_history
        self._rows: list[DecodeRow] = []
        self._assignments: list[SlotAssignment] = []
        self._block_updates: list[BlockUpdate] = []
        self._chunks: list[PrefillChunk] = []

    @property
    def num_mixed_drafts(self) -> int | None:
        """Draft tokens of rows that may share a pass with chunks; None: they have a pass of their own."""
        return self.num_draft_tokens if self.verification == "whole" else None

    def assign_slot(self, sequence: Sequence) -> None:
        """Add the assignment of an admitted sequence to its slot."""
        nodes = sequence.prefix_nodes
        place = nodes[-1].checkpoint if nodes else -1
        cached: tuple[int, ...] = ()
        if self._wants_history or sequence.sampling.has_penalties:
            cached = tuple(sequence.token_ids[: sequence.num_computed_tokens])

        self._assignments.append(
            SlotAssignment(
                slot=sequence.slot,
                sampling=sequence.remaining_sampling,
                constraint=sequence.constraint,
                cached_token_ids=cached,
                arrival=sequence.arrival,
                checkpoint=place if place >= 0 else None,
            )
        )

    def update_blocks(self, sequence: Sequence, first_index: int) -> None:
        """Add the entries of the sequence's block table from `first_index` on."""
        block_ids = tuple(sequence.block_table[first_index:])
        self._block_updates.append(
            BlockUpdate(slot=sequence.slot, first_index=first_index, block_ids=block_ids)
        )

    def add_row(self, sequence: Sequence, row: DecodeRow, max_emitted_tokens: int) -> None:
        """Add a decode row of a sequence. max_emitted_tokens: the row's, which the caller has computed."""
        sequence.launch(1, max_emitted_tokens)
        self.decode.append(sequence)
        self._rows.append(row)

    def add_chunk(
        self, sequence: Sequence, num_tokens: int, checkpoints: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Add the sequence's next prefill chunk, of `num_tokens` tokens. checkpoints: the chunk's."""
        start = sequence.num_planned_tokens
        end = start + num_tokens
        is_last = end == sequence.num_prefill_tokens
        sequence.num_planned_tokens = end
        sequence.launch(is_last, is_last)
        self.prefill.append(sequence)
        self._chunks.append(
            PrefillChunk(
                slot=sequence.slot,
                start=start,
                token_ids=tuple(sequence.token_ids[start:end]),
                next_token_id=None if is_last else sequence.token_ids[end],
                checkpoints=checkpoints,
            )
        )

    def build(self, step_id: int) -> PlannedStep:
        """The plan of everything added so far."""
        plan = StepPlan(
            step_id=step_id,
            assignments=tuple(self._assignments),
            block_updates=tuple(self._block_updates),
            prefill=tuple(self._chunks),
            decode=tuple(self._rows),
            verification=self.verification if self._rows else "whole",
        )
        return PlannedStep(plan, self.prefill, self.decode)


def check_in_flight(planned: Iterable[PlannedStep], sequences: Iterable[Sequence]) -> None:
    """Raise AssertionError unless every sequence's in-flight counts equal those of the planned steps."""
    in_flight = {sequence: [0, 0, 0] for sequence in sequences}
    for plan, prefill, decode in planned:
        emitted = [(int(chunk.is_last), int(chunk.is_last)) for chunk in plan.prefill]
        emitted += [(1, row.max_emitted_tokens) for row in plan.decode]
        for sequence, (least, most) in zip(prefill + decode, emitted, strict=True):
            counts = in_flight.setdefault(sequence, [0, 0, 0])
            counts[:] = counts[0] + 1, counts[1] + least, counts[2] + most

    for sequence, counts in in_flight.items():
        found = [sequence.num_in_flight, sequence.min_in_flight_tokens, sequence.max_in_flight_tokens]
        assert found == counts, f"{sequence}: in flight {found}, planned {counts}"
