"""Settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from drift_sdk._validation import check_bool, check_choice, check_field_names, check_int
from drift_sdk.errors import ConfigError

__all__ = ["Chain", "NGram", "Speculation"]

MAX_DRAFT_TOKENS = 16
MAX_NGRAM = 16
NGRAM_NAMES = ("ngram", "n-gram", "n_gram")
"""Strings that are taken for n-gram drafts by mistake; a folder of such a name is given as a Path."""


class Chain(Struct, frozen=True):
    """Drafts of one token after another.

    num_draft_tokens: most tokens drafted in a round, 1 to 16.

    A wrong value raises ConfigError.
    """

    num_draft_tokens: int = 3

    def __post_init__(self) -> None:
        check_int(ConfigError, "num_draft_tokens", self.num_draft_tokens, ge=1, le=MAX_DRAFT_TOKENS)

    @property
    def choices(self) -> tuple[int, ...]:
        """The numbers of draft tokens that a batch may choose from, ascending; graphs are captured for
        these."""
        shorter = [length for length in (1, 3, 5, 8, 12) if length < self.num_draft_tokens]
        return (*shorter, self.num_draft_tokens)


class NGram(Struct, frozen=True, kw_only=True):
    """Drafts without a draft model: the newest tokens of a sequence are looked up in its prompt and output,
    and the tokens that followed their last earlier occurrence are the draft.

    min_length: fewest newest tokens that are looked up, 1 to 16.
    max_length: most newest tokens that are looked up, min_length to 16. Longer runs are tried first.

    A wrong value raises ConfigError.
    """

    min_length: int = 2
    max_length: int = 4

    def __post_init__(self) -> None:
        check_int(ConfigError, "min_length", self.min_length, ge=1, le=MAX_NGRAM)
        check_int(ConfigError, "max_length", self.max_length, ge=self.min_length, le=MAX_NGRAM)


class Speculation(Struct, frozen=True, kw_only=True):
    """Speculative decoding: several tokens are drafted, and the model verifies them in one step. It never
    changes a token, only how many tokens come at a time.

    draft:                folder or hub id of an EAGLE-3 head, or `NGram()`.
    shape:                how many tokens are drafted in a round.
    adaptive:             draft fewer tokens, or none, where measurements show that to be faster.
    aux_layer_convention: meaning of explicit layer ids in the draft's config: "output", the output of that
                          layer, or "boundary", the boundary before it. None = as most publishers mean them.
    required:             True: a draft that cannot be loaded or does not fit raises ModelLoadError. False: it
                          is logged as a warning, and the engine decodes without drafts.

    A wrong value raises ConfigError.
    """

    draft: str | Path | NGram
    shape: Chain = Chain(3)
    adaptive: bool = True
    aux_layer_convention: Literal["output", "boundary"] | None = None
    required: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.draft, str | Path | NGram) or self.draft == "":
            raise ConfigError.of("draft", self.draft, "a folder, a hub id or NGram()")

        if isinstance(self.draft, str) and self.draft.lower() in NGRAM_NAMES:
            allowed = "NGram() for n-gram drafts, or a folder or hub id of an EAGLE-3 head"
            raise ConfigError.of("draft", self.draft, allowed)

        if not isinstance(self.shape, Chain):
            raise ConfigError.of("shape", self.shape, "a Chain")

        check_bool(ConfigError, "adaptive", self.adaptive)
        if self.aux_layer_convention is not None:
            check_choice(
                ConfigError, "aux_layer_convention", self.aux_layer_convention, ("output", "boundary")
            )
        check_bool(ConfigError, "required", self.required)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Speculation:
        """Make it from plain data. `draft` may be "ngram", or the fields of `NGram` as a mapping; `shape` may
        be the fields of `Chain` as a mapping, or its number of tokens. ConfigError for a wrong value, and for
        an unknown field, with the name of the most similar one."""
        check_field_names(ConfigError, cls, settings)
        if "draft" not in settings:
            raise ConfigError.of("draft", None, "a folder, a hub id or NGram()")

        given = dict(settings)
        draft, shape = given["draft"], given.get("shape")
        if isinstance(draft, Mapping):
            check_field_names(ConfigError, NGram, draft)
            given["draft"] = NGram(**draft)
        elif isinstance(draft, str) and draft.lower() in NGRAM_NAMES:
            given["draft"] = NGram()
        if isinstance(shape, Mapping):
            check_field_names(ConfigError, Chain, shape)
            given["shape"] = Chain(**shape)
        elif isinstance(shape, int):
            given["shape"] = Chain(shape)
        return cls(**given)
