"""The growth of the trees of a round, depth by depth, as far as it is known before the round."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from drift_sdk.speculation import DynamicTree, StaticTree
from drift_sdk.trees import RankedTree, max_batch_drafts, rank_tree


class TreePlan(Struct, frozen=True, kw_only=True):
    """The growth of trees of T = num_drafts + 1 nodes.

    depth:           most drafts on a path.
    num_candidates:  candidates after each row.
    widths:          rows that the draft computes at depths 1 to `depth - 1`, of each tree.
    ranked:          the first T nodes of a static tree; None: the tree is dynamic.
    """

    num_drafts: int
    depth: int
    num_candidates: int
    widths: tuple[int, ...]
    ranked: RankedTree | None = None

    @property
    def num_nodes(self) -> int:
        """T, the root included."""
        return self.num_drafts + 1

    @property
    def num_draft_nodes(self) -> int:
        """Nodes that the draft computes, and the root."""
        return 1 + sum(self.widths)

    @property
    def pool_size(self) -> int:
        """Candidates of a dynamic tree."""
        return self.num_candidates * (1 + sum(self.widths))

    def frontier(self, depth: int) -> list[int]:
        """Nodes of a static tree that the draft computes at a depth, and -1 for rows without one."""
        assert self.ranked is not None
        tree = self.ranked.tree.prefix(self.num_nodes)
        nodes = [node for node in range(1, self.num_nodes) if tree.depths[node] == depth]
        found = [node for node in nodes if not tree.is_leaf(node)]
        return found + [-1] * (self.widths[depth - 1] - len(found))


def chain_plan(num_drafts: int) -> TreePlan:
    """The plan of trees without branches."""
    return TreePlan(num_drafts=num_drafts, depth=num_drafts, num_candidates=1, widths=())


def tree_plan(shape: StaticTree | DynamicTree, num_drafts: int) -> TreePlan | None:
    """The plan of trees with so many drafts; None if they are chains."""
    if isinstance(shape, DynamicTree):
        num_candidates, depth = min(shape.top_k, num_drafts), min(shape.depth, num_drafts)
        if num_candidates < 2:
            return None

        widths = (num_candidates,) * (depth - 1)
        return TreePlan(num_drafts=num_drafts, depth=depth, num_candidates=num_candidates, widths=widths)

    ranked = rank_tree(shape.paths)
    tree = ranked.tree.prefix(num_drafts + 1)
    if tree.is_chain:
        return None

    # Powers of two: kernels are compiled for each width.
    return TreePlan(
        num_drafts=num_drafts,
        depth=tree.max_depth,
        num_candidates=max(ranked.ranks[: num_drafts + 1]) + 1,
        widths=tuple(1 << (number - 1).bit_length() for number in tree.num_non_leaves[1:-1]),
        ranked=ranked,
    )


def tree_rounds(buckets: Sequence[int], choices: Sequence[int]) -> list[tuple[int, int]]:
    """The rounds (slots, drafts) that batches can have whose trees share the rows of a round: for each of the
    ascending buckets, the choices that fit the smallest batch in it."""
    rounds = []
    least = 1
    for num_slots in buckets:
        most = max_batch_drafts(least)
        rounds += [(num_slots, choice) for choice in choices if choice <= most]
        least = num_slots + 1

    return rounds
