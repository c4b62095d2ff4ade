"""The growth of dynamic trees (EAGLE-2, arXiv 2406.16858) by one depth, and the choice of their nodes.

    cost[c] = cost[parent of c] - logprob[c], the parent of candidates of depth 1 being the root, of cost 0

All candidates of a tree are kept in a pool, in the order of creation. The next frontier consists of the F
candidates of lowest cost of one depth. In the end, the nodes of a tree are the candidates of lowest cost of
all depths; of equal costs the one that was created first. A parent is cheaper than its children, or created
earlier at the same cost, so it precedes them. A logarithm that is not negative, by rounding, or not a number
counts as 0. Candidates that must not be chosen cost infinity: those beyond the tree's depth, and all but the
best in the tree of a slot under a constraint.

Two kernels. `_expand`, grid (trees,): a program owns the candidates of its tree at one depth, NUM_FRONTIER
times the least of which is found. `_keep_best`, grid (trees, tiles of the pool): a program finds the places
of its candidates by counting those that precede them and their parents. Bytes: 12 a candidate in, 12 out, and
the pool once for each of its tiles from the L2 cache.

Programmatic dependent launch: both wait for their producers before their first read and, being short, let
their dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv, next_power_of_2
from drift_sdk._kernels.trees.candidates import CandidateBuffers
from drift_sdk._kernels.trees.frontier import PADDED_PATH, Frontier, extend_path
from drift_sdk._kernels.trees.tree_roots import LIMIT_WORDS, RootTensors
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["CandidatePool", "expand_dynamic", "keep_best"]

TILE_CANDIDATES = 128
"""Candidates of a program of `_keep_best`, compared with as many at a time: 128 comparisons a thread."""
LAST_NUMBER = tl.constexpr(2**31 - 1)


class CandidatePool(Struct, frozen=True):
    """The candidates of B trees, P of each in the order of creation: cost [B * P] fp32, token and parent [B *
    P] int32 (number of a candidate of the tree; -1: the root)."""

    cost: Tensor
    token: Tensor
    parent: Tensor

    def check(self, num_trees: int) -> int:
        """P. Raises ValueError for another shape or type."""
        (size,) = self.cost.shape
        check_tensor("cost", self.cost, (size // num_trees * num_trees,), torch.float32)
        check_tensors((size,), torch.int32, token=self.token, parent=self.parent)
        return size // num_trees


@kernel(do_not_specialize=["num_nodes", "depth", "first_candidate", "first_node"])
def _expand(
    candidate_token_ptr,  # [B * NUM_SOURCES, NUM_CANDIDATES] int32
    candidate_logprob_ptr,  # [B * NUM_SOURCES, NUM_CANDIDATES] fp32
    limits_ptr,  # [B, LIMIT_WORDS] int32
    row_slot_ptr,  # [R] int32: of roots
    row_position_ptr,  # [R] int32: of roots
    draft_kv_slot_ptr,  # [B * num_draft_nodes] int64
    source_node_ptr,  # [B * NUM_SOURCES] int32: candidates; not read at depth 1
    source_path_ptr,  # [B * NUM_SOURCES, NUM_PATH_ENTRIES] int32; not read at depth 1
    pool_cost_ptr,  # [B * P] fp32, read and written
    pool_token_ptr,  # [B * P] int32, written
    pool_parent_ptr,  # [B * P] int32, written
    next_slot_ptr,  # [B * NUM_FRONTIER] int32, written
    next_token_ptr,  # likewise
    next_position_ptr,
    next_kv_slot_ptr,  # [B * NUM_FRONTIER] int64, written
    next_source_ptr,
    next_node_ptr,
    next_path_ptr,  # [B * NUM_FRONTIER, NUM_PATH_ENTRIES] int32, written
    pool_size,  # P
    num_nodes,  # T
    num_draft_nodes,
    depth,  # of the candidates, 1 or more
    first_candidate,  # number of the depth's first candidate
    first_node,  # number of the frontier's first row among the nodes that the draft computes
    NUM_SOURCES: tl.constexpr,
    NUM_FRONTIER: tl.constexpr,  # 0: no depth follows
    NUM_CANDIDATES: tl.constexpr,
    PADDED_CANDIDATES: tl.constexpr,  # NUM_SOURCES * NUM_CANDIDATES as a power of two
    LIMIT_WORDS: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PADDED_PATH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    slot = tl.load(row_slot_ptr + tree * num_nodes)
    most_depth = tl.load(limits_ptr + tree * LIMIT_WORDS + 1)
    is_chain = tl.load(limits_ptr + tree * LIMIT_WORDS + 2) != 0
    first_source = tree * NUM_SOURCES
    first_pool = tree * pool_size
    each = tl.arange(0, PADDED_CANDIDATES)
    is_each = each < NUM_SOURCES * NUM_CANDIDATES
    source = each // NUM_CANDIDATES
    has_parent = each < tl.where(depth > 1, NUM_SOURCES * NUM_CANDIDATES, 0)
    parent = tl.load(source_node_ptr + first_source + source, mask=has_parent, other=-1)
    parent_cost = tl.load(pool_cost_ptr + first_pool + parent, mask=has_parent, other=0.0)
    cell = first_source * NUM_CANDIDATES + each
    token = tl.load(candidate_token_ptr + cell, mask=is_each, other=-1)
    logprob = tl.load(candidate_logprob_ptr + cell, mask=is_each, other=0.0)
    cost = tl.where(logprob < 0, parent_cost - logprob, parent_cost)
    num_allowed = tl.where(is_chain, 1, NUM_SOURCES * NUM_CANDIDATES)
    num_allowed = tl.where((slot >= 0) & (most_depth >= depth), num_allowed, 0)
    cost = tl.where(each < num_allowed, cost, float("inf"))
    tl.store(pool_cost_ptr + first_pool + first_candidate + each, cost, mask=is_each)
    tl.store(pool_token_ptr + first_pool + first_candidate + each, token, mask=is_each)
    tl.store(pool_parent_ptr + first_pool + first_candidate + each, parent, mask=is_each)
    root_position = tl.load(row_position_ptr + tree * num_nodes)
    for index in range(NUM_FRONTIER):
        least = tl.min(cost, 0)
        chosen = tl.min(tl.where(cost == least, each, LAST_NUMBER), 0)
        chosen = tl.minimum(chosen, NUM_SOURCES * NUM_CANDIDATES - 1)
        is_live = (least < float("inf")) & (most_depth > depth)
        own_token = tl.sum(tl.where(each == chosen, token, 0), 0)
        row = tree * NUM_FRONTIER + index
        own_source = first_source + chosen // NUM_CANDIDATES
        tl.store(next_slot_ptr + row, tl.where(is_live, slot, -1))
        tl.store(next_token_ptr + row, own_token)
        tl.store(next_position_ptr + row, root_position + depth)
        kv_slot = tl.load(draft_kv_slot_ptr + tree * num_draft_nodes + first_node + index)
        tl.store(next_kv_slot_ptr + row, kv_slot)
        tl.store(next_source_ptr + row, tl.where(is_live, own_source, -1))
        tl.store(next_node_ptr + row, first_candidate + chosen)
        extend_path(
            source_path_ptr + own_source * NUM_PATH_ENTRIES,
            next_path_ptr + row * NUM_PATH_ENTRIES,
            first_node + index,
            is_live,
            depth,
            NUM_PATH_ENTRIES,
            PADDED_PATH,
        )
        cost = tl.where(each == chosen, float("inf"), cost)


@device_function
def _count_before(
    other_cost,  # [N] fp32
    other,  # [N]: numbers
    cost,  # [M] fp32
    number,  # [M]
):
    """Of how many of the others each candidate is preceded: by cost, then by number."""
    is_cheaper = other_cost[None, :] < cost[:, None]
    is_earlier = (other_cost[None, :] == cost[:, None]) & (other[None, :] < number[:, None])
    return tl.sum((is_cheaper | is_earlier).to(tl.int32), 1)


@kernel
def _keep_best(
    pool_cost_ptr,  # [B * P] fp32
    pool_token_ptr,  # [B * P] int32
    pool_parent_ptr,  # [B * P] int32
    limits_ptr,  # [B, LIMIT_WORDS] int32
    row_slot_ptr,  # [R] int32, read and written
    row_token_ptr,  # [R] int32, written
    row_parent_ptr,  # [R] int32, written
    pool_size,  # P
    num_nodes,  # T
    TILE_CANDIDATES: tl.constexpr,
    LIMIT_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, tiles of P)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    slot = tl.load(row_slot_ptr + tree * num_nodes)
    if slot >= 0:
        most_drafts = tl.minimum(tl.load(limits_ptr + tree * LIMIT_WORDS), num_nodes - 1)
        first = tree * pool_size
        own = tl.program_id(1) * TILE_CANDIDATES + tl.arange(0, TILE_CANDIDATES)
        cost = tl.load(pool_cost_ptr + first + own, mask=own < pool_size, other=float("inf"))
        is_own = cost < float("inf")
        parent = tl.load(pool_parent_ptr + first + own, mask=is_own, other=-1)
        has_parent = parent >= 0
        parent_cost = tl.load(pool_cost_ptr + first + parent, mask=has_parent, other=-1.0)
        before = tl.zeros((TILE_CANDIDATES,), tl.int32)
        before_parent = tl.zeros((TILE_CANDIDATES,), tl.int32)
        for first_other in range(0, pool_size, TILE_CANDIDATES):
            other = first_other + tl.arange(0, TILE_CANDIDATES)
            other_cost = tl.load(pool_cost_ptr + first + other, mask=other < pool_size, other=float("inf"))
            before += _count_before(other_cost, other, cost, own)
            before_parent += _count_before(other_cost, other, parent_cost, parent)

        is_kept = is_own & (before < most_drafts)
        token = tl.load(pool_token_ptr + first + own, mask=is_kept, other=-1)
        row = tree * num_nodes + 1 + before
        tl.store(row_slot_ptr + row, slot, mask=is_kept)
        tl.store(row_token_ptr + row, token, mask=is_kept)
        tl.store(row_parent_ptr + row, tl.where(has_parent, before_parent + 1, 0), mask=is_kept)


def expand_dynamic(
    candidates: CandidateBuffers,
    pool: CandidatePool,
    rows: RootTensors,
    before: Frontier,
    after: Frontier | None,
    *,
    depth: int,
    first_candidate: int,
    first_node: int,
) -> None:
    """Add the candidates of one depth of B trees to the pool, and write the frontier for the next.

    candidates: after the rows of the frontier `before`, whose first rows at depth 1 are the roots. after:
    None if no depth follows. depth: 1 or more. first_candidate: number of the first of these candidates.
    first_node: number of the first row of `after` among the nodes that the draft computes.

    Raises ValueError for another shape or type.
    """
    num_trees, (num_rows,) = rows.limits.shape[0], rows.slot.shape
    num_sources, pool_size = before.check(num_trees), pool.check(num_trees)
    num_frontier = 0 if after is None else after.check(num_trees)
    num_candidates = candidates.token.shape[1]
    if first_candidate + num_sources * num_candidates > pool_size:
        raise ValueError(f"pool: {pool_size} candidates: expected {num_sources * num_candidates} more")

    check_tensors((num_rows,), torch.int32, slot=rows.slot, position=rows.position)
    check_tensor("limits", rows.limits, (num_trees, LIMIT_WORDS), torch.int32)
    check_tensor("token", candidates.token, (num_trees * num_sources, num_candidates), torch.int32)
    check_tensor("logprob", candidates.logprob, candidates.token.shape, torch.float32)
    following = before if after is None else after
    _expand[(num_trees,)](
        candidates.token,
        candidates.logprob,
        rows.limits,
        rows.slot,
        rows.position,
        rows.draft_kv_slot,
        before.node,
        before.path,
        pool.cost,
        pool.token,
        pool.parent,
        following.slot,
        following.token,
        following.position,
        following.kv_slot,
        following.source,
        following.node,
        following.path,
        pool_size,
        num_rows // num_trees,
        rows.draft_kv_slot.shape[0] // num_trees,
        depth,
        first_candidate,
        first_node,
        NUM_SOURCES=num_sources,
        NUM_FRONTIER=num_frontier,
        NUM_CANDIDATES=num_candidates,
        PADDED_CANDIDATES=next_power_of_2(num_sources * num_candidates),
        LIMIT_WORDS=LIMIT_WORDS,
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PADDED_PATH=PADDED_PATH,
        PDL=uses_pdl(),
        num_warps=2,
        **launch_options(),
    )


def keep_best(pool: CandidatePool, rows: RootTensors) -> None:
    """Write the best candidates of each of B trees to its rows, as many as `rows.limits` allows.

    Raises ValueError for another shape or type.
    """
    num_trees, (num_rows,) = rows.limits.shape[0], rows.slot.shape
    pool_size = pool.check(num_trees)
    check_tensors((num_rows,), torch.int32, slot=rows.slot, token=rows.token, parent=rows.parent)
    check_tensor("limits", rows.limits, (num_trees, LIMIT_WORDS), torch.int32)
    _keep_best[(num_trees, cdiv(pool_size, TILE_CANDIDATES))](
        pool.cost,
        pool.token,
        pool.parent,
        rows.limits,
        rows.slot,
        rows.token,
        rows.parent,
        pool_size,
        num_rows // num_trees,
        TILE_CANDIDATES=TILE_CANDIDATES,
        LIMIT_WORDS=LIMIT_WORDS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
