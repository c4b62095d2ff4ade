"""What may speculate, and how far."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from drift_sdk._validation import check_bool, check_choice, check_int
from drift_sdk.errors import ConfigError

__all__ = ["Chain", "NGram", "Speculation"]

MAX_DRAFT_TOKENS = 16
MAX_NGRAM = 16


class Chain(Struct, frozen=True):
    """One drafted token after the other, `num_draft_tokens` of them a round."""

    num_draft_tokens: int = 3

    def __post_init__(self) -> None:
        check_int(ConfigError, "num_draft_tokens", self.num_draft_tokens, ge=1, le=MAX_DRAFT_TOKENS)

    @property
    def choices(self) -> tuple[int, ...]:
        """The lengths a batch may choose from; graphs are captured for these."""
        shorter = [length for length in (1, 3, 5, 8, 12) if length < self.num_draft_tokens]
        return (*shorter, self.num_draft_tokens)


class NGram(Struct, frozen=True, kw_only=True):
    """Drafts by looking up what followed the last time a sequence said this; needs no draft model.

    A run of `max_length` down to `min_length` tokens is looked for.
    """

    min_length: int = 2
    max_length: int = 4

    def __post_init__(self) -> None:
        check_int(ConfigError, "min_length", self.min_length, ge=1, le=MAX_NGRAM)
        check_int(ConfigError, "max_length", self.max_length, ge=self.min_length, le=MAX_NGRAM)


class Speculation(Struct, frozen=True, kw_only=True):
    """Speculative decoding. It never changes a token, only how many come at a time.

    draft:                folder or hub id of an EAGLE-3 head, or `NGram()`.
    shape:                what is drafted in a round.
    adaptive:             a batch drafts fewer tokens, or none, where that is faster as measured.
    aux_layer_convention: what explicit layer ids in the draft's config mean: the "output" of that layer, or
                          the "boundary" before it; None = as most publishers mean them.
    required:             a draft that cannot be loaded or does not fit is a ModelLoadError; if not required,
                          a warning and plain decoding.
    """

    draft: str | Path | NGram
    shape: Chain = Chain(3)
    adaptive: bool = True
    aux_layer_convention: Literal["output", "boundary"] | None = None
    required: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.draft, str | Path | NGram) or self.draft == "":
            raise ConfigError.of("draft", self.draft, "a folder, a hub id or NGram()")

        if not isinstance(self.shape, Chain):
            raise ConfigError.of("shape", self.shape, "a Chain")

        check_bool(ConfigError, "adaptive", self.adaptive)
        if self.aux_layer_convention is not None:
            check_choice(
                ConfigError, "aux_layer_convention", self.aux_layer_convention, ("output", "boundary")
            )
        check_bool(ConfigError, "required", self.required)
