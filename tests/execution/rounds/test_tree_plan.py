"""Plans of trees, and the rounds that are captured for them."""

from __future__ import annotations

import pytest

from drift_sdk import DynamicTree, StaticTree
from drift_sdk.speculation import tree_plan, tree_rounds
from drift_sdk.trees import MAX_TREE_ROWS, max_batch_drafts

STATIC = StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])
CHAIN = StaticTree([[0], [0, 0], [0, 0, 0]])


def test_every_batch_has_a_round_for_each_number_that_the_policy_may_choose() -> None:
    choices = (0, 1, 3, 7, 15, 31, 63)
    buckets = (1, 2, 4, 8, 16, 32, 64, 100)
    rounds = tree_rounds(buckets, choices)
    for batch in range(1, buckets[-1] + 1):
        bucket = next(size for size in buckets if size >= batch)
        for choice in choices:
            if choice <= max_batch_drafts(batch):
                assert (bucket, choice) in rounds
    assert max(slots * (number + 1) for slots, number in rounds) < 2 * MAX_TREE_ROWS
    assert (100, 3) not in rounds and (64, 3) in rounds


@pytest.mark.parametrize(
    ("shape", "num_drafts"),
    [(CHAIN, 3), (STATIC, 1), (DynamicTree(top_k=1, depth=3, num_draft_tokens=3), 3), (DynamicTree(), 1)],
)
def test_trees_without_branches_have_no_plan(shape: StaticTree | DynamicTree, num_drafts: int) -> None:
    assert tree_plan(shape, num_drafts) is None


def test_plan_of_a_static_tree_lists_the_rows_that_the_draft_computes() -> None:
    plan = tree_plan(STATIC, 7)
    assert plan is not None
    assert (plan.depth, plan.num_candidates, plan.num_nodes) == (4, 2, 8)
    tree = plan.ranked.tree if plan.ranked is not None else None
    assert tree is not None
    rows = [[node for node in plan.frontier(depth) if node >= 0] for depth in range(1, plan.depth)]
    for depth, nodes in enumerate(rows, 1):
        assert nodes == [n for n in range(8) if tree.depths[n] == depth and not tree.is_leaf(n)]
    assert [len(plan.frontier(depth)) for depth in range(1, plan.depth)] == list(plan.widths)
    assert plan.num_draft_nodes == 1 + sum(plan.widths)


def test_plan_of_a_dynamic_tree_is_bounded_by_its_drafts() -> None:
    plan = tree_plan(DynamicTree(top_k=8, depth=6, num_draft_tokens=40), 3)
    assert plan is not None
    assert (plan.depth, plan.num_candidates, plan.widths) == (3, 3, (3, 3))
    assert plan.pool_size == 3 + 2 * 9
