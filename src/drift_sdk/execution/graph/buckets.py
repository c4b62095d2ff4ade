"""The sizes that graphs are captured for, and the sizes of the ring that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from msgspec import Struct

from drift_sdk._kernels.attention.exact_prefill import ExactPrefillConfig, exact_prefill_config
from drift_sdk._kernels.attention.expanded import part_words
from drift_sdk._kernels.attention.prefill import prefill_attention_config
from drift_sdk._kernels.attention.softmax import WIDE_HEAD
from drift_sdk._kernels.commit import record_words
from drift_sdk._kernels.trees.tree_rows import tree_record_words
from drift_sdk.execution.rounds.drafters import RoundSizes
from drift_sdk.models.decoder import Decoder
from drift_sdk.spec.model import BORDER, LatentAttention
from drift_sdk.speculation import TreePlan, ViewLayout, tree_rounds
from drift_sdk.steps import EXPANDED_TILE, MAX_CHUNKS, ExecutorLimits

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Slots of decode steps."""
MIN_PREFILL_ROWS = 16
"""Rows of the smallest prefill bucket."""
FLAT_PREFILL_ROWS = 256
"""Below this many rows, reading the weights is a large part of a prefill step and padding costs little, so
each bucket has twice the rows of the one before."""
MIXED_SLOTS = (8, 32, 64, 128, 256)
"""Slots of mixed steps."""
MIXED_ROWS = (128, 256, 384, 512, 768, 1024)
"""Rows of mixed steps, of chunks and round together: multiples of the rows of the library's tiles. More sizes
would pad steps less, but each takes time at start; the scheduler fills most steps up to a size."""
CHUNK_ROWS, LEAST_CHUNKS = 8, 8
"""Rows of chunks for each chunk that a mixed step has room for, and the least room: tiles of attention take
time even where they are not used."""
MAX_PLAIN_ROWS = 512
"""Most rows of a mixed step without drafts: beside more rows of chunks, those of the round are few. With
drafts a round emits more tokens, so it may take longer: twice its rows are added."""
MAX_DRAFT_PADDING = 2
"""Most times as many rows as it needs that a round has in a mixed step of more drafts than it uses."""
STEPS_PER_OCTAVE = 2
"""Prefill buckets from FLAT_PREFILL_ROWS rows to twice as many, from there to four times as many, and so on.
More buckets would pad steps less, but each takes time at start: it is run once and captured."""


def bucket_of(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending `sizes` that is at least `size`."""
    return next(bucket for bucket in sizes if bucket >= size)


class MixedBucket(NamedTuple):
    """The sizes of a mixed step: rows of chunks, slots of its round, and drafts of each slot."""

    num_rows: int
    num_slots: int
    num_drafts: int

    @property
    def num_round_rows(self) -> int:
        """Rows of the round: of each slot its newest token and the drafts."""
        return self.num_slots * (self.num_drafts + 1)

    @property
    def size(self) -> int:
        """All rows."""
        return self.num_rows + self.num_round_rows


class MixedLayout(NamedTuple):
    """Places in the payload of a mixed step.

    rows: token, slot and position of each row, those of chunks first. The host fills rows of the round only
    where they are the last tokens of prompts, which are counted before the round's rows are made from slots.
    following: of each row of chunks, the token after it. hits: the rows of chunks that follow prefix hits.
    tiles: of the chunks' attention. expanded: as many tiles of the rows that attend to expanded keys; for
    each row whether it does; and the parts of these keys (see `fill_parts`). runs: of recurrent layers, then
    the places of checkpoints. slots: of the round, then the most drafts of each.
    """

    rows: slice
    following: slice
    hits: slice
    tiles: slice
    expanded: slice
    runs: slice
    slots: slice

    @property
    def num_words(self) -> int:
        """Words of the payload."""
        return int(self.slots.stop)


class PrefillLayout(NamedTuple):
    """Places in the payload of a prefill step: token, slot and position of each row; tiles of attention; and
    as in a MixedLayout, `expanded` and `runs`."""

    rows: slice
    tiles: slice
    expanded: slice
    runs: slice

    @property
    def num_words(self) -> int:
        """Words of the payload."""
        return int(self.runs.stop)


class GraphBuckets(Struct, frozen=True, kw_only=True):
    """The sizes that graphs are captured for. All are ascending.

    decode:     slots of decode steps.
    drafts:     tokens that a round may draft for each slot; the first is 0.
    trees:      those of `drafts` that form trees; all of them if rounds are checked.
    has_checks: whether rounds are checked.
    rounds:     (slots, drafts) of rounds.
    prefill:    rows of prefill steps.
    tile_rows:  rows of a tile of prefill attention.
    max_chunks: most chunks of a step.
    is_exact:   whether prompts get the bits of decoding.
    mixed:      sizes of mixed steps, which compute chunks and a round in one pass: without drafts, and with
                the most drafts of chains. Rounds of trees, those that are checked, and engines of one slot
                have none.
    head_dim, dtype: of the largest heads of attention, which its tiles in mixed steps depend on.
    view_layout: of partial verification; None without it.
    has_states: whether layers are recurrent.
    max_expanded_tokens: as in SchedulerConfig.
    """

    decode: tuple[int, ...]
    drafts: tuple[int, ...]
    trees: tuple[int, ...]
    has_checks: bool
    rounds: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    tile_rows: int
    max_chunks: int
    is_exact: bool
    mixed: tuple[MixedBucket, ...]
    head_dim: int
    dtype: torch.dtype
    view_layout: ViewLayout | None = None
    has_states: bool = False
    max_expanded_tokens: int = 0

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        limits: ExecutorLimits,
        budget: int,
        *,
        is_exact: bool,
        draft_choices: Sequence[int] = (),
        tree_choices: Sequence[int] = (),
        shares_rows: bool = False,
        has_checks: bool = False,
        view_layout: ViewLayout | None = None,
        expands_latents: bool = True,
    ) -> GraphBuckets:
        """The buckets of a model and its limits.

        budget: most tokens of a prefill step. draft_choices: numbers of tokens that a round may draft;
        tree_choices: those that form trees. shares_rows: the rows of a round are limited, see `tree_rounds`.
        has_checks: rounds of speculation are checked. view_layout: of partial verification. expands_latents:
        as in GraphOptions.
        """
        head_dim, dtype = decoder.spec.max_head_dim, decoder.dtype
        exact_rows = exact_prefill_config(head_dim, dtype).tile_rows
        decode, drafts = _buckets(DECODE_BUCKETS, limits.max_num_seqs), (0, *draft_choices)
        prefill = prefill_buckets(budget)
        every = [(num_slots, number) for num_slots in decode for number in drafts]
        rounds = tuple(tree_rounds(decode, drafts) if shares_rows else every)
        trees = drafts if has_checks else tuple(tree_choices)
        return cls(
            decode=decode,
            drafts=drafts,
            trees=trees,
            has_checks=has_checks,
            rounds=rounds,
            prefill=prefill,
            tile_rows=exact_rows if is_exact else prefill_attention_config(head_dim, dtype).tile_rows,
            max_chunks=min(limits.max_num_seqs, MAX_CHUNKS),
            is_exact=is_exact,
            mixed=tuple(
                bucket
                for number in dict.fromkeys((0, drafts[-1]))
                if number not in trees and limits.max_num_seqs > 1
                for bucket in _mixed_buckets(prefill[-1], rounds, number)
            ),
            head_dim=head_dim,
            dtype=dtype,
            view_layout=view_layout,
            has_states=bool(decoder.spec.recurrent_layers),
            max_expanded_tokens=max_expanded_tokens(decoder, limits) if expands_latents else 0,
        )

    @property
    def partial_rounds(self) -> tuple[tuple[int, int], ...]:
        """(slots, drafts) of rounds that read views; empty without partial verification."""
        most = max(self.refreshes, default=0)
        return tuple(each for each in self.rounds if each[0] <= most and each[1] > 0)

    @property
    def refreshes(self) -> tuple[int, ...]:
        """Slots of rounds that refresh views; empty without partial verification."""
        if self.view_layout is None:
            return ()

        most = bucket_of(self.decode, min(self.view_layout.max_sequences, self.decode[-1]))
        return tuple(num_slots for num_slots in self.decode if num_slots <= most)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """Slots of steps that sample the first tokens of prompts: those of `decode` that hold the chunks of a
        step."""
        most = bucket_of(self.decode, self.max_chunks)
        return tuple(size for size in self.decode if size <= most)

    @property
    def max_chain(self) -> int:
        """Most drafts of a chain that does not run as a tree."""
        return max((number for number in self.drafts if number not in self.trees), default=0)

    @property
    def mixed_tokens(self) -> dict[int, tuple[tuple[int, tuple[int, ...]], ...]]:
        """Sizes of mixed steps by number of drafts: ascending slots, each with ascending rows of chunks."""
        found = {}
        for number in self.drafts:
            sizes: dict[int, list[int]] = {}
            for bucket in self._mixed_for(number):
                sizes.setdefault(bucket.num_slots, []).append(bucket.num_rows)
            if sizes:
                found[number] = tuple((num_slots, tuple(rows)) for num_slots, rows in sizes.items())
        return found

    @property
    def most_mixed_rows(self) -> int:
        """Most rows of a mixed step, of chunks and round together."""
        return max((bucket.size for bucket in self.mixed), default=0)

    def mixed_bucket(
        self, num_tokens: int, num_chunks: int, num_slots: int, num_drafts: int = 0
    ) -> MixedBucket | None:
        """The mixed step for `num_chunks` chunks of so many rows in all, and slots with at most `num_drafts`
        drafts each; None if there is none."""
        fitting = [bucket for bucket in self._mixed_for(num_drafts) if bucket.num_slots >= num_slots]
        least = min((bucket.num_slots for bucket in fitting), default=0)
        for bucket in fitting:
            has_room = bucket.num_rows >= num_tokens and self.mixed_chunks(bucket) >= num_chunks
            if bucket.num_slots == least and has_room:
                return bucket

        return None

    def mixed_chunks(self, bucket: MixedBucket) -> int:
        """Most chunks of a mixed step."""
        return min(self.max_chunks, max(bucket.num_rows // CHUNK_ROWS, LEAST_CHUNKS))

    def mixed_attention(self, bucket: MixedBucket) -> ExactPrefillConfig:
        """The tiles of the chunks' attention in a mixed step."""
        return exact_prefill_config(self.head_dim, self.dtype, bucket.num_rows)

    def _mixed_for(self, num_drafts: int) -> list[MixedBucket]:
        """Mixed steps for rounds with so many drafts, which may be padded with more."""
        most = MAX_DRAFT_PADDING * (num_drafts + 1) if num_drafts else 1
        numbers = {bucket.num_drafts for bucket in self.mixed if num_drafts <= bucket.num_drafts < most}
        return [bucket for bucket in self.mixed if numbers and bucket.num_drafts == min(numbers)]

    @property
    def max_rows(self) -> int:
        """Most rows of a round: of each slot its newest token and the drafts."""
        return max(num_slots * (number + 1) for num_slots, number in self.rounds)

    def max_slots(self, num_drafts: int) -> int:
        """Most slots of rounds with so many drafts; 0 if there are none."""
        return max((num_slots for num_slots, number in self.rounds if number == num_drafts), default=0)

    @property
    def num_draft_masks(self) -> int:
        """Constraint masks of a split round: one for each row, if slots may have several rows; else 0."""
        return self.max_rows if len(self.drafts) > 1 else 0

    def num_tiles(self, num_rows: int) -> int:
        """Most tiles that the chunks of a prefill step are cut into."""
        return num_rows // self.tile_rows + min(num_rows, self.max_chunks)

    def run_words(self, num_rows: int, num_chunks: int) -> int:
        """Words for the runs of so many chunks and the places of their checkpoints (see `PromptRuns`); 0
        without recurrent layers."""
        return 4 * num_chunks + num_rows // BORDER + num_chunks + 1 if self.has_states else 0

    def expanded_words(self, num_tiles: int, num_rows: int) -> int:
        """Words of the part `expanded` of a layout with so many tiles and rows; 0 if no keys are expanded."""
        most = self.max_expanded_tokens
        return 4 * num_tiles + num_rows + part_words(most) if most else 0

    def prefill_layout(self, num_rows: int) -> PrefillLayout:
        """The payload of a prefill step."""
        num_tiles = self.num_tiles(num_rows)
        sizes = (
            3 * num_rows,
            4 * num_tiles,
            self.expanded_words(num_tiles, num_rows),
            self.run_words(num_rows, self.max_chunks),
        )
        ends = [*accumulate(sizes)]
        return PrefillLayout(*map(slice, [0, *ends], ends))

    def mixed_layout(self, bucket: MixedBucket) -> MixedLayout:
        """The payload of a mixed step."""
        tile_rows, num_chunks = self.mixed_attention(bucket).tile_rows, self.mixed_chunks(bucket)
        num_tiles = bucket.num_rows // tile_rows + min(bucket.num_rows, num_chunks)
        has_drafter = len(self.drafts) > 1
        sizes = (
            3 * bucket.size,
            bucket.num_rows if has_drafter else 0,
            num_chunks if has_drafter else 0,
            4 * num_tiles,
            self.expanded_words(num_tiles, bucket.size),
            self.run_words(bucket.num_rows, num_chunks),
            2 * bucket.num_slots,
        )
        ends = [*accumulate(sizes)]
        return MixedLayout(*map(slice, [0, *ends], ends))

    def draft_extend_words(self, num_rows: int) -> int:
        """Payload words of a step that updates the drafter after prefill: token, slot and position of each
        row and the token after it, then the rows that follow prefix hits."""
        return 4 * num_rows + self.max_chunks

    @property
    def payload_words(self) -> int:
        """Payload words of the largest step; a round's payload has two words for each slot."""
        most = self.prefill[-1]
        words = [2 * self.decode[-1], self.prefill_layout(most).num_words, self.draft_extend_words(most)]
        words += [self.mixed_layout(bucket).num_words for bucket in self.mixed]
        return max(words)

    @property
    def record_words(self) -> int:
        """Result words of the largest round."""
        num_flags = self.decode[-1] if self.has_checks else 0
        return num_flags + max(
            tree_record_words(num_slots) if number in self.trees else num_slots * record_words(number + 1)
            for num_slots, number in self.rounds
        )


EXPANDED_BYTES = 2**30
"""Most bytes of the keys and values that a step expands from latents: 52,352 tokens of GLM-4.7-Flash."""


def max_expanded_tokens(decoder: Decoder, limits: ExecutorLimits) -> int:
    """The most keys of a step that are expanded from latents; 0: attention of prompts is absorbed.

    It is, unless keys and values of a head have the same size, for which there are kernels, and latents are
    in the storage type.
    """
    mixer = decoder.spec.attention
    if not isinstance(mixer, LatentAttention) or decoder.weights.kv_scales is not None:
        return 0

    if mixer.query_dim != mixer.output_dim or mixer.output_dim > WIDE_HEAD:
        return 0

    bytes_per_token = 2 * mixer.num_heads * mixer.output_dim * decoder.dtype.itemsize
    most = -(-limits.max_model_len // EXPANDED_TILE) * min(limits.max_num_seqs, MAX_CHUNKS)
    return min(EXPANDED_BYTES // bytes_per_token // EXPANDED_TILE, most) * EXPANDED_TILE


def prefill_buckets(budget: int) -> tuple[int, ...]:
    """Rows of prefill steps, of up to `budget` tokens."""
    most = -(-budget // MIN_PREFILL_ROWS) * MIN_PREFILL_ROWS
    sizes = [MIN_PREFILL_ROWS]
    while sizes[-1] < most:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + (octave if octave < FLAT_PREFILL_ROWS else octave // STEPS_PER_OCTAVE))
    return _buckets(sizes, most)


def round_sizes(buckets: GraphBuckets, plans: Mapping[int, TreePlan]) -> RoundSizes:
    """Sizes of the largest steps that a drafter takes part in."""
    most = [(buckets.max_slots(number), plan) for number, plan in plans.items()]
    return RoundSizes(
        max_num_slots=buckets.decode[-1],
        max_draft_tokens=max(number for number in buckets.drafts if number not in plans),
        max_prefill_rows=buckets.prefill[-1],
        max_path_length=max((plan.depth for _, plan in most), default=0),
        max_path_rows=max((num_slots * (plan.depth + 1) for num_slots, plan in most), default=0),
        max_growth_rows=max((num_slots * plan.num_draft_nodes for num_slots, plan in most), default=0),
    )


def _mixed_buckets(most_rows: int, rounds: Sequence[tuple[int, int]], num_drafts: int) -> list[MixedBucket]:
    """Mixed steps whose rounds have so many drafts, in ascending order: with up to `most_rows` rows of
    chunks, and at least half as many as the round has."""
    found: list[MixedBucket] = []
    most_slots = max(num_slots for num_slots, number in rounds if number == num_drafts)
    for num_slots in _buckets(MIXED_SLOTS, most_slots):
        round_rows = num_slots * (num_drafts + 1)
        most = MAX_PLAIN_ROWS + (2 * round_rows if num_drafts else 0)
        sizes = {
            min(size - round_rows, most_rows)
            for size in MIXED_ROWS
            if size <= most and size - round_rows >= max(round_rows // 2, 1)
        }
        found += [MixedBucket(size, num_slots, num_drafts) for size in sorted(sizes)]
    return found


def _buckets(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The sizes below `most`, then `most` itself."""
    return (*(size for size in sizes if size < most), most)
