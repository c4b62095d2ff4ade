"""The growth of static trees by one depth: candidates become the tokens of nodes.

A static tree says of each node which parent it has and which rank among the candidates after the parent.
`StaticTables` has that as tensors. A tree of fewer drafts than nodes has the first nodes, and one of less
depth lacks the deeper ones: their rows keep slot -1. The tree of a slot under a constraint is the chain of
best candidates.

Grid: (trees,). A program owns the nodes of its tree, and its rows of the next frontier. Bytes: 24 a node in,
12 out; 20 and a path for each row of the frontier.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.trees.candidates import CandidateBuffers
from drift_sdk._kernels.trees.frontier import PADDED_PATH, Frontier, extend_path
from drift_sdk._kernels.trees.tree_roots import LIMIT_WORDS, RootTensors
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["StaticTables", "grow_static"]


class StaticTables(Struct, frozen=True):
    """A static tree of T nodes, int32 [T] each.

    depth and parent of each node; rank: among the candidates after its parent; source: the parent's row in
    the frontier of its depth. frontier: for each depth from 1 on, [F] int32, the nodes that the draft
    computes, -1 for none.
    """

    depth: Tensor
    parent: Tensor
    rank: Tensor
    source: Tensor
    frontier: tuple[Tensor, ...]


@kernel(do_not_specialize=["depth", "first_node"])
def _grow_static(
    candidate_token_ptr,  # [B * NUM_SOURCES, NUM_CANDIDATES] int32
    limits_ptr,  # [B, LIMIT_WORDS] int32
    depth_ptr,  # [T] int32
    parent_ptr,  # [T] int32
    rank_ptr,  # [T] int32
    source_ptr,  # [T] int32
    frontier_ptr,  # [NUM_FRONTIER] int32; not read where it is 0
    source_path_ptr,  # [B * NUM_SOURCES, NUM_PATH_ENTRIES] int32; not read at depth 1
    row_slot_ptr,  # [R] int32, read and written
    row_token_ptr,  # [R] int32, written
    row_parent_ptr,  # [R] int32, written
    row_position_ptr,  # [R] int32: of roots
    draft_kv_slot_ptr,  # [B * num_draft_nodes] int64
    next_slot_ptr,  # [B * NUM_FRONTIER] int32, written
    next_token_ptr,  # likewise
    next_position_ptr,
    next_kv_slot_ptr,  # [B * NUM_FRONTIER] int64, written
    next_source_ptr,
    next_path_ptr,  # [B * NUM_FRONTIER, NUM_PATH_ENTRIES] int32, written
    num_draft_nodes,
    depth,  # of the nodes that are grown, 1 or more
    first_node,  # number of the frontier's first row among the nodes that the draft computes
    NUM_NODES: tl.constexpr,  # T
    PADDED_NODES: tl.constexpr,
    NUM_SOURCES: tl.constexpr,  # rows of the frontier before, of each tree
    NUM_FRONTIER: tl.constexpr,  # rows of the next frontier; 0: none
    NUM_CANDIDATES: tl.constexpr,
    LIMIT_WORDS: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PADDED_PATH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    first_row = tree * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    most_drafts = tl.load(limits_ptr + tree * LIMIT_WORDS)
    most_depth = tl.load(limits_ptr + tree * LIMIT_WORDS + 1)
    is_chain = tl.load(limits_ptr + tree * LIMIT_WORDS + 2) != 0
    is_grown = (slot >= 0) & (most_depth >= depth)
    node = tl.arange(0, PADDED_NODES)
    in_tree = node < NUM_NODES
    node_depth = tl.load(depth_ptr + node, mask=in_tree, other=-1)
    node_depth = tl.where(is_chain, node, node_depth)
    is_new = in_tree & (node_depth == depth) & (node <= tl.where(is_grown, most_drafts, -1))
    parent = tl.load(parent_ptr + node, mask=is_new, other=0)
    rank = tl.load(rank_ptr + node, mask=is_new, other=0)
    source = tl.load(source_ptr + node, mask=is_new, other=0)
    source = tl.where(is_chain, 0, source)
    first_source = tree * NUM_SOURCES
    cell = (first_source + source) * NUM_CANDIDATES + tl.where(is_chain, 0, rank)
    token = tl.load(candidate_token_ptr + cell, mask=is_new, other=-1)
    tl.store(row_slot_ptr + first_row + node, slot, mask=is_new)
    tl.store(row_token_ptr + first_row + node, token, mask=is_new)
    tl.store(row_parent_ptr + first_row + node, tl.where(is_chain, depth - 1, parent), mask=is_new)
    root_position = tl.load(row_position_ptr + first_row)
    for index in range(NUM_FRONTIER):
        own = tl.load(frontier_ptr + index)
        own = tl.where(is_chain, tl.where(index == 0, depth, -1), own)
        is_live = is_grown & (own >= 0) & (own <= most_drafts) & (most_depth > depth)
        own_source = tl.load(source_ptr + own, mask=is_live & (is_chain == 0), other=0)
        own_rank = tl.load(rank_ptr + own, mask=is_live & (is_chain == 0), other=0)
        own_cell = (first_source + own_source) * NUM_CANDIDATES + own_rank
        own_token = tl.load(candidate_token_ptr + own_cell, mask=is_live, other=-1)
        row = tree * NUM_FRONTIER + index
        tl.store(next_slot_ptr + row, tl.where(is_live, slot, -1))
        tl.store(next_token_ptr + row, own_token)
        tl.store(next_position_ptr + row, root_position + depth)
        kv_slot = tl.load(draft_kv_slot_ptr + tree * num_draft_nodes + first_node + index)
        tl.store(next_kv_slot_ptr + row, kv_slot)
        tl.store(next_source_ptr + row, tl.where(is_live, first_source + own_source, -1))
        extend_path(
            source_path_ptr + (first_source + own_source) * NUM_PATH_ENTRIES,
            next_path_ptr + row * NUM_PATH_ENTRIES,
            first_node + index,
            is_live,
            depth,
            NUM_PATH_ENTRIES,
            PADDED_PATH,
        )


def grow_static(
    candidates: CandidateBuffers,
    tables: StaticTables,
    rows: RootTensors,
    before: Frontier,
    after: Frontier | None,
    *,
    depth: int,
    first_node: int,
) -> None:
    """Grow the nodes of one depth of B static trees, and write the frontier for the next.

    candidates: after the rows of the frontier `before`, whose first rows at depth 1 are the roots. after: the
    rows of `tables.frontier[depth - 1]`; None: the trees are complete. depth: 1 or more. first_node: number
    of the first row of `after` among the nodes that the draft computes.

    Raises ValueError for another shape or type.
    """
    num_trees, (num_nodes,) = rows.limits.shape[0], tables.depth.shape
    num_sources = before.check(num_trees)
    num_frontier = 0 if after is None else after.check(num_trees)
    num_candidates = candidates.token.shape[1]
    check_tensors((num_trees * num_nodes,), torch.int32, slot=rows.slot, token=rows.token)
    check_tensors((num_trees * num_nodes,), torch.int32, parent=rows.parent, position=rows.position)
    check_tensor("limits", rows.limits, (num_trees, LIMIT_WORDS), torch.int32)
    for name in ("depth", "parent", "rank", "source"):
        check_tensor(name, getattr(tables, name), (num_nodes,), torch.int32)
    check_tensor("candidates", candidates.token, (num_trees * num_sources, num_candidates), torch.int32)
    frontier = tables.depth if after is None else tables.frontier[depth - 1]
    if after is not None:
        check_tensor("frontier", frontier, (num_frontier,), torch.int32)
    following = before if after is None else after
    _grow_static[(num_trees,)](
        candidates.token,
        rows.limits,
        tables.depth,
        tables.parent,
        tables.rank,
        tables.source,
        frontier,
        before.path,
        rows.slot,
        rows.token,
        rows.parent,
        rows.position,
        rows.draft_kv_slot,
        following.slot,
        following.token,
        following.position,
        following.kv_slot,
        following.source,
        following.path,
        rows.draft_kv_slot.shape[0] // num_trees,
        depth,
        first_node,
        NUM_NODES=num_nodes,
        PADDED_NODES=next_power_of_2(num_nodes),
        NUM_SOURCES=num_sources,
        NUM_FRONTIER=num_frontier,
        NUM_CANDIDATES=num_candidates,
        LIMIT_WORDS=LIMIT_WORDS,
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PADDED_PATH=PADDED_PATH,
        PDL=uses_pdl(),
        num_warps=2,
        **launch_options(),
    )
