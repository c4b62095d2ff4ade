"""The rows of a decode round: where they and their keys and values lie, and what of them is kept.

The KV row of a node on the first path of a tree, that of first children, lies where it lies in a chain: at
its position in the sequence's blocks. The rows of the other nodes lie behind the blocks that the scheduler
allocates, and are moved to their positions if they are accepted. So a tree takes no more of a sequence's
blocks than a chain of its depth, and nothing is moved for a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch

from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.tree_attention import StepRows, TreeAttentionBatch, TreeRows
from drift_sdk.steps import DecodeRow, ExecutorLimits
from drift_sdk.trees.growth import Draft, DraftLimit

__all__ = ["SlotRows", "attention_batch", "draft_limit", "num_tree_blocks", "place_rows", "rewind"]


class SlotRows(NamedTuple):
    """The rows of one slot in a decode part: its newest token, the root of the draft's tree, and the draft
    tokens.

    start:      position of the first row.
    token_id:   the newest token, the input of the first row.
    draft:      draft tokens, the inputs of the rows after it.
    first_row:  index of the first row in the tensors of the step.
    kv_slots:   cache slot of each row's key and value.
    """

    slot: Slot
    start: int
    token_id: int
    draft: Draft
    first_row: int
    kv_slots: list[int]

    def child_with(self, node: int, token_id: int) -> int | None:
        """The child of a node that has a token; None if there is none."""
        for child in self.draft.tree.children(node):
            if self.draft.token_ids[child - 1] == token_id:
                return child

        return None


def num_tree_blocks(max_tree_rows: int, block_size: int) -> int:
    """Blocks behind those of the scheduler, for nodes of trees of at most `max_tree_rows` nodes together."""
    return -(-max_tree_rows // block_size)


def draft_limit(row: DecodeRow, slot: Slot) -> DraftLimit:
    """The limit of a row's draft. The plan could not know the slot's length, so `max_length` is applied
    here."""
    room = max(slot.room, 0)
    if row.max_depth is None:
        return DraftLimit(row.num_draft_tokens, min(row.num_draft_tokens, room))

    depth = min(row.max_depth, row.num_draft_tokens, room)
    is_constrained = slot.rules is not None and slot.rules.constraint is not None
    return DraftLimit(row.num_draft_tokens if depth else 0, depth, is_chain=is_constrained)


def place_rows(slots: Sequence[Slot], drafts: Sequence[Draft], limits: ExecutorLimits) -> list[SlotRows]:
    """The rows of slots with their drafts."""
    free_slots = count(limits.num_blocks * limits.block_size)
    slot_rows: list[SlotRows] = []
    first_row = 0
    for slot, draft in zip(slots, drafts, strict=True):
        start, first_path = slot.length - 1, set(draft.tree.first_path)
        kv_slots = [
            slot.kv_slot(start + depth, limits.block_size) if node in first_path else next(free_slots)
            for node, depth in enumerate(draft.tree.depths)
        ]
        slot_rows.append(SlotRows(slot, start, slot.last_token, draft, first_row, kv_slots))
        first_row += draft.tree.num_nodes

    return slot_rows


def attention_batch(slot_rows: Sequence[SlotRows], cache: KVCache) -> StepRows:
    """The rows of a round, and what each of them sees: its sequence's tokens before the round, and the nodes
    on its path."""
    if all(each.draft.tree.is_chain for each in slot_rows):
        return AttentionBatch(
            [SequenceRows(each.slot.block_table, each.start, len(each.kv_slots)) for each in slot_rows], cache
        )

    rows = [
        TreeRows(
            each.slot.block_table,
            each.start,
            [each.start + depth for depth in each.draft.tree.depths],
            each.kv_slots,
            [
                [other for other in range(node + 1) if bits >> other & 1]
                for node, bits in enumerate(each.draft.tree.ancestor_bits)
            ],
        )
        for each in slot_rows
    ]
    return TreeAttentionBatch(rows, cache)


def rewind(slot_rows: Sequence[SlotRows], paths: Sequence[Sequence[int]], cache: KVCache) -> None:
    """Move the KV rows of accepted nodes to their positions, in all layers.

    paths: the nodes of each slot whose KV is kept, from the root on. All rows are read before any is written.
    """
    moves = [
        (each.kv_slots[node], each.slot.kv_slot(each.start + depth, cache.block_size))
        for each, path in zip(slot_rows, paths, strict=True)
        for depth, node in enumerate(path)
    ]
    moved = [move for move in moves if move[0] != move[1]]
    if not moved:
        return

    sources, targets = torch.tensor(moved, dtype=torch.int64, device=cache.device).unbind(1)
    cache.move(sources, targets)
