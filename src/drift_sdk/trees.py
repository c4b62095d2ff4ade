"""Trees of draft tokens: their limits, their structure, static trees, and growth.

Static trees are given by paths of ranks. A path lists, from the root on, the rank of each token among the
draft's candidates after its parent, 0 being the best: (0, 1) is the second best candidate after the best one.

Trees grow depth by depth, from a draft's ranked candidates. A growing tree asks for candidates after the
nodes of its frontier, which are the root at first. It keeps some of them as nodes, and its next frontier
consists of those of them that the draft has to compute next.
"""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from drift_sdk._fields import plain_scalar
from drift_sdk.errors import ConfigError

MAX_PATH_LENGTH = 16
"""Most drafts on a path; the root is not counted. Also the longest chain."""
MAX_TREE_NODES = 64
"""Most nodes of a tree, the root included: the ancestors of a node are the bits of one 64-bit word."""
MAX_TREE_DRAFTS = MAX_TREE_NODES - 1
"""Most drafts of a tree: all nodes but the root."""
MAX_CANDIDATES = 16
"""Most children of a node: candidates are ranked 0 to 15."""
MAX_NON_LEAVES = 16
"""Most nodes of one depth that have children: rows that the draft computes at once for a sequence."""
MAX_DRAFT_ROWS = 64
"""Most rows that the draft computes for a dynamic tree of one sequence: top_k * (depth - 1)."""
MAX_TREE_ROWS = 256
"""Most nodes of all trees of a round, roots included: rows that the target verifies at once."""


def max_batch_drafts(num_sequences: int) -> int:
    """The most drafts a sequence in a round of `num_sequences` trees: `MAX_TREE_ROWS` is shared evenly, and
    each root takes one row. 0 if there is room for roots only."""
    return min(max(MAX_TREE_ROWS // max(num_sequences, 1) - 1, 0), MAX_TREE_DRAFTS)


class TokenTree:
    """The nodes of a tree. Node 0, the root, is the newest token of a sequence; the others are drafts.

    A parent has a lower number than its children, so the first n nodes of a tree are a tree as well. Of the
    children of a node, the one with the lowest number is preferred.

    parents:        parent of each node; -1 for the root.
    depths:         drafts on the path from the root to each node; 0 for the root.
    ancestor_bits:  for each node, bit j is set if node j is the node itself or one of its ancestors.
    first_child:    lowest child of each node; -1 for leaves.
    next_sibling:   next higher child of the same parent; -1 for the last one and the root.

    Raises ValueError for parents that are not a tree in this order.
    """

    __slots__ = ("ancestor_bits", "depths", "first_child", "next_sibling", "parents")

    def __init__(self, parents: Sequence[int]) -> None:
        for node, parent in enumerate(parents):
            if not (0 <= parent < node if node else parent == -1):
                allowed = f"0 to {node - 1}" if node else "-1"
                raise ValueError(f"parent {parent} of node {node}: expected {allowed}")

        if not parents:
            raise ValueError("a tree without nodes: expected at least the root")

        depths, bits = [0], [1]
        first_child, next_sibling, last_child = ([-1] * len(parents) for _ in range(3))
        for node, parent in enumerate(parents[1:], 1):
            depths.append(depths[parent] + 1)
            bits.append(bits[parent] | 1 << node)
            if first_child[parent] < 0:
                first_child[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent] = node

        self.parents: tuple[int, ...] = tuple(parents)
        self.depths: tuple[int, ...] = tuple(depths)
        self.ancestor_bits: tuple[int, ...] = tuple(bits)
        self.first_child: tuple[int, ...] = tuple(first_child)
        self.next_sibling: tuple[int, ...] = tuple(next_sibling)

    @staticmethod
    @lru_cache(maxsize=64)
    def chain(num_drafts: int) -> TokenTree:
        """The tree without branches."""
        return TokenTree(range(-1, num_drafts))

    def __repr__(self) -> str:
        return f"TokenTree({self.parents})"

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @property
    def num_drafts(self) -> int:
        """Nodes, the root not included."""
        return len(self.parents) - 1

    @property
    def max_depth(self) -> int:
        """Drafts on the longest path."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.max_depth == self.num_drafts

    def is_leaf(self, node: int) -> bool:
        """Whether a node has no children."""
        return self.first_child[node] < 0

    def children(self, node: int) -> Iterator[int]:
        """The children of a node, ascending."""
        child = self.first_child[node]
        while child >= 0:
            yield child
            child = self.next_sibling[child]

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]

        return tuple(reversed(nodes))

    @property
    def first_path(self) -> tuple[int, ...]:
        """The nodes from the root to a leaf by first children."""
        nodes = [0]
        while self.first_child[nodes[-1]] >= 0:
            nodes.append(self.first_child[nodes[-1]])

        return tuple(nodes)

    @property
    def num_non_leaves(self) -> tuple[int, ...]:
        """Nodes with children, by depth, from the root's depth to that of the deepest leaf."""
        counts = [0] * (self.max_depth + 1)
        for node, depth in enumerate(self.depths):
            counts[depth] += not self.is_leaf(node)

        return tuple(counts)

    def prefix(self, num_nodes: int) -> TokenTree:
        """The tree of the first `num_nodes` nodes."""
        return self if num_nodes >= self.num_nodes else TokenTree(self.parents[:num_nodes])


RankPaths = tuple[tuple[int, ...], ...]
MAX_FILE_BYTES = 2**14
"""Largest file of a tree; 63 paths of 16 ranks take some 4 KiB. The time that tomllib takes for nested tables
grows with the square of their depth."""
FORMATS = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""Formats of files, by the ends of their names."""


class RankedTree:
    """A tree, and the rank of each node among the candidates after its parent (0 for the root).

    Nodes are numbered by the sum of (rank + 1) along their path, then by depth, then by path. A draft of few
    tokens takes the first of them: the likeliest, as far as ranks tell.
    """

    __slots__ = ("ranks", "tree")

    def __init__(self, paths: RankPaths) -> None:
        ordered = sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))
        number = {(): 0} | {path: node for node, path in enumerate(ordered, 1)}
        self.tree: TokenTree = TokenTree([-1, *(number[path[:-1]] for path in ordered)])
        self.ranks: tuple[int, ...] = (0, *(path[-1] for path in ordered))


@lru_cache(maxsize=64)
def rank_tree(paths: RankPaths) -> RankedTree:
    """The tree of checked paths."""
    return RankedTree(paths)


def check_paths(paths: object) -> RankPaths:
    """The paths as tuples of plain integers. Raises ConfigError naming `paths` for a wrong one."""
    items = _items(paths, MAX_TREE_DRAFTS)
    if not items:
        raise ConfigError.of("paths", paths, f"1 to {MAX_TREE_DRAFTS} paths")

    checked = tuple(map(_checked_path, items))
    found: set[tuple[int, ...]] = set()
    for path in checked:
        if path in found:
            raise ConfigError.of("paths", path, "each path once")

        found.add(path)

    for path in checked:
        if path[:-1] and path[:-1] not in found:
            raise ConfigError.of("paths", path, f"its prefix {path[:-1]} among the paths")

    counts = RankedTree(checked).tree.num_non_leaves
    if max(counts) > MAX_NON_LEAVES:
        depth = counts.index(max(counts))
        allowed = f"at most {MAX_NON_LEAVES} nodes of one depth with children, not {max(counts)} of {depth}"
        raise ConfigError.of("paths", paths, allowed)

    return checked


def read_tree_file(file: str | Path) -> dict[str, Any]:
    """The settings in a TOML, JSON or YAML file; a list at the top of a file is taken for `paths`.

    Raises ConfigError naming `file` if it cannot be read.
    """
    if not isinstance(file, str | Path):
        raise ConfigError.of("file", file, "a path")

    path = Path(file)
    if path.suffix not in FORMATS:
        raise ConfigError.of("file", str(file), "a name that ends in .toml, .json, .yaml or .yml")

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO may never return
            raise ConfigError.of("file", str(file), "a regular file")

        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError.of("file", str(file), f"at most {MAX_FILE_BYTES} bytes")

        settings = _parse(data, FORMATS[path.suffix])
    except (OSError, ValueError, RecursionError) as error:
        allowed = f"a readable {FORMATS[path.suffix]} file: {error}"
        raise ConfigError.of("file", str(file), allowed) from error

    if isinstance(settings, list):
        return {"paths": settings}

    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError.of("file", str(file), "a table of settings, or a list of paths")

    return settings


def _parse(data: bytes, form: str) -> object:
    """The value in a file. ValueError or RecursionError for one that is wrong."""
    if form == "TOML":
        return tomllib.loads(data.decode())

    if form == "JSON":
        return json.loads(data)

    import yaml  # 10 ms, which other files need not wait for

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Without aliases: those that are merged into each other take time without end."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias")

            return super().compose_node(parent, index)

    try:
        return yaml.load(data, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (LookupError, AttributeError) as error:  # a tag such as !!bool before other text
        raise ValueError(f"a value does not fit its tag ({error!r})") from error


def _checked_path(path: object) -> tuple[int, ...]:
    """A path as a tuple of plain integers; ConfigError naming `paths` for a wrong one."""
    ranks = _items(path, MAX_PATH_LENGTH)
    if not ranks or not all(map(_is_rank, ranks)):
        allowed = f"paths of 1 to {MAX_PATH_LENGTH} ranks from 0 to {MAX_CANDIDATES - 1}"
        raise ConfigError.of("paths", path, allowed)

    return ranks


def _items(value: object, most: int) -> tuple[Any, ...]:
    """The items of a sequence, as plain values; empty for a value that is not a sequence, cannot be read or
    has more than `most` items."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return ()

    try:
        items = tuple(islice(value, most + 1))
    except Exception:  # from a class of the caller's
        return ()

    return tuple(map(plain_scalar, items)) if len(items) <= most else ()


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_CANDIDATES


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
