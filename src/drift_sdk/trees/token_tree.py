"""The structure of a tree of draft tokens: parents, depths, ancestors, children."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

__all__ = ["TokenTree"]


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
