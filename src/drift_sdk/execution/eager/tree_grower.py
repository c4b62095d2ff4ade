"""Trees of draft tokens, grown depth by depth with an EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from drift_sdk.execution.eager.sampling import rank
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.tree_attention import TreeAttentionBatch, TreeRows
from drift_sdk.speculation import DynamicTree, StaticTree
from drift_sdk.trees.growth import Draft, DraftLimit, DynamicGrowth, StaticGrowth
from drift_sdk.trees.limits import MAX_TREE_ROWS, max_batch_drafts
from drift_sdk.trees.rank_paths import rank_tree

__all__ = ["TreeGrower", "max_draft_rows", "target_logits"]


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
        trees = [self._growth(limit) for limit in limits]
        key_slots: list[list[int]] = [[] for _ in slots]
        outputs = [output[None] for output in hidden]  # [nodes of the frontier, H] of each slot
        free_slots = count(self._first_slot)
        for depth in count():
            active = [index for index, tree in enumerate(trees) if tree.num_candidates]
            if not active:
                return [tree.draft() for tree in trees]

            stacked = torch.cat([outputs[index] for index in active])
            owners = [index for index in active for _ in range(len(outputs[index]))]
            token_ids, logprobs = rank(
                target_logits(self._draft, stacked, self._vocab_size),
                [slots[index].sampling for index in owners],
                [slots[index].length + depth for index in owners],
                max(trees[index].num_candidates for index in active),
            )
            first, parents, tokens, rows = 0, [], [], []
            for index in active:
                tree, end = trees[index], first + len(outputs[index])
                tree.expand(token_ids[first:end], logprobs[first:end])
                if tree.frontier:
                    parents += [first + node.parent_index for node in tree.frontier]
                    tokens += [node.token_id for node in tree.frontier]
                    key_slots[index] += [next(free_slots) for _ in tree.frontier]
                    rows.append(
                        TreeRows(
                            slots[index].block_table,
                            slots[index].length - 1,
                            [slots[index].length - 1 + depth] * len(tree.frontier),
                            key_slots[index],
                            [node.rows for node in tree.frontier],
                        )
                    )
                first = end

            if rows:
                batch = TreeAttentionBatch(rows, self._cache, slot_offset=DRAFT_KV_OFFSET)
                inputs = torch.tensor(tokens, dtype=torch.int64, device=stacked.device)
                computed = self._draft.forward(stacked[parents], inputs, batch, self._cache)
                grown = [index for index in active if trees[index].frontier]
                sizes = [len(trees[index].frontier) for index in grown]
                for index, output in zip(grown, computed.split(sizes), strict=True):
                    outputs[index] = output

        raise AssertionError  # not reached: `count` has no end

    def _growth(self, limit: DraftLimit) -> StaticGrowth | DynamicGrowth:
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
