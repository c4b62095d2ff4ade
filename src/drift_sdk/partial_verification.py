"""Settings of partial verification, and the part of a sequence's keys and values that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from drift_sdk._fields import ConfigFields, check_fields, make_struct
from drift_sdk.errors import ConfigError

__all__ = ["MAX_VIEW_BLOCK_SIZE", "PartialVerification", "ViewLayout"]

MAX_VIEW_BLOCK_SIZE = 64
"""Most tokens of a block. A larger block is read whole for the few tokens in it that are attended to."""

MAX_TOKENS = 2**20
MAX_REFRESH_TOKENS = 128
MAX_REFRESH_ROWS = 1024
"""Most rows of a refresh, of all sequences together."""
MAX_QUERY_ROWS = 64
"""Most rows of a sequence, times query heads of a group, for which a program of attention has registers."""


class PartialVerification(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """Lossy verification of drafts in long sequences over a part of their keys and values (SpecPV, arXiv
    2512.02337): the first tokens of a sequence, the last ones, and in each layer the blocks between them that
    get most attention. Tokens may differ from those without it. At intervals a round verifies over all keys
    and values, computes those of the tokens accepted since again, and chooses the blocks anew; what was
    emitted before is not revised.

    sink_tokens:      tokens at the beginning that are always read, 1 to 2**20, in whole blocks.
    retrieved_tokens: tokens read between the first and the last ones, 1 to 2**20, in whole blocks.
    window_tokens:    tokens at the end that are always read, 1 to 2**20, beside those since the last full
                      verification.
    refresh_tokens:   most tokens that are accepted by partial verification before a full one, 2 to 128, and
                      more than a round drafts. More of them cost less time and more agreement.

    Sequences of no more than these tokens together are verified as without it. A wrong value raises
    ConfigError.
    """

    sink_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 64
    retrieved_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 4096
    window_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 256
    refresh_tokens: Annotated[int, Meta(ge=2, le=MAX_REFRESH_TOKENS)] = 28

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> PartialVerification:
        """Make it from plain data. ConfigError for a wrong value, and for an unknown field, with the name of
        the most similar one."""
        return make_struct(ConfigError, cls, settings)

    def layout(self, block_size: int, num_draft_tokens: int) -> ViewLayout:
        """The layout of views for blocks of so many tokens and rounds of at most so many drafts."""
        return ViewLayout(
            block_size=block_size,
            num_sinks=-(-self.sink_tokens // block_size),
            num_retrieved=-(-self.retrieved_tokens // block_size),
            window_tokens=self.window_tokens,
            refresh_tokens=self.refresh_tokens,
            num_drafts=num_draft_tokens,
            max_sequences=MAX_REFRESH_ROWS // (self.refresh_tokens + num_draft_tokens + 1),
        )


class ViewLayout(Struct, frozen=True, kw_only=True):
    """The layout of views: block tables of a part of a sequence's blocks, in order.

    A view has the sequence's first `num_sinks` blocks, `num_retrieved` chosen ones, and all from the first
    block of its window on. Where no more blocks than these lie before the window, it has all blocks. A key at
    position p from the window on has the position p - block_size * dropped in the view, where `dropped` is
    the number of blocks left out.

    block_size:     tokens of a block.
    window_tokens:  fewest tokens of the window, at the time of a refresh.
    refresh_tokens: most pending tokens: those accepted in partial rounds since.
    num_drafts:     most drafts of a round.
    max_sequences:  most sequences that decode together over views: a refresh of more takes too many rows.
    """

    block_size: int
    num_sinks: int
    num_retrieved: int
    window_tokens: int
    refresh_tokens: int
    num_drafts: int
    max_sequences: int

    @property
    def num_kept(self) -> int:
        """Blocks before the window."""
        return self.num_sinks + self.num_retrieved

    @property
    def num_blocks(self) -> int:
        """Most blocks of a view."""
        num_last = self.window_tokens + self.refresh_tokens + self.num_drafts + 1
        return self.num_kept + -(-num_last // self.block_size) + 2

    def refresh_tiles(self, group: int) -> tuple[int, int]:
        """Tiles that a sequence's rows of a refresh are divided into, and rows of a tile, the last of them
        being padding where they are more. group: query heads that share a KV head."""
        num_rows = self.refresh_tokens + self.num_drafts + 1
        num_tiles = -(-num_rows // max(1, MAX_QUERY_ROWS // group))
        return num_tiles, -(-num_rows // num_tiles)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequences that need no refresh, because a view has all their blocks."""
        return self.num_kept * self.block_size + self.window_tokens

    def first_window_block(self, position: int) -> int:
        """The window's first block after a refresh whose newest token is at a position."""
        return max(position + 1 - self.window_tokens, 0) // self.block_size

    def num_dropped(self, position: int) -> int:
        """Blocks that views leave out after a refresh whose newest token is at a position."""
        return max(self.first_window_block(position) - self.num_kept, 0)
