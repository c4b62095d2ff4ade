"""Decode rounds of the eager executor: their rows, their checks, and partial verification.

The KV row of a node on the first path of a tree, that of first children, lies where it lies in a chain: at
its position in the sequence's blocks. The rows of the other nodes lie behind the blocks that the scheduler
allocates, and are moved to their positions if they are accepted. So a tree takes no more of a sequence's
blocks than a chain of its depth, and nothing is moved for a chain.

Rounds of partial verification read views of the cache, or refresh them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.attention import (
    AttentionBatch,
    RefreshBatch,
    SequenceRows,
    StepRows,
    TreeAttentionBatch,
    TreeRows,
    ViewAttentionBatch,
    ViewRows,
)
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.speculation import ViewLayout
from drift_sdk.steps import DecodeRow, ExecutorLimits, SlotOutput, Violation
from drift_sdk.trees import Draft, DraftLimit, TokenTree


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


def sequence_rows(slot: Slot, start: int, num_rows: int) -> SequenceRows:
    """Rows of the target at positions `start ... start + num_rows - 1` of a slot."""
    return SequenceRows(slot.block_table, start, num_rows, slot.window_table or None)


def attention_batch(slot_rows: Sequence[SlotRows], cache: KVCache) -> StepRows:
    """The rows of a round, and what each of them sees: its sequence's tokens before the round, and the nodes
    on its path."""
    if all(each.draft.tree.is_chain for each in slot_rows):
        return AttentionBatch(
            [sequence_rows(each.slot, each.start, len(each.kv_slots)) for each in slot_rows], cache
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


Violations = dict[int, Violation]
"""The first violation of each slot of a round, by the slot's index in the round."""


class RoundChecks:
    """Compares what a round does with what its rules say, computed in another way.

    Keys and values of rejected rows are overwritten with NaN, so that a row that reads them is not finite.
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self._limits = limits

    def check_table(self, slot: Slot, limit: DraftLimit) -> Violation | None:
        """The violation by a slot's block table; None if it is right."""
        size, num_blocks = self._limits.block_size, self._limits.num_blocks
        num_needed = -(-(slot.length + limit.depth) // size)
        table = slot.block_table[:num_needed]
        if len(table) < num_needed:
            details = f"{len(table)} blocks, not {num_needed}"
        elif len(set(table)) < len(table) or not all(0 <= block < num_blocks for block in table):
            details = f"{table} of {num_blocks} blocks"
        else:
            return None

        return Violation(reason="block_table", details=details, is_fatal=True)

    def check_drafts(self, limits: Sequence[DraftLimit], drafts: Sequence[Draft]) -> Violations:
        """Violations by drafts, which are not in use yet."""
        violations: Violations = {}
        for index, (limit, draft) in enumerate(zip(limits, drafts, strict=True)):
            if (error := self._error_of_tokens(limit, draft)) is not None:
                violations[index] = Violation(reason="draft_tokens", details=error, is_fatal=False)
            elif (error := error_of_tree(draft.tree, limit)) is not None:
                violations[index] = Violation(reason="draft_tree", details=error, is_fatal=False)

        return violations

    def check_forward(
        self, slot_rows: Sequence[SlotRows], batch: StepRows, hidden: Tensor, violations: Violations
    ) -> None:
        """Add violations by the keys that rows see, and by hidden states [N, H] that are not finite."""
        is_finite = hidden.isfinite().all(dim=-1).tolist()
        for index, each in enumerate(slot_rows):
            if isinstance(batch, TreeAttentionBatch):
                error = error_of_mask(each, batch.visible[index])
                if error is not None:
                    add(violations, index, "mask", error)
            for node in range(each.draft.tree.num_nodes):
                if not is_finite[each.first_row + node]:
                    add(violations, index, "non_finite", f"row {node} at position {each.start}")

    def check_commit(
        self,
        slot_rows: Sequence[SlotRows],
        outputs: Sequence[SlotOutput],
        paths: Sequence[Sequence[int]],
        cache: KVCache,
        violations: Violations,
    ) -> None:
        """Add violations by what was accepted and where its keys and values lie now. Overwrites those of
        rejected rows.

        paths: the nodes that tokens were sampled from.
        """
        for index, (each, output, path) in enumerate(zip(slot_rows, outputs, paths, strict=True)):
            error = error_of_acceptance(each, output, path)
            if error is not None:
                add(violations, index, "acceptance", error)
            length = each.start + 1 + len(output.token_ids)
            if each.slot.length != length:
                add(violations, index, "length", f"{each.slot.length} tokens, not {length}")
            kept = [each.slot.kv_slot(each.start + depth, cache.block_size) for depth in range(len(path))]
            for node, target in zip(path, kept, strict=True):
                if not is_copied(cache, each.kv_slots[node], target):
                    add(violations, index, "kv", f"the row of node {node} is not at its position")
            poison(cache, sorted({*each.kv_slots} - {*kept}))

    def reported(
        self, slot_rows: Sequence[SlotRows], outputs: Sequence[SlotOutput], violations: Violations
    ) -> list[SlotOutput]:
        """The outputs with their violations."""
        return [
            replace(output, violation=violations[index]) if index in violations else output
            for index, output in enumerate(outputs)
        ]

    def _error_of_tokens(self, limit: DraftLimit, draft: Draft) -> str | None:
        most = limit.chain_length if limit.is_chain else limit.num_tokens
        if not draft.tree.num_drafts == len(draft.token_ids) <= most:
            return f"{len(draft.token_ids)} tokens for {draft.tree.num_drafts} nodes, at most {most} planned"

        wrong = [token for token in draft.token_ids if not 0 <= token < self._limits.vocab_size]
        return f"{wrong[0]}, of {self._limits.vocab_size}" if wrong else None


def add(violations: Violations, index: int, reason: str, details: str) -> None:
    """Add a violation that ends the request, unless one of the slot was found before that does."""
    if index not in violations or not violations[index].is_fatal:
        violations[index] = Violation(reason=reason, details=details, is_fatal=True)


def error_of_tree(tree: TokenTree, limit: DraftLimit) -> str | None:
    """The error in a tree; None without one. Everything is derived from the parents again."""
    parents = tree.parents
    if parents[0] != -1 or not all(0 <= parent < node for node, parent in enumerate(parents[1:], 1)):
        return f"parents {parents}"

    found = {node: tree.path(node) for node in range(len(parents))}
    if max(map(len, found.values())) - 1 > limit.depth:
        return f"a path of more than {limit.depth} tokens"

    if limit.is_chain and parents != tuple(range(-1, len(parents) - 1)):
        return "a tree instead of a chain"

    for node, path in found.items():
        if tree.depths[node] != len(path) - 1:
            return f"node {node} has depth {tree.depths[node]}, not {len(path) - 1}"

        if tree.ancestor_bits[node] != sum(1 << ancestor for ancestor in path):
            return f"node {node} has ancestors {tree.ancestor_bits[node]:b}, not {path}"

        children = [child for child, parent in enumerate(parents) if parent == node]
        linked: list[int] = []
        child = tree.first_child[node]
        while child >= 0 and len(linked) <= len(children):
            linked.append(child)
            child = tree.next_sibling[child]
        if linked != children:
            return f"node {node} links children {linked}, not {children}"

    return None


def error_of_mask(rows: SlotRows, visible: Tensor) -> str | None:
    """The error in the keys that a slot's rows see, [rows, prefix and nodes]; None without one."""
    tree = rows.draft.tree
    expected = torch.zeros(tree.num_nodes, rows.start + tree.num_nodes, dtype=torch.bool)
    expected[:, : rows.start] = True
    for node in range(tree.num_nodes):
        ancestor = node
        while ancestor >= 0:
            expected[node, rows.start + ancestor] = True
            ancestor = tree.parents[ancestor]

    wrong = (expected != visible).nonzero().tolist() if expected.shape == visible.shape else [[-1, -1]]
    return f"node {wrong[0][0]} and key {wrong[0][1]}" if wrong else None


def error_of_acceptance(rows: SlotRows, output: SlotOutput, path: Sequence[int]) -> str | None:
    """The error in the nodes that a slot has accepted; None without one."""
    tree, tokens = rows.draft.tree, rows.draft.token_ids
    if not output.num_accepted <= output.num_drafted == len(tokens):
        return f"{output.num_accepted} of {output.num_drafted} tokens accepted, {len(tokens)} drafted"

    if not len(path) == len(output.token_ids) or path[0] != 0:
        return f"{len(output.token_ids)} tokens from nodes {list(path)}"

    for node, child, token in zip(path, path[1:], output.token_ids, strict=False):
        if tree.parents[child] != node or tokens[child - 1] != token:
            return f"node {child} was accepted after node {node} and token {token}"

    last = [child for child, parent in enumerate(tree.parents) if parent == path[-1]]
    is_drafted = any(tokens[child - 1] == output.token_ids[-1] for child in last)
    if is_drafted and output.finish is None:
        return f"a child of node {path[-1]} has token {output.token_ids[-1]} and was not accepted"

    if output.num_accepted != len(path) - 1 + is_drafted:
        return f"{output.num_accepted} tokens accepted on a path of {len(path)} nodes"

    return None


def is_copied(cache: KVCache, source: int, target: int) -> bool:
    """Whether two rows of the cache are equal, in all layers."""
    return source == target or all(
        torch.equal(tensor[:, source], tensor[:, target]) for tensor in cache.tensors
    )


def poison(cache: KVCache, kv_slots: Sequence[int]) -> None:
    """Overwrite rows of the cache with NaN, in all layers: bits that are all set, in every stored form."""
    if kv_slots:
        for tensor in cache.tensors:
            tensor.view(torch.uint8)[:, list(kv_slots)] = 0xFF


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
