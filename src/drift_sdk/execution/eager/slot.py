"""A slot: one running sequence as the device sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import SlotSampling

if TYPE_CHECKING:  # a scripted executor has slots and no torch
    from drift_sdk.execution.eager.logits_processors import LogitsProcessors

__all__ = ["Slot"]


class Slot:
    """The truth about a sequence: its length, newest token, block table and whether it has finished.

    `rules`: what changes its logits; None = nothing. `prompt_logprobs`: those of the chunks so far.
    `draft`: what a drafter keeps of it.
    """

    __slots__ = (
        "block_table",
        "draft",
        "is_finished",
        "last_token",
        "length",
        "prompt_logprobs",
        "rules",
        "sampling",
    )

    def __init__(self, sampling: SlotSampling, rules: LogitsProcessors | None = None) -> None:
        self.sampling = sampling
        self.rules = rules
        self.draft: object = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.block_table: list[int] = []
        self.length = 0
        self.last_token = -1
        self.is_finished = False

    def place_blocks(self, first_index: int, block_ids: tuple[int, ...]) -> None:
        """Entries from `first_index` on; those behind them belonged to a reservation given back."""
        self.block_table[first_index:] = block_ids

    @property
    def whole_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The prompt's, if they are wanted and the prompt is all there is: with the first token. A sequence
        that was preempted later has delivered them, and may not have computed all of them again."""
        is_pending = self.sampling.num_prompt_logprobs is not None
        is_whole = self.length == self.sampling.num_prompt_tokens
        return tuple(self.prompt_logprobs) if is_pending and is_whole else None

    def append(self, token_id: int) -> Literal["stop", "length"] | None:
        """Take in a generated token; how the sequence finished, if it did."""
        if self.rules is not None:
            self.rules.append(token_id, self.length)
        self.last_token = token_id
        self.length += 1
        if token_id in self.sampling.stop_token_ids:
            self.is_finished = True
            return "stop"

        if self.length >= self.sampling.max_length:
            self.is_finished = True
            return "length"

        return None
