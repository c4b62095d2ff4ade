"""Rounds of partial verification in plain torch: those that read views, and those that refresh them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drift_sdk.execution.eager.round_rows import SlotRows
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.attention import SequenceRows
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.view_attention import RefreshBatch, ViewAttentionBatch, ViewRows
from drift_sdk.partial_verification import ViewLayout
from drift_sdk.steps import SlotOutput

__all__ = ["PartialRounds", "ViewState"]


class ViewState:
    """The state of partial verification of a slot.

    pending:  tokens of the rows before the newest token's that partial rounds have computed.
    dropped:  blocks that the slot's views leave out; 0: none.
    selected: for each layer, the numbers of retrieved blocks, ascending.
    """

    __slots__ = ("dropped", "pending", "selected")

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.dropped: int = 0
        self.selected: list[list[int]] = []


class PartialRounds:
    """The rows of rounds of partial verification, and what is noted after them."""

    def __init__(self, layout: ViewLayout, num_layers: int) -> None:
        self._layout, self._num_layers = layout, num_layers

    def enter(self, slot: Slot) -> None:
        """Initialise the state of a slot for a new sequence."""
        slot.view = ViewState()

    def partial_batch(self, slot_rows: Sequence[SlotRows], cache: KVCache) -> ViewAttentionBatch:
        """The rows of a round that reads views."""
        return ViewAttentionBatch([self._view_rows(each) for each in slot_rows], cache)

    def with_pending(self, slot_rows: Sequence[SlotRows]) -> tuple[list[SlotRows], list[int]]:
        """The rows of a refresh, moved behind the pending rows of their slots; and the tokens of all rows."""
        moved, tokens = [], list[int]()
        for each in slot_rows:
            tokens += state_of(each.slot).pending
            moved.append(each._replace(first_row=len(tokens)))
            tokens += (each.token_id, *each.draft.token_ids)

        return moved, tokens

    def refresh_batch(self, slot_rows: Sequence[SlotRows], cache: KVCache) -> RefreshBatch:
        """The rows of a refresh, the pending ones included."""
        sequences = []
        for each in slot_rows:
            num_pending = len(state_of(each.slot).pending)
            start, num_rows = each.start - num_pending, num_pending + len(each.kv_slots)
            sequences.append(SequenceRows(each.slot.block_table, start, num_rows))

        return RefreshBatch(sequences, cache, [len(each.kv_slots) for each in slot_rows])

    def note_partial(self, slot_rows: Sequence[SlotRows], outputs: Sequence[SlotOutput]) -> None:
        """Note what a round that read views has accepted: those rows are pending."""
        for each, output in zip(slot_rows, outputs, strict=True):
            tokens = (each.token_id, *each.draft.token_ids)
            state_of(each.slot).pending += tokens[: len(output.token_ids)]

    def note_refresh(self, slot_rows: Sequence[SlotRows], batch: RefreshBatch) -> None:
        """Note a refresh: nothing is pending, and the blocks of views are those with most attention."""
        for index, each in enumerate(slot_rows):
            state = state_of(each.slot)
            state.pending = []
            state.dropped = self._layout.num_dropped(each.start)
            if state.dropped:
                end = self._layout.first_window_block(each.start)
                state.selected = [self._select(shares[index][:end]) for shares in batch.shares]

    def _select(self, shares: torch.Tensor) -> list[int]:
        """The blocks with the largest of shares [blocks before the window], ascending."""
        first = self._layout.num_sinks
        order = shares[first:].argsort(descending=True, stable=True)[: self._layout.num_retrieved]
        selected: list[int] = (order.sort().values + first).tolist()
        return selected

    def _view_rows(self, each: SlotRows) -> ViewRows:
        state, layout = state_of(each.slot), self._layout
        views: list[list[int]] = [[]] * self._num_layers
        window_block = 0
        if state.dropped:
            views = [[*range(layout.num_sinks), *selected] for selected in state.selected]
            window_block = layout.num_kept + state.dropped
        return ViewRows(each.slot.block_table, each.start, len(each.kv_slots), views, window_block)


def state_of(slot: Slot) -> ViewState:
    """The state of partial verification of a slot."""
    assert isinstance(slot.view, ViewState)
    return slot.view
