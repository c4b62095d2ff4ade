"""Trees of draft tokens, grown depth by depth with an EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from drift_sdk.execution.eager.sampling import rank
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.tree_attention import TreeAttentionBatch, TreeRows
from drift_sdk.speculation import DynamicTree, StaticTree
from drift_sdk.trees.growth import Draft, DraftLimit, DynamicGrowth, StaticGrowth, TreeGrowth
from drift_sdk.trees.limits import MAX_TREE_ROWS, max_batch_drafts
from drift_sdk.trees.rank_paths import rank_tree

__all__ = ["TreeGrower", "max_draft_rows", "target_logits"]


class _GrowingTree:
    """A tree that grows after a slot's newest token.

    outputs:    the draft's output [N, H] for the nodes of the frontier.
    key_slots:  cache slots of the nodes that the draft has computed, in the order of computing.
    """

    def __init__(self, slot: Slot, tree: TreeGrowth, outputs: Tensor) -> None:
        self.slot, self.tree, self.outputs = slot, tree, outputs
        self.key_slots: list[int] = []


class TreeGrower:
    """Drafts trees of a shape.

    The node of depth d combines the draft's output for its parent with its own token, at the RoPE position
    that it has in a chain. Its keys and values are kept only while the tree grows, in cache slots from
    `first_slot` on; those of accepted tokens are computed again from the target's features.
    """

    def __init__(
        self,
        draft: DraftDecoder,
        cache: KVCache,
        shape: StaticTree | DynamicTree,
        first_slot: int,
        vocab_size: int,
    ) -> None:
        self._draft, self._cache, self._shape = draft, cache, shape
        self._first_slot, self._vocab_size = first_slot, vocab_size

    def grow(
        self, slots: Sequence[Slot], hidden: Sequence[Tensor], limits: Sequence[DraftLimit]
    ) -> list[Draft]:
        """A tree for each slot, from the draft's output [H] for its newest row."""
        growing = [
            _GrowingTree(slot, self._growth(limit), output[None])
            for slot, limit, output in zip(slots, limits, hidden, strict=True)
        ]
        free_slots = count(self._first_slot)
        active = [each for each in growing if each.tree.num_candidates]
        depth = 0
        while active:
            outputs = torch.cat([each.outputs for each in active])
            self._expand(active, outputs, depth)
            active = self._compute(active, outputs, depth, free_slots)
            depth += 1

        return [each.tree.draft() for each in growing]

    def _expand(self, active: Sequence[_GrowingTree], outputs: Tensor, depth: int) -> None:
        """Add candidates after the nodes of all frontiers, which are `depth` deep, from their outputs [N,
        H]."""
        owners = [each for each in active for _ in range(len(each.outputs))]
        token_ids, logprobs = rank(
            target_logits(self._draft, outputs, self._vocab_size),
            [each.slot.sampling for each in owners],
            [each.slot.length + depth for each in owners],
            max(each.tree.num_candidates for each in active),
        )
        first = 0
        for each in active:
            end = first + len(each.outputs)
            each.tree.expand(token_ids[first:end], logprobs[first:end])
            first = end

    def _compute(
        self, active: Sequence[_GrowingTree], outputs: Tensor, depth: int, free_slots: Iterator[int]
    ) -> list[_GrowingTree]:
        """Compute the nodes of the new frontiers from the outputs [N, H] of the ones before, and return the
        trees that have any."""
        rows: list[TreeRows] = []
        parents: list[int] = []
        tokens: list[int] = []
        first = 0
        for each in active:
            nodes, position = each.tree.frontier, each.slot.length - 1 + depth
            parents += [first + node.parent_index for node in nodes]
            tokens += [node.token_id for node in nodes]
            first += len(each.outputs)
            if nodes:
                each.key_slots += [next(free_slots) for _ in nodes]
                seen = [node.rows for node in nodes]
                table, positions = each.slot.block_table, [position] * len(nodes)
                rows.append(TreeRows(table, each.slot.length - 1, positions, each.key_slots, seen))
        if not rows:
            return []

        batch = TreeAttentionBatch(rows, self._cache, slot_offset=DRAFT_KV_OFFSET)
        inputs = torch.tensor(tokens, dtype=torch.int64, device=outputs.device)
        computed = self._draft.forward(outputs[parents], inputs, batch, self._cache)
        grown = [each for each in active if each.tree.frontier]
        for each, part in zip(grown, computed.split([row.num_rows for row in rows]), strict=True):
            each.outputs = part

        return grown

    def _growth(self, limit: DraftLimit) -> TreeGrowth:
        shape = self._shape
        if isinstance(shape, StaticTree):
            return StaticGrowth(rank_tree(shape.paths), limit)

        return DynamicGrowth(shape.top_k, shape.depth, limit)


def max_draft_rows(shape: StaticTree | DynamicTree) -> int:
    """The most rows that the draft computes for the trees of a round."""
    return max(
        number * shape.num_draft_rows(min(max_batch_drafts(number), shape.num_draft_tokens))
        for number in range(1, MAX_TREE_ROWS + 1)
    )


def target_logits(draft: DraftDecoder, hidden: Tensor, vocab_size: int) -> Tensor:
    """The draft's logits [M, vocab_size] fp32 over the target's vocabulary; -inf for tokens that it does not
    have."""
    logits = torch.full((len(hidden), vocab_size), -torch.inf, dtype=torch.float32, device=hidden.device)
    logits[:, draft.target_ids] = draft.logits(hidden)
    return logits
