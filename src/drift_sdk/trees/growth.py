"""Growing trees of draft tokens depth by depth, from a draft's ranked candidates.

A growing tree asks for candidates after the nodes of its frontier, which are the root at first. It keeps some
of them as nodes, and its next frontier consists of those of them that the draft has to compute next.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import NamedTuple, Protocol

from drift_sdk.trees.rank_paths import RankedTree
from drift_sdk.trees.token_tree import TokenTree

__all__ = ["Draft", "DraftLimit", "DynamicGrowth", "FrontierNode", "StaticGrowth", "TreeGrowth"]


class Draft(NamedTuple):
    """Drafted tokens: a tree, and the token of each of its nodes but the root.

    is_ngram: they are n-grams in place of a draft model's.
    """

    tree: TokenTree
    token_ids: list[int]
    is_ngram: bool = False

    @classmethod
    def chain(cls, token_ids: Sequence[int], *, is_ngram: bool = False) -> Draft:
        """Tokens one after another."""
        return cls(TokenTree.chain(len(token_ids)), list(token_ids), is_ngram)


class DraftLimit(NamedTuple):
    """Limits of a sequence's draft: most tokens, and most on a path. `is_chain`: only one path is allowed."""

    num_tokens: int
    depth: int
    is_chain: bool = True

    @property
    def chain_length(self) -> int:
        """Most tokens of a chain."""
        return min(self.num_tokens, self.depth)


class FrontierNode(NamedTuple):
    """A node that the draft computes next.

    parent_index: index of its parent in the frontier before.
    rows:         the nodes on its path that the draft computes for this tree, itself included, numbered in
                  the order in which they are computed.
    """

    token_id: int
    parent_index: int
    rows: tuple[int, ...]


class TreeGrowth(Protocol):
    """A tree that grows by the candidates of its frontier.

    num_candidates: candidates wanted after each node of the frontier; 0 when the tree is complete.
    frontier:       nodes after which candidates are wanted; empty for the root, before the first `expand`.
    """

    num_candidates: int
    frontier: list[FrontierNode]

    def expand(self, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        """Add candidates, best first, after each node of the frontier: their ids, and the logarithms of the
        draft's probabilities."""

    def draft(self) -> Draft:
        """The tree, once it is complete."""


class StaticGrowth:
    """The growth of the first nodes of a static tree."""

    def __init__(self, ranked: RankedTree, limit: DraftLimit) -> None:
        nodes = [
            node
            for node, depth in enumerate(ranked.tree.depths[: limit.num_tokens + 1])
            if depth <= limit.depth
        ]
        number = {node: index for index, node in enumerate(nodes)}
        parents = [number.get(ranked.tree.parents[node], -1) for node in nodes]
        self._tree = TokenTree(parents)
        self._ranks = [ranked.ranks[node] for node in nodes]
        self._token_ids = [-1] * len(nodes)
        self._computed = [0]  # the nodes of the frontier
        self._rows: list[tuple[int, ...]] = [()]  # their `FrontierNode.rows`
        self._num_rows = 0
        self.frontier: list[FrontierNode] = []
        self.num_candidates: int = self._most_candidates()

    def expand(self, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        before = list(zip(self._computed, self._rows, token_ids, strict=True))
        self._computed, self.frontier = [], []
        for index, (parent, rows, candidates) in enumerate(before):
            for node in self._tree.children(parent):
                token_id = self._token_ids[node] = candidates[self._ranks[node]]
                if not self._tree.is_leaf(node):
                    self._computed.append(node)
                    self.frontier.append(FrontierNode(token_id, index, (*rows, self._num_rows)))
                    self._num_rows += 1

        self._rows = [node.rows for node in self.frontier]
        self.num_candidates = self._most_candidates()

    def draft(self) -> Draft:
        return Draft(self._tree, self._token_ids[1:])

    def _most_candidates(self) -> int:
        ranks = [self._ranks[child] for node in self._computed for child in self._tree.children(node)]
        return max(ranks, default=-1) + 1


class _Candidate(NamedTuple):
    """A node of a dynamic tree that may be kept. The order is that of preference: by falling probability,
    then in the order of creation, so that a parent precedes its children."""

    cost: float  # minus the sum of the logarithms of probabilities on the path
    number: int  # in the order of creation, from 1; 0 for the root
    parent: int
    token_id: int
    parent_index: int


class DynamicGrowth:
    """The growth of the tree of the best candidates by the product of the draft's probabilities on their path
    (EAGLE-2, arXiv 2406.16858).

    After every node of the frontier, the `top_k` best candidates are considered. The next frontier is the
    `top_k` best of all of them. In the end, the best `limit.num_tokens` nodes of all depths are kept. Nodes
    are numbered by falling probability.
    """

    def __init__(self, top_k: int, depth: int, limit: DraftLimit) -> None:
        # A node that is not among the best n of its depth is not among the best n of all, nor are its
        # children; and the best n are at most n deep.
        self._num_tokens = limit.num_tokens
        self._top_k = min(top_k, limit.num_tokens)
        self._num_levels = min(depth, limit.depth, limit.num_tokens)
        self._pool: list[_Candidate] = []
        self._computed = [_Candidate(0.0, 0, -1, -1, 0)]  # the nodes of the frontier
        self._rows: list[tuple[int, ...]] = [()]  # their `FrontierNode.rows`
        self._num_rows = 0
        self.frontier: list[FrontierNode] = []
        self.num_candidates: int = self._top_k if self._num_levels else 0

    def expand(self, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        added: list[_Candidate] = []
        first = len(self._pool) + 1
        for index, (parent, ids, values) in enumerate(zip(self._computed, token_ids, logprobs, strict=True)):
            for token_id, value in zip(ids[: self._top_k], values[: self._top_k], strict=True):
                # Neither rounding, which may make the logarithm of a probability near 1 positive, nor NaN may
                # place a child before its parent.
                cost = parent.cost - value if value < 0 else parent.cost
                added.append(_Candidate(cost, first + len(added), parent.number, token_id, index))

        self._pool += added
        self._num_levels -= 1
        self._computed = nsmallest(self._top_k, added) if self._num_levels else []
        self.frontier = [
            FrontierNode(each.token_id, each.parent_index, (*self._rows[each.parent_index], row))
            for row, each in enumerate(self._computed, self._num_rows)
        ]
        self._rows = [node.rows for node in self.frontier]
        self._num_rows += len(self.frontier)
        self.num_candidates = self._top_k if self._computed else 0

    def draft(self) -> Draft:
        kept = nsmallest(self._num_tokens, self._pool)
        number = {0: 0} | {each.number: node for node, each in enumerate(kept, 1)}
        tree = TokenTree([-1, *(number[each.parent] for each in kept)])
        return Draft(tree, [each.token_id for each in kept])
