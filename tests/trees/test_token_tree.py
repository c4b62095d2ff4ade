"""Trees of draft tokens: structure, limits, and agreement with paths found one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import random_tree

from drift_sdk.trees import MAX_TREE_DRAFTS, MAX_TREE_ROWS, TokenTree, max_batch_drafts

trees = st.integers(0, 2**32).map(lambda seed: random_tree(random.Random(seed), MAX_TREE_DRAFTS))


@given(trees)
@settings(max_examples=100)
def test_structure_follows_from_the_parents(tree: TokenTree) -> None:
    nodes = range(tree.num_nodes)
    for node in nodes:
        path = [node]
        while tree.parents[path[-1]] >= 0:
            path.append(tree.parents[path[-1]])
        assert tree.path(node) == tuple(reversed(path))
        assert tree.depths[node] == len(path) - 1
        assert {other for other in nodes if tree.ancestor_bits[node] >> other & 1} == set(path)
        children = [other for other in nodes if tree.parents[other] == node]
        assert list(tree.children(node)) == children
        assert tree.is_leaf(node) == (not children)
    assert tree.num_drafts == len(nodes) - 1
    assert tree.max_depth == max(tree.depths)
    assert sum(tree.num_non_leaves) == sum(not tree.is_leaf(node) for node in nodes)
    assert tree.is_chain == (tree.parents == tuple(range(-1, tree.num_drafts)))


@given(trees, st.integers(1, MAX_TREE_DRAFTS + 1))
@settings(max_examples=50)
def test_first_nodes_are_a_tree(tree: TokenTree, num_nodes: int) -> None:
    prefix = tree.prefix(num_nodes)
    assert prefix.parents == tree.parents[:num_nodes]
    assert prefix.ancestor_bits == tree.ancestor_bits[:num_nodes]
    kept = [node for node in tree.first_path if node < num_nodes]
    assert list(prefix.first_path) == kept


def test_chain() -> None:
    chain = TokenTree.chain(3)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.is_chain and chain.first_path == (0, 1, 2, 3)
    assert TokenTree.chain(0).num_drafts == 0 and TokenTree.chain(0).is_chain


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, -1), (-1, 0, 2), (-1, 0, -2)])
def test_parents_that_are_no_tree_are_rejected(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        TokenTree(parents)


def test_rows_of_a_round_are_shared_evenly() -> None:
    assert [max_batch_drafts(number) for number in (1, 3, 4, 5, 64, 128, 129, 256, 1000)] == [
        *(63, 63, 63, 50, 3, 1, 0, 0, 0)
    ]
    for number in range(1, 300):
        most = max_batch_drafts(number)
        assert most == 0 or number * (most + 1) <= MAX_TREE_ROWS
