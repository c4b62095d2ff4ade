"""The sizes that graphs are captured for, and the sizes of the ring that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from drift_sdk._kernels.attention.exact_prefill_attention import exact_prefill_config
from drift_sdk._kernels.attention.prefill_attention import prefill_attention_config
from drift_sdk._kernels.commit.records import record_words
from drift_sdk._kernels.trees.tree_accept import tree_record_words
from drift_sdk.execution.rounds.tree_plan import tree_rounds
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

__all__ = ["GraphBuckets", "bucket_of"]

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Slots of decode steps."""
MIN_PREFILL_ROWS = 16
"""Rows of the smallest prefill bucket."""
FLAT_PREFILL_ROWS = 256
"""Below this many rows, reading the weights is a large part of a prefill step and padding costs little, so
each bucket has twice the rows of the one before."""
MIXED_SLOTS = (16, 64, 128, 256)
"""Slots of mixed steps."""
MIXED_ROWS = (128, 256, 384, 512)
"""Rows of mixed steps, of chunks and slots together: multiples of 128, by which the library's kernels divide
them. Beside more rows of chunks, decode rows are few."""
STEPS_PER_OCTAVE = 2
"""Prefill buckets from FLAT_PREFILL_ROWS rows to twice as many, from there to four times as many, and so on.
More buckets would pad steps less, but each takes time at start: it is run once and captured."""


def bucket_of(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending `sizes` that is at least `size`."""
    return next(bucket for bucket in sizes if bucket >= size)


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
    mixed:      rows of chunks and slots of mixed steps, which compute chunks and decode rows in one pass;
                empty with drafts.
    mixed_tile_rows: rows of a tile of attention in mixed steps.
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
    mixed: tuple[tuple[int, int], ...]
    mixed_tile_rows: int

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
    ) -> GraphBuckets:
        """The buckets of a model and its limits.

        budget: most tokens of a prefill step. draft_choices: numbers of tokens that a round may draft;
        tree_choices: those that form trees. shares_rows: the rows of a round are limited, see `tree_rounds`.
        has_checks: rounds of speculation are checked.
        """
        head_dim, dtype = decoder.config.head_dim, decoder.dtype
        exact_rows = exact_prefill_config(head_dim, dtype).tile_rows
        most = -(-budget // MIN_PREFILL_ROWS) * MIN_PREFILL_ROWS
        decode, drafts = _buckets(DECODE_BUCKETS, limits.max_num_seqs), (0, *draft_choices)
        every = [(num_slots, number) for num_slots in decode for number in drafts]
        return cls(
            decode=decode,
            drafts=drafts,
            trees=drafts if has_checks else tuple(tree_choices),
            has_checks=has_checks,
            rounds=tuple(tree_rounds(decode, drafts) if shares_rows else every),
            prefill=_prefill_buckets(most),
            tile_rows=exact_rows if is_exact else prefill_attention_config(head_dim, dtype).tile_rows,
            max_chunks=limits.max_num_seqs,
            is_exact=is_exact,
            mixed=() if draft_choices else _mixed_buckets(most, limits.max_num_seqs),
            mixed_tile_rows=exact_rows,
        )

    @property
    def max_chain(self) -> int:
        """Most drafts of a chain that does not run as a tree."""
        return max((number for number in self.drafts if number not in self.trees), default=0)

    @property
    def mixed_slots(self) -> tuple[int, ...]:
        """Slots of mixed steps."""
        return tuple(sorted({num_slots for _, num_slots in self.mixed}))

    @property
    def most_mixed_rows(self) -> int:
        """Most rows of a mixed step, of chunks and slots together."""
        return max((sum(bucket) for bucket in self.mixed), default=0)

    def mixed_bucket(self, num_tokens: int, num_slots: int) -> tuple[int, int] | None:
        """Rows of chunks and slots of the mixed step for so many tokens of chunks and decode rows; None if
        there is none."""
        if not self.mixed:
            return None

        slots = bucket_of(self.mixed_slots, num_slots)
        rows = [rows for rows, each in self.mixed if each == slots]
        return (bucket_of(rows, num_tokens), slots) if num_tokens <= rows[-1] else None

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

    def num_tiles(self, num_rows: int, tile_rows: int) -> int:
        """Most tiles of `tile_rows` rows that chunks of `num_rows` rows are cut into."""
        return num_rows // tile_rows + min(num_rows, self.max_chunks)

    def prefill_words(self, num_rows: int) -> int:
        """Payload words of a prefill step: token, slot and position of each row, then the tiles."""
        return 3 * num_rows + 4 * self.num_tiles(num_rows, self.tile_rows)

    def mixed_words(self, num_rows: int, num_slots: int) -> int:
        """Payload words of a mixed step: token, slot and position of each row of chunks, room for the same of
        each slot's row, the tiles, then slots and most drafts."""
        num_tiles = self.num_tiles(num_rows, self.mixed_tile_rows)
        return 3 * (num_rows + num_slots) + 4 * num_tiles + 2 * num_slots

    def draft_extend_words(self, num_rows: int) -> int:
        """Payload words of a step that updates the drafter after prefill: token, slot and position of each
        row and the token after it, then the rows that follow prefix hits."""
        return 4 * num_rows + self.max_chunks

    @property
    def payload_words(self) -> int:
        """Payload words of the largest step; a round's payload has two words for each slot."""
        most = self.prefill[-1]
        words = [2 * self.decode[-1], self.prefill_words(most), self.draft_extend_words(most)]
        return max(*words, *(self.mixed_words(*bucket) for bucket in self.mixed))

    @property
    def record_words(self) -> int:
        """Result words of the largest round."""
        num_flags = self.decode[-1] if self.has_checks else 0
        return num_flags + max(
            tree_record_words(num_slots) if number in self.trees else num_slots * record_words(number + 1)
            for num_slots, number in self.rounds
        )


def _prefill_buckets(most: int) -> tuple[int, ...]:
    """Rows of prefill steps, up to `most`."""
    sizes = [MIN_PREFILL_ROWS]
    while sizes[-1] < most:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + (octave if octave < FLAT_PREFILL_ROWS else octave // STEPS_PER_OCTAVE))
    return _buckets(sizes, most)


def _mixed_buckets(most_rows: int, most_slots: int) -> tuple[tuple[int, int], ...]:
    """Rows of chunks, up to `most_rows`, and slots of mixed steps, of at least as many rows as slots."""
    buckets: list[tuple[int, int]] = []
    for num_slots in _buckets(MIXED_SLOTS, most_slots):
        sizes = {
            min(size - num_slots, most_rows) for size in MIXED_ROWS if size - num_slots >= num_slots // 2
        }
        buckets += [(size, num_slots) for size in sorted(sizes)]
    return tuple(buckets)


def _buckets(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """The sizes below `most`, then `most` itself."""
    return (*(size for size in sizes if size < most), most)
