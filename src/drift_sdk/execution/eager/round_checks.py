"""Checks of every round of speculation on the eager executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from drift_sdk.execution.eager.round_rows import SlotRows
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.tree_attention import StepRows, TreeAttentionBatch
from drift_sdk.steps import ExecutorLimits, SlotOutput, Violation
from drift_sdk.trees.growth import Draft, DraftLimit
from drift_sdk.trees.token_tree import TokenTree

__all__ = ["RoundChecks", "Violations"]

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
    """Overwrite rows of the cache with NaN, in all layers."""
    if kv_slots:
        for tensor in cache.tensors:
            tensor[:, list(kv_slots)] = float("nan")
