"""Limits of trees of draft tokens."""

from __future__ import annotations

__all__ = [
    "MAX_CANDIDATES",
    "MAX_DRAFT_ROWS",
    "MAX_NON_LEAVES",
    "MAX_PATH_LENGTH",
    "MAX_TREE_DRAFTS",
    "MAX_TREE_NODES",
    "MAX_TREE_ROWS",
    "max_batch_drafts",
]

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
