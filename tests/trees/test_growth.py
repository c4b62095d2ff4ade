"""Growing trees against trees picked from all paths that a draft could propose."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drift_sdk.trees import (
    Draft,
    DraftLimit,
    DynamicGrowth,
    StaticGrowth,
    TokenTree,
    TreeGrowth,
    check_paths,
    rank_tree,
)

NUM_TOKENS = 6


class RandomDraft:
    """A draft whose probabilities after a path depend on the path alone. levels: how many values there are;
    few make ties."""

    def __init__(self, seed: int, levels: int | None) -> None:
        self.seed, self.levels = seed, levels

    def candidates(self, path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """All tokens, best first, and the logarithms of their probabilities."""
        rng = random.Random(f"{self.seed} {path}")
        values = [
            rng.random() if self.levels is None else rng.randint(1, self.levels) for _ in range(NUM_TOKENS)
        ]
        logs = [math.log(value / sum(values)) for value in values]
        order = sorted(range(NUM_TOKENS), key=lambda token: -logs[token])
        return order, [logs[token] for token in order]


def grow(tree: TreeGrowth, draft: RandomDraft) -> Draft:
    """Grow a tree, and check that each node of its frontiers is given with its place."""
    frontier: list[tuple[int, ...]] = [()]
    computed: list[tuple[int, ...]] = []
    while tree.num_candidates:
        found = [draft.candidates(path) for path in frontier]
        number = tree.num_candidates
        tree.expand([ids[:number] for ids, _ in found], [logs[:number] for _, logs in found])
        frontier = [(*frontier[node.parent_index], node.token_id) for node in tree.frontier]
        computed += frontier
        for node, path in zip(tree.frontier, frontier, strict=True):
            assert [computed[row] for row in node.rows] == [path[: end + 1] for end in range(len(path))]
    return tree.draft()


def token_paths(draft: Draft) -> list[tuple[int, ...]]:
    tokens = [-1, *draft.token_ids]
    return [
        tuple(tokens[each] for each in draft.tree.path(node)[1:]) for node in range(1, draft.tree.num_nodes)
    ]


@given(st.integers(), st.sampled_from([None, 1, 2]), st.integers(1, 4), st.integers(1, 4), st.integers(1, 30))
@settings(max_examples=150)
def test_dynamic_tree_has_the_likeliest_paths(
    seed: int, levels: int | None, top_k: int, depth: int, num_tokens: int
) -> None:
    source = RandomDraft(seed, levels)
    draft = grow(DynamicGrowth(top_k, depth, DraftLimit(num_tokens, depth, is_chain=False)), source)
    # All paths that are considered, in the order of their creation, by falling probability.
    pool: list[tuple[float, int, tuple[int, ...]]] = []
    frontier: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    for _ in range(depth):
        added = []
        for cost, _, path in frontier:
            ids, logs = source.candidates(path)
            for token, log in list(zip(ids, logs, strict=True))[:top_k]:
                added.append((cost - log, len(pool) + len(added) + 1, (*path, token)))
        pool += added
        frontier = sorted(added)[:top_k]
    expected = [path for _, _, path in sorted(pool)[:num_tokens]]
    assert token_paths(draft) == expected
    assert draft.tree.num_drafts == min(num_tokens, len(pool))
    assert draft.tree.max_depth <= depth


@given(st.integers(), st.sampled_from([None, 1]), st.integers(1, 29))
@settings(max_examples=40)
def test_smaller_dynamic_tree_is_the_beginning_of_a_larger_one(
    seed: int, levels: int | None, num_tokens: int
) -> None:
    source = RandomDraft(seed, levels)
    large, small = (
        grow(DynamicGrowth(4, 4, DraftLimit(number, 4, is_chain=False)), source)
        for number in (30, num_tokens)
    )
    if levels is None:  # with ties, nodes are numbered among those that are considered
        assert token_paths(small) == token_paths(large)[:num_tokens]
    assert small.tree.num_drafts == num_tokens


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e-7])
def test_broken_probabilities_still_give_a_tree(value: float) -> None:
    tree = DynamicGrowth(2, 3, DraftLimit(8, 3, is_chain=False))
    while tree.num_candidates:
        number = max(len(tree.frontier), 1)
        tree.expand([[1, 2]] * number, [[value, value]] * number)
    assert tree.draft().tree.num_drafts == 8


@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(0, 5))
@settings(max_examples=80)
def test_static_tree_has_the_tokens_of_its_ranks(seed: int, num_tokens: int, depth: int) -> None:
    rng = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < 15:
        path = (*rng.choice(paths), rng.randrange(3))
        if path not in paths and len(path) <= 5:
            paths.append(path)
    ranked = rank_tree(check_paths(paths[1:]))
    source = RandomDraft(seed, None)
    draft = grow(StaticGrowth(ranked, DraftLimit(num_tokens, depth, is_chain=False)), source)
    expected = []
    for node in range(1, ranked.tree.num_nodes)[:num_tokens]:
        ranks = [ranked.ranks[each] for each in ranked.tree.path(node)[1:]]
        tokens: tuple[int, ...] = ()
        for rank in ranks:
            tokens = (*tokens, source.candidates(tokens)[0][rank])
        if len(ranks) <= depth:
            expected.append(tokens)
    assert token_paths(draft) == expected


def test_chains_of_trees() -> None:
    """Trees without branches are the chain of the best tokens."""
    source = RandomDraft(3, None)
    chain: tuple[int, ...] = ()
    for _ in range(5):
        chain = (*chain, source.candidates(chain)[0][0])
    limit = DraftLimit(5, 5, is_chain=False)
    paths = tuple((0,) * length for length in range(1, 6))
    for tree in (StaticGrowth(rank_tree(paths), limit), DynamicGrowth(1, 5, limit)):
        draft = grow(tree, source)
        assert draft.token_ids == list(chain)
        assert draft.tree.parents == TokenTree.chain(5).parents == Draft.chain(chain).tree.parents
