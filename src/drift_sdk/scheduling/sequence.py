"""Sequences, the scheduler's state of requests: waiting and running, in order of (priority, arrival)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.processors import LogitsFunction
from drift_sdk.results import FinishReason
from drift_sdk.scheduling.prefix import PrefixNode
from drift_sdk.steps import EXPANDED_TILE, SlotOutput, SlotSampling, TokenConstraint, Verification

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class KeptCheckpoint:
    """A checkpoint that a running sequence holds until it publishes the block before `position`.

    checkpoint: its place; -1: another chunk has taken it.
    """

    __slots__ = ("checkpoint", "position")

    def __init__(self, position: int) -> None:
        self.position: int = position
        self.checkpoint: int = -1


class Sequence:
    """The scheduler's state of a request: its tokens, its slot and blocks, and its steps in flight.

    While steps are in flight, only the device knows the sequence's length. It lies between
    `len(token_ids) + min_in_flight_tokens` and `len(token_ids) + max_in_flight_tokens`.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "constraint",
        "finish",
        "functions",
        "awaits_mask",
        "is_bound",
        "mask_asked_at",
        "mask_s",
        "borders",
        "cache_salt",
        "is_publishing",
        "kept_checkpoints",
        "has_draft_kv",
        "has_views",
        "has_wrong_drafts",
        "matched_nodes",
        "max_draft_tokens",
        "max_in_flight_tokens",
        "max_length",
        "max_pending_tokens",
        "min_in_flight_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expanded_tokens",
        "num_in_flight",
        "num_matched_blocks",
        "num_planned_tokens",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_recycled_blocks",
        "num_steps_without_tokens",
        "order",
        "prefix_nodes",
        "priority",
        "refreshed_in",
        "request_id",
        "sampling",
        "slot",
        "started_at",
        "token_ids",
        "wanted_checkpoints",
        "window_table",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling: SlotSampling,
        priority: int,
        arrival: int,
        constraint: TokenConstraint | None = None,
        functions: tuple[LogitsFunction, ...] = (),
        max_draft_tokens: int | None = None,
        cache_salt: str | None = None,
        borders: tuple[int, ...] = (),
    ) -> None:
        self.request_id: str = request_id
        self.sampling: SlotSampling = sampling
        self.priority: int = priority
        self.arrival: int = arrival
        self.order: tuple[int, int] = (priority, arrival)
        self.max_length: int = sampling.max_length
        self.constraint: TokenConstraint | None = constraint
        self.functions: tuple[LogitsFunction, ...] = functions  # that change its logits
        self.max_draft_tokens: int | None = max_draft_tokens  # None = as many as the batch drafts
        self.cache_salt: str | None = cache_salt  # cached blocks are shared with sequences of an equal one
        self.borders: tuple[int, ...] = borders  # where other prompts may branch off: for checkpoints
        self.has_draft_kv: bool = False  # set by the scheduler
        self.num_expanded_tokens: int | None = None  # set by the scheduler, see `num_expanded_tokens`
        self.has_wrong_drafts: bool = False  # set when a check has found them wrong: no more are planned
        # While the host computes a constraint's mask, no row is planned; since when; how long it took last.
        self.awaits_mask, self.mask_asked_at, self.mask_s = False, 0.0, 0.0
        self.is_bound: bool = False  # whether a plan lacked its row because the token before was not known
        self.token_ids: list[int] = list(prompt_ids)  # prompt and committed output
        self.num_prompt_tokens: int = len(prompt_ids)
        self.num_cached_tokens: int = 0  # prefix hit of the first admission
        self.started_at: float | None = None  # time.monotonic() of the first admission
        self.finish: FinishReason | None = None

        # State of a running sequence. A waiting one has slot -1 and no blocks.
        self.slot: int = -1
        self.block_table: list[int] = []
        # Cached nodes of the table's first entries. While waiting, an earlier match that may be outdated.
        self.prefix_nodes: list[PrefixNode] = []
        # Blocks of layers with windows, if these have blocks of their own; the first ones, behind the window,
        # are no longer the sequence's.
        self.window_table: list[int] = []
        self.num_recycled_blocks: int = 0
        self.num_matched_blocks: int = 0  # cached nodes of its tokens at its admission
        # Of a running sequence with recurrent states or windows: cached nodes of its tokens from the root on,
        # of which it references `prefix_nodes` alone, so that others may have been evicted.
        self.matched_nodes: list[PrefixNode] = []
        # With recurrent states: positions at which checkpoints are still to be planned, ascending; and
        # checkpoints at blocks that it has not published.
        self.wanted_checkpoints: list[int] = []
        self.kept_checkpoints: list[KeptCheckpoint] = []
        self.is_publishing: bool = True  # False once another sequence has published an equal block
        self.num_prefill_tokens: int = 0  # length at admission: tokens that chunks compute, and cached ones
        self.num_planned_tokens: int = 0  # those of them in planned chunks or cached
        self.num_steps_without_tokens: int = 0  # steps in a row that gave tokens to other prompts alone
        # KV below this position is committed, and computed from the whole context; steps in flight write from
        # it on. While waiting, the cached tokens of the earlier match.
        self.num_computed_tokens: int = 0

        # Launched steps that are not committed, and the fewest and most tokens they emit.
        self.num_in_flight: int = 0
        self.min_in_flight_tokens: int = 0
        self.max_in_flight_tokens: int = 0

        # Partial verification: most pending rows after the launched steps; the id of the launched step that
        # has refreshed the sequence's views last, -1: none since its admission; and whether all rounds that
        # were launched since are rounds over views.
        self.max_pending_tokens: int = 0
        self.refreshed_in: int = -1
        self.has_views: bool = False

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    def __repr__(self) -> str:
        length = len(self.token_ids)
        return f"<Sequence {self.request_id!r} order={self.order} length={length} slot={self.slot}>"

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.slot >= 0

    @property
    def is_prefilling(self) -> bool:
        """True if prefill chunks remain to be planned."""
        return self.num_planned_tokens < self.num_prefill_tokens

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens that are neither in planned chunks nor cached."""
        if not self.is_running:
            return len(self.token_ids) - self.num_computed_tokens

        return self.num_prefill_tokens - self.num_planned_tokens

    def num_expanded_keys(self, num_tokens: int) -> int:
        """The keys that are expanded for the next chunk, of so many tokens: a multiple of EXPANDED_TILE."""
        start = self.num_planned_tokens if self.is_running else self.num_computed_tokens
        most = self.num_expanded_tokens or 0
        end = min(start + num_tokens, most)
        return -(-end // EXPANDED_TILE) * EXPANDED_TILE if start < end else 0

    @property
    def num_sharable_tokens(self) -> int:
        """The most tokens that the sequence may take from the cache. Log-probabilities of its prompt that are
        still to be computed need all positions before the tokens that get one, from the first of these on;
        the hidden states of all tokens need every position. The last token is always computed, because the
        next token follows from its logits."""
        remaining, last = self.remaining_sampling, len(self.token_ids) - 1
        if remaining.prompt_states in ("mean", "all"):
            return 0

        return (
            last if remaining.num_prompt_logprobs is None else min(last, remaining.first_prompt_logprob - 1)
        )

    @property
    def remaining_sampling(self) -> SlotSampling:
        """The parameters for what is still to be computed: the prompt's log-probabilities and hidden states
        are reported with the first token, and not again after a preemption."""
        sampling = self.sampling
        is_reported = sampling.num_prompt_logprobs is not None or sampling.prompt_states is not None
        if not is_reported or self.num_output_tokens == 0:
            return sampling

        return replace(sampling, num_prompt_logprobs=None, prompt_states=None)

    def await_mask(self, now: float) -> None:
        """Plan no row until `end_mask`."""
        self.awaits_mask, self.mask_asked_at = True, now

    def end_mask(self, now: float) -> None:
        """The mask after the newest tokens is known."""
        self.awaits_mask, self.mask_s = False, now - self.mask_asked_at

    def mask_ahead(self, most_drafts: int) -> NDArray[np.int32] | None:
        """The constraint's mask for a row of at most `most_drafts` draft tokens that is planned while steps
        are in flight, if one token alone is not known and the mask does not depend on it; else None."""
        is_next = not most_drafts and self.min_in_flight_tokens == self.max_in_flight_tokens == 1
        return self.constraint.mask_ahead() if is_next and self.constraint is not None else None

    def num_kv_slots(self, length: int) -> int:
        """The number of KV slots in use when the sequence has `length` tokens, or `max_length` if that is
        less."""
        # The newest token's own KV is written by the step it is the input of. With a draft, its slot is used
        # before: it holds the draft row that combines this token with the feature of the position before.
        length = length if length < self.max_length else self.max_length
        return length if self.has_draft_kv else length - 1

    def num_draft_tokens(self, most: int) -> int:
        """The number of tokens to draft in the next step, at most `most`: no more than can be emitted besides
        the token that the target itself adds."""
        return min(self._most_drafts(most), self.room)

    @property
    def room(self) -> int:
        """Most draft tokens that the next step can accept: those that can be emitted besides the token that
        the target itself adds."""
        return self.max_length - len(self.token_ids) - self.min_in_flight_tokens - 1

    def num_tree_tokens(self, most: int, max_depth: int) -> int:
        """The number of tokens to draft in the next step in the form of a tree, at most `most`. A path of it
        has at most `max_depth` tokens. The tree of a constrained sequence is a chain."""
        most = self._most_drafts(most)
        if max_depth <= 0 or self.constraint is not None:
            return min(most, max(max_depth, 0))

        return most

    def _most_drafts(self, most: int) -> int:
        """The number of draft tokens that the request and its constraint allow, at most `most`."""
        if self.constraint is not None and self.constraint.is_slow:
            return 0

        return most if self.max_draft_tokens is None else min(self.max_draft_tokens, most)

    def launch(self, least: int, most: int) -> None:
        """Count a planned step that emits `least` to `most` tokens as in flight."""
        self.num_in_flight += 1
        self.min_in_flight_tokens += least
        self.max_in_flight_tokens += most

    def complete(self, least: int, most: int) -> None:
        """Count such a step as no longer in flight: its result is being committed."""
        self.num_in_flight -= 1
        self.min_in_flight_tokens -= least
        self.max_in_flight_tokens -= most


class SequenceWatcher(Protocol):
    """An observer of sequences that get and lose their slots, called while a step is planned."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has got a slot."""

    def preempted(self, sequence: Sequence) -> None:
        """The sequence has given up its slot and KV."""


class Delta(Struct, frozen=True, gc=False):
    """The output that one committed step added to a sequence.

    num_planned_drafts: draft tokens planned for its row; None for the token of a last prefill chunk, for
    which nothing can be drafted. verification: of the row's round.
    """

    sequence: Sequence
    output: SlotOutput
    num_planned_drafts: int | None = None
    verification: Verification = "whole"


class WaitingQueue:
    """Sequences without a slot, in order of (priority, arrival), the lowest first.

    A preempted sequence returns to its place in this order.
    """

    def __init__(self) -> None:
        # A sorted list: moving a few thousand pointers is cheaper than a heap's comparisons in Python, and a
        # cancelled sequence can be removed at once.
        self._sequences: list[Sequence] = []
        self.num_never_started: int = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self, most: int) -> list[Sequence]:
        """The first `most` sequences, or all."""
        return self._sequences[:most]

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place in the order."""
        insort(self._sequences, sequence)
        self.num_never_started += sequence.started_at is None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is waiting."""
        index = bisect_left(self._sequences, sequence)
        while index < len(self._sequences) and self._sequences[index].order == sequence.order:
            if self._sequences[index] is sequence:
                del self._sequences[index]
                self.num_never_started -= sequence.started_at is None
                return

            index += 1

    def check_integrity(self) -> None:
        """Raise AssertionError if the order or a count is wrong, or a sequence has finished or has a slot."""
        assert self._sequences == sorted(self._sequences), "waiting sequences are out of order"
        num_never_started = sum(sequence.started_at is None for sequence in self._sequences)
        assert num_never_started == self.num_never_started, f"{self.num_never_started} counted as new"
        for sequence in self._sequences:
            assert sequence.finish is None, f"{sequence} has finished and waits"
            assert sequence.slot < 0 and not sequence.block_table, f"{sequence} waits with slot or blocks"


class RunningSet:
    """Sequences with a slot, in order of (priority, arrival), the lowest first."""

    def __init__(self, max_num_seqs: int) -> None:
        self.sequences: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs

    @property
    def lowest_priority(self) -> Sequence:
        """The last sequence in the order, which is preempted first. There must be one."""
        return self.sequences[-1]

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        """Give a sequence a free slot; there must be one."""
        sequence.slot = self._free_slots.pop()
        insort(self.sequences, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free the slot of a running sequence."""
        self.sequences.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def check_integrity(self) -> None:
        """Raise AssertionError if the order is wrong, or a slot is neither free nor held by one sequence."""
        assert self.sequences == sorted(self.sequences), "running sequences are out of order"
        slots = sorted([sequence.slot for sequence in self.sequences] + self._free_slots)
        assert slots == list(range(self._max_num_seqs)), f"slots held or free: {slots}"
