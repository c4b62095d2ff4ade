"""A slot: one running sequence as the device sees it."""

from __future__ import annotations

from typing import Literal

from drift_sdk.steps import SlotSampling

__all__ = ["Slot"]


class Slot:
    """The truth about a sequence: its length, newest token, block table and whether it has finished."""

    __slots__ = ("block_table", "is_finished", "last_token", "length", "sampling")

    def __init__(self, sampling: SlotSampling) -> None:
        self.sampling = sampling
        self.block_table: list[int] = []
        self.length = 0
        self.last_token = -1
        self.is_finished = False

    def place_blocks(self, first_index: int, block_ids: tuple[int, ...]) -> None:
        """Entries from `first_index` on; those behind them belonged to a reservation given back."""
        self.block_table[first_index:] = block_ids

    def append(self, token_id: int) -> Literal["stop", "length"] | None:
        """Take in a generated token; how the sequence finished, if it did."""
        self.last_token = token_id
        self.length += 1
        if token_id in self.sampling.stop_token_ids:
            self.is_finished = True
            return "stop"

        if self.length >= self.sampling.max_length:
            self.is_finished = True
            return "length"

        return None
