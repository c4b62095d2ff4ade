"""Random trees of drafts, and walks of them written out."""

from __future__ import annotations

import random
from collections.abc import Sequence

from drift_sdk.trees import MAX_PATH_LENGTH, TokenTree

__all__ = ["accepted_path", "random_tokens", "random_tree"]


def random_tree(rng: random.Random, most_drafts: int) -> TokenTree:
    """A tree of at most `most_drafts` drafts: wide, deep or in between, no path longer than is allowed."""
    parents, depths = [-1], [0]
    reach = rng.choice([1, 2, 3, 8, 64])  # 1: a chain, 64: any node may be a parent
    for node in range(1, rng.randint(0, most_drafts) + 1):
        parent = rng.randint(max(0, node - reach), node - 1)
        if depths[parent] == MAX_PATH_LENGTH:
            parent = 0
        parents.append(parent)
        depths.append(depths[parent] + 1)

    return TokenTree(parents)


def random_tokens(rng: random.Random, tree: TokenTree, vocab_size: int) -> list[int]:
    """A token for each draft; those of siblings differ."""
    tokens = [-1] * tree.num_nodes
    for node in range(tree.num_nodes):
        children = list(tree.children(node))
        for child, token in zip(children, rng.sample(range(vocab_size), len(children)), strict=True):
            tokens[child] = token

    return tokens[1:]


def accepted_path(parents: Sequence[int], drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The longest path from the root on which each draft is the token chosen after its parent, found among
    all paths. Without stops and limits."""
    best = [0]
    for node in range(1, len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        pairs = zip(path, path[1:], strict=False)
        if len(path) > len(best) and all(drafts[child - 1] == chosen[parent] for parent, child in pairs):
            best = path

    return best
