"""Which graphs an executor captures, and how much its rings must hold for them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from drift_sdk._kernels.attention.prefill_attention import prefill_attention_config
from drift_sdk._kernels.commit.commit import record_words
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

__all__ = ["EXACT_TILE_ROWS", "GraphBuckets", "bucket_of"]

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MIN_PREFILL_ROWS = 16
FLAT_PREFILL_ROWS = 256
"""Below, reading the weights is a large part of a prefill step, and padding costs little."""
STEPS_PER_OCTAVE = 2
"""Buckets from FLAT_PREFILL_ROWS to twice as many, and so on. More of them would pad steps less, and take
time at start: each is run once and captured."""
EXACT_TILE_ROWS = 8
"""In exact prefill, rows of a chunk that are attended together, as if they were to be verified."""


def bucket_of(sizes: Sequence[int], size: int) -> int:
    """The smallest of `sizes`, ascending, that `size` fits in."""
    return next(bucket for bucket in sizes if bucket >= size)


class GraphBuckets(Struct, frozen=True, kw_only=True):
    """decode: slots of decode steps; drafts: how many tokens a round may draft; prefill: tokens of prefill
    steps: all ascending.

    tile_rows: of a tile of prefill attention. max_chunks: most chunks of a prefill step. is_exact: prefill in
    the kernels of decoding, each chunk padded to whole tiles.
    """

    decode: tuple[int, ...]
    drafts: tuple[int, ...]
    prefill: tuple[int, ...]
    tile_rows: int
    max_chunks: int
    is_exact: bool

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        limits: ExecutorLimits,
        budget: int,
        *,
        is_exact: bool,
        draft_choices: Sequence[int] = (),
    ) -> GraphBuckets:
        attention = prefill_attention_config(decoder.config.head_dim, decoder.dtype)
        tile_rows = EXACT_TILE_ROWS if is_exact else attention.tile_rows
        most = budget + (min(limits.max_num_seqs, budget) * (tile_rows - 1) if is_exact else 0)
        return cls(
            decode=_buckets(DECODE_BUCKETS, limits.max_num_seqs),
            drafts=(0, *draft_choices),
            prefill=_prefill_buckets(-(-most // MIN_PREFILL_ROWS) * MIN_PREFILL_ROWS),
            tile_rows=tile_rows,
            max_chunks=limits.max_num_seqs,
            is_exact=is_exact,
        )

    @property
    def max_rows_per_slot(self) -> int:
        return self.drafts[-1] + 1

    @property
    def max_rows(self) -> int:
        """Of a decode step."""
        return self.decode[-1] * self.max_rows_per_slot

    @property
    def num_draft_masks(self) -> int:
        """One for each row of a decode step, if slots may have several."""
        return self.max_rows if self.max_rows_per_slot > 1 else 0

    def num_tiles(self, num_rows: int) -> int:
        return num_rows // self.tile_rows + min(num_rows, self.max_chunks)

    def padded(self, num_tokens: int) -> int:
        """Rows of a chunk; in exact mode it ends with a tile of rows."""
        return -(-num_tokens // self.tile_rows) * self.tile_rows if self.is_exact else num_tokens

    def prefill_words(self, num_rows: int) -> int:
        """Payload: token, slot and position of each row, then the tiles."""
        return 3 * num_rows + 4 * self.num_tiles(num_rows)

    def follow_words(self, num_rows: int) -> int:
        """Payload: token, slot and position of each row and the token behind it, then hits."""
        return 4 * num_rows + self.max_chunks

    @property
    def payload_words(self) -> int:
        most = self.prefill[-1]
        return max(2 * self.decode[-1], self.prefill_words(most), self.follow_words(most))

    @property
    def record_words(self) -> int:
        return self.decode[-1] * record_words(self.max_rows_per_slot)


def _prefill_buckets(most: int) -> tuple[int, ...]:
    sizes = [MIN_PREFILL_ROWS]
    while sizes[-1] < most:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + (octave if octave < FLAT_PREFILL_ROWS else octave // STEPS_PER_OCTAVE))
    return _buckets(sizes, most)


def _buckets(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Those of `sizes` below `most`, and `most`."""
    return (*(size for size in sizes if size < most), most)
