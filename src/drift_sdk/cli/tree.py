"""The command `tree`: draws a tree of drafts, its statistics, and the buffers it implies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drift_sdk.speculation import DynamicTree, StaticTree, load_tree
from drift_sdk.trees import MAX_PATH_LENGTH, MAX_TREE_ROWS, RankedTree, max_batch_drafts, rank_tree

__all__ = ["describe_tree", "run_tree"]


def run_tree(file: Path) -> int:
    """Print the description of the tree in a file; ConfigError for a file or tree that is wrong."""
    print("\n".join(describe_tree(load_tree(file))))
    return 0


def describe_tree(shape: StaticTree | DynamicTree) -> Iterator[str]:
    """Lines: the drawing of a static tree, statistics, and buffers."""
    if isinstance(shape, StaticTree):
        ranked = rank_tree(shape.paths)
        yield from draw(ranked)
        yield ""
        yield from static_statistics(ranked)
    else:
        yield f"dynamic tree: the best {shape.num_draft_tokens} drafts of each round"
        yield f"candidates after a token  {shape.top_k}"
        considered = shape.top_k + (shape.depth - 1) * shape.top_k**2
        yield f"candidates considered     {considered}"
        yield f"longest path              {shape.depth} drafts"
    yield ""
    yield from buffers(shape)


def draw(ranked: RankedTree) -> Iterator[str]:
    """The tree, a node a line: its number, and its rank among the candidates after its parent."""
    tree = ranked.tree
    yield "0  newest token"

    def lines(node: int, indent: str) -> Iterator[str]:
        for child in tree.children(node):
            is_last = tree.next_sibling[child] < 0
            yield f"{indent}{'`--' if is_last else '|--'} {child}  rank {ranked.ranks[child]}"
            yield from lines(child, indent + ("    " if is_last else "|   "))

    yield from lines(0, "")


def static_statistics(ranked: RankedTree) -> Iterator[str]:
    """Counts of nodes."""
    tree = ranked.tree
    yield f"nodes                     {tree.num_nodes}, the newest token included"
    yield f"leaves                    {sum(tree.is_leaf(node) for node in range(tree.num_nodes))}"
    yield f"longest path              {tree.max_depth} drafts"
    yield f"candidates after a token  {max(ranked.ranks) + 1}"
    for depth, num_non_leaves in enumerate(tree.num_non_leaves):
        yield f"nodes of depth {depth:2}         {tree.depths.count(depth)}, with children {num_non_leaves}"


def buffers(shape: StaticTree | DynamicTree) -> Iterator[str]:
    """Rows and bytes of a round, by the number of sequences."""
    yield f"sequences  drafts each  rows verified (at most {MAX_TREE_ROWS})  rows drafted  masks and paths"
    shown = 0
    for number in (1, 2, 4, 8, 16, 32, 64, 128):
        most = max_batch_drafts(number)
        drafts = max((choice for choice in shape.choices if choice <= most), default=0)
        if drafts == shown == 0:
            continue

        shown = drafts
        rows = number * (drafts + 1)
        # Ancestors are 64 bits a row, a path is one int32 for each of its nodes.
        num_bytes = rows * (8 + 4 * (MAX_PATH_LENGTH + 1))
        drafted = number * shape.num_draft_rows(drafts)
        yield f"{number:9}  {drafts:11}  {rows:29}  {drafted:12}  {num_bytes:9} bytes"
    yield f"KV rows of trees, behind the blocks of sequences: {MAX_TREE_ROWS}"
