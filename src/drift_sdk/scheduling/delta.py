from __future__ import annotations

from typing import Literal

from msgspec import Struct

from drift_sdk.results import TokenLogprobs
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import DecodeRow, SlotOutput

__all__ = ["Delta"]


class Delta(Struct, frozen=True, gc=False):
    """What one committed step added to a sequence."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish: Literal["stop", "length"] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_planned_drafts: int | None = None  # None for a first token, which no draft can precede

    @classmethod
    def of(cls, sequence: Sequence, row: DecodeRow, output: SlotOutput) -> Delta:
        return cls(
            sequence,
            output.token_ids,
            output.logprobs,
            output.finish,
            output.prompt_logprobs,
            output.num_drafted,
            output.num_accepted,
            row.num_draft_tokens,
        )
