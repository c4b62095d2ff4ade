"""Checks of the rounds of graphs, whose findings the host reads with the results."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.slots.slot_columns import SlotState
from drift_sdk._kernels.trees.tree_accept import tree_record_words
from drift_sdk._kernels.trees.tree_checks import (
    FLAG_BITS,
    NUM_DROPPED,
    REASONS,
    check_acceptance,
    check_cache,
    check_drafts,
    check_hidden,
    check_paths,
    report_flags,
)
from drift_sdk._kernels.trees.tree_rows import RootTensors
from drift_sdk.execution.device.ring import Ring
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.steps import Violation

__all__ = ["TreeChecks", "violation_of"]

PLACES = ("node", "node", "block", "node", "node", "depth", "tokens", "node")
"""The meaning of the number beside each of `REASONS`."""


def violation_of(flag: int) -> Violation | None:
    """The violation that a flag stands for; None for 0."""
    if flag == 0:
        return None

    reason = flag % 2**FLAG_BITS - 1
    details = f"{PLACES[reason]} {flag >> FLAG_BITS}"
    return Violation(reason=REASONS[reason], details=details, is_fatal=reason >= NUM_DROPPED)


class TreeChecks:
    """Kernels that check a round of B trees, in the order of its parts.

    flags [B] int32: what they have found.
    """

    def __init__(
        self, workspace: Workspace, table: SlotTable, cache: PagedKVCache, num_trees: int, vocab_size: int
    ) -> None:
        self.flags: torch.Tensor = workspace.take("violations", (num_trees,), torch.int32)
        self._table, self._cache, self._vocab_size = table, cache, vocab_size

    def after_draft(self, rows: RootTensors) -> None:
        """Check drafts and block tables. Drop drafts that are wrong."""
        size = self._cache.block_size
        check_drafts(
            rows,
            self._table.block_table,
            self.flags,
            num_blocks=self._cache.first_tree_slot // size,
            block_size=size,
            vocab_size=self._vocab_size,
        )

    def after_place(self, rows: RootTensors, path: Tensor) -> None:
        """Check what the rows see."""
        check_paths(rows, path, self._table.state.length, self.flags)

    def after_forward(self, rows: RootTensors, hidden: Tensor) -> None:
        """Check hidden states [R, H]."""
        check_hidden(rows, hidden, self.flags)

    def after_commit(self, rows: RootTensors, chosen: Tensor, path: Tensor, emitted: Tensor) -> None:
        """Check acceptance and lengths."""
        state: SlotState = self._table.state
        ends = (state.length, state.last_token, state.finish)
        check_acceptance(rows, chosen, path, emitted, ends, self.flags)

    def after_rewind(self, rows: RootTensors, kv_slot: Tensor, path: Tensor) -> None:
        """Check keys and values, and overwrite those of rejected nodes."""
        cache = self._cache
        for group in cache.groups:
            check_cache(group.keys, group.values, self._table.block_table, rows, kv_slot, path, self.flags)

    def report(self, ring: Ring) -> None:
        """Write what was found behind the results of the round."""
        first_word = tree_record_words(self.flags.shape[0])
        report_flags(self.flags, ring.output, ring.current, first_word=first_word)
