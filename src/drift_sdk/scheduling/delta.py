from __future__ import annotations

from typing import Literal

from msgspec import Struct

from drift_sdk.results import TokenLogprobs
from drift_sdk.scheduling.sequence import Sequence

__all__ = ["Delta"]


class Delta(Struct, frozen=True):
    """What one committed step added to a sequence."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: Literal["stop", "length"] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
