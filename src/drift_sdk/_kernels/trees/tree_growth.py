"""Growth of trees of drafts, depth by depth: candidates, and which of them become nodes.

A draft computes the rows of a `Frontier`, those of one depth. The best tokens after each row, with the
draft's probabilities, are the candidates for nodes of the next depth:

    score[t]   = logits[t] + temperature * noise[t]
    logprob[t] = log(softmax(score / temperature))[t], and with temperature 0 that of the softmax of logits

The best are those with the highest scores; of equal ones the lowest id comes first. The noise is that of the
target's id at the position behind the row, so that the order is the one by which the target will choose.

Two launches. `_rank_chunks`, grid (rows, chunks): a program owns CHUNK_TOKENS logits of a row, and finds the
best of them and the sum of their exponentials. `_merge_chunks`, grid (rows,): a program owns a row. Logits
that come as partial sums are added slice by slice, in order. Bytes: a row of logits a row, all its slices.

A static tree says of each node which parent it has and which rank among the candidates after the parent.
`StaticTables` has that as tensors. A tree of fewer drafts than nodes has the first nodes, and one of less
depth lacks the deeper ones: their rows keep slot -1. The tree of a slot under a constraint is the chain of
best candidates.

Grid: (trees,). A program owns the nodes of its tree, and its rows of the next frontier. Bytes: 24 a node in,
12 out; 20 and a path for each row of the frontier.

Dynamic trees (EAGLE-2, arXiv 2406.16858) choose their nodes among all candidates:

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

Programmatic dependent launch: all kernels wait for their producers before their first read and, being short,
let their dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.draft.draft_choose import CHUNK_TOKENS, _noise, num_draft_chunks
from drift_sdk._kernels.launch.arguments import (
    cdiv,
    check_range,
    check_tensor,
    check_tensors,
    next_power_of_2,
)
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.logits import LEAST_TEMPERATURE
from drift_sdk._kernels.sampling.rows import LAST_ID, arg_max
from drift_sdk._kernels.trees.tree_rows import LIMIT_WORDS, PATH_ENTRIES, RootTensors
from drift_sdk.trees import MAX_CANDIDATES

PADDED_PATH = next_power_of_2(PATH_ENTRIES)


class Frontier(Struct, frozen=True):
    """F rows of each of B trees, which a draft computes at once.

    slot (-1: no row), token, and position (of the token) [B * F] int32. kv_slot [B * F] int64: cache slots of
    the rows' keys and values. source [B * F] int32: the row before,
    of the frontier one depth less, whose output is a row's feature. node [B * F] int32: what the growth of
    dynamic trees has to remember. path [B * F, PATH_ENTRIES] int32: by depth, the numbers of the nodes that a
    row sees among those that the draft computes, the root being 0; then -1.
    """

    slot: Tensor
    token: Tensor
    position: Tensor
    kv_slot: Tensor
    source: Tensor
    node: Tensor
    path: Tensor

    def check(self, num_trees: int) -> int:
        """F. Raises ValueError for another shape or type."""
        (num_rows,) = self.slot.shape
        for name in ("slot", "token", "position", "source", "node"):
            check_tensor(name, getattr(self, name), (num_rows,), torch.int32)
        check_tensor("kv_slot", self.kv_slot, (num_rows,), torch.int64)
        check_tensor("path", self.path, (num_rows, PATH_ENTRIES), torch.int32)
        if num_rows % num_trees:
            raise ValueError(f"frontier: {num_rows} rows: expected a multiple of {num_trees}")

        return num_rows // num_trees


@device_function
def extend_path(
    source_path_ptr,  # the row of `Frontier.path` of the row before
    own_path_ptr,  # the row's own, written
    own_node,  # the row's number among the nodes that the draft computes
    is_stored,
    depth,
    NUM_PATH_ENTRIES: tl.constexpr,
    PADDED_PATH: tl.constexpr,
):
    """Write the path of a row that is `depth` deep: that of the row before, and the row itself. The path of a
    root is entry 0 alone, and is not read."""
    entry = tl.arange(0, PADDED_PATH)
    is_before = entry < tl.where(is_stored & (depth > 1), depth, 0)
    before = tl.load(source_path_ptr + entry, mask=is_before, other=0)
    path = tl.where(entry < depth, before, tl.where(entry == depth, own_node, -1))
    tl.store(own_path_ptr + entry, path, mask=entry < tl.where(is_stored, NUM_PATH_ENTRIES, 0))


class CandidateBuffers(Struct, frozen=True):
    """The N best tokens of M rows, and scratch memory for K chunks of their logits.

    token [M, N] int32, logprob [M, N] fp32: the results, best first; undefined for rows of slot -1.
    chunk_max, chunk_sum [M, K] fp32, chunk_value [M, K, N] fp32, chunk_token [M, K, N] int32: scratch.
    """

    token: Tensor
    logprob: Tensor
    chunk_max: Tensor
    chunk_sum: Tensor
    chunk_value: Tensor
    chunk_token: Tensor


@kernel
def _rank_chunks(
    logits_ptr,  # [M, D], or partial sums [NUM_SLICES, M, D] fp32
    target_ids_ptr,  # [D] int32
    row_slot_ptr,  # [M] int32
    row_position_ptr,  # [M] int32
    temperature_ptr,  # [S] fp32
    seed_ptr,  # [S] int64
    chunk_max_ptr,  # [M, K] fp32, written
    chunk_sum_ptr,  # [M, K] fp32, written
    chunk_value_ptr,  # [M, K, NUM_CANDIDATES] fp32, written
    chunk_token_ptr,  # [M, K, NUM_CANDIDATES] int32, written
    vocab_size,  # D
    logits_slice_stride,  # elements from a slice of logits to the next
    NUM_CANDIDATES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M, K)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot_ptr + row)
    if slot >= 0:
        column = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
        in_vocab = column < vocab_size
        slice_ptr = logits_ptr + row.to(tl.int64) * vocab_size + column
        scores = tl.load(slice_ptr, mask=in_vocab, other=-float("inf")).to(tl.float32)
        for index in tl.static_range(1, NUM_SLICES):
            scores += tl.load(slice_ptr + index * logits_slice_stride, mask=in_vocab, other=0.0)

        token_ids = tl.load(target_ids_ptr + column, mask=in_vocab, other=LAST_ID)
        temperature = tl.load(temperature_ptr + slot)
        inverse = 1.0
        if temperature > 0:
            position = tl.load(row_position_ptr + row) + 1
            scores += temperature * _noise(tl.load(seed_ptr + slot), position, token_ids)
            inverse = 1.0 / tl.maximum(temperature, LEAST_TEMPERATURE)

        cell = row * tl.num_programs(1) + chunk
        best = tl.max(scores, 0)
        tl.store(chunk_max_ptr + cell, best)
        tl.store(chunk_sum_ptr + cell, tl.sum(tl.exp((scores - best) * inverse), 0))
        for rank in range(NUM_CANDIDATES):
            value, token = arg_max(scores, token_ids)
            tl.store(chunk_value_ptr + cell * NUM_CANDIDATES + rank, value)
            tl.store(chunk_token_ptr + cell * NUM_CANDIDATES + rank, token)
            scores = tl.where(token_ids == token, -float("inf"), scores)


@kernel
def _merge_chunks(
    chunk_max_ptr,  # [M, K] fp32
    chunk_sum_ptr,  # [M, K] fp32
    chunk_value_ptr,  # [M, K, NUM_CANDIDATES] fp32
    chunk_token_ptr,  # [M, K, NUM_CANDIDATES] int32
    row_slot_ptr,  # [M] int32
    temperature_ptr,  # [S] fp32
    token_ptr,  # [M, NUM_CANDIDATES] int32, written
    logprob_ptr,  # [M, NUM_CANDIDATES] fp32, written
    num_chunks,  # K
    NUM_CANDIDATES: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # K as a power of two
    PADDED_ENTRIES: tl.constexpr,  # K * NUM_CANDIDATES as a power of two
    PDL: tl.constexpr,
):
    """Grid (M,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot)
        inverse = 1.0
        if temperature > 0:
            inverse = 1.0 / tl.maximum(temperature, LEAST_TEMPERATURE)
        chunk = tl.arange(0, PADDED_CHUNKS)
        is_chunk = chunk < num_chunks
        maxima = tl.load(chunk_max_ptr + row * num_chunks + chunk, mask=is_chunk, other=-float("inf"))
        sums = tl.load(chunk_sum_ptr + row * num_chunks + chunk, mask=is_chunk, other=0.0)
        best = tl.max(maxima, 0)
        log_sum = tl.log(tl.sum(sums * tl.exp((maxima - best) * inverse), 0))
        entry = tl.arange(0, PADDED_ENTRIES)
        is_entry = entry < num_chunks * NUM_CANDIDATES
        first = row * num_chunks * NUM_CANDIDATES
        values = tl.load(chunk_value_ptr + first + entry, mask=is_entry, other=-float("inf"))
        tokens = tl.load(chunk_token_ptr + first + entry, mask=is_entry, other=LAST_ID)
        for rank in range(NUM_CANDIDATES):
            value, token = arg_max(values, tokens)
            tl.store(token_ptr + row * NUM_CANDIDATES + rank, token)
            tl.store(logprob_ptr + row * NUM_CANDIDATES + rank, (value - best) * inverse - log_sum)
            values = tl.where(tokens == token, -float("inf"), values)


def rank_candidates(
    logits: Tensor,
    target_ids: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    temperature: Tensor,
    seed: Tensor,
    buffers: CandidateBuffers,
) -> None:
    """Write the best tokens after rows [M], and the logarithms of their probabilities, to `buffers`.

    logits: over the draft's vocabulary: [M, D] in the storage type, or fp32 partial sums [num_slices, M, D],
    added in order. target_ids [D] int32, ascending: the target's id of each of the draft's. row_slot,
    row_position [M] int32: slot (-1: nothing is written) and position of each row's token. temperature [S]
    fp32, seed [S] int64.

    Raises ValueError for another shape or type.
    """
    num_rows, vocab_size = logits.shape[-2:]
    num_slices = logits.shape[0] if logits.dim() == 3 else 1
    num_chunks, num_candidates = num_draft_chunks(vocab_size), buffers.token.shape[1]
    check_range("num_candidates", num_candidates, 1, min(MAX_CANDIDATES, vocab_size))
    check_tensor("logits", logits, logits.shape, torch.float32 if logits.dim() == 3 else logits.dtype)
    check_tensor("target_ids", target_ids, (vocab_size,), torch.int32)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("temperature", temperature, temperature.shape, torch.float32)
    check_tensor("seed", seed, temperature.shape, torch.int64)
    by_rank, by_chunk = (num_rows, num_candidates), (num_rows, num_chunks)
    check_tensor("token", buffers.token, by_rank, torch.int32)
    check_tensor("logprob", buffers.logprob, by_rank, torch.float32)
    check_tensors(by_chunk, torch.float32, chunk_max=buffers.chunk_max, chunk_sum=buffers.chunk_sum)
    check_tensor("chunk_value", buffers.chunk_value, (*by_chunk, num_candidates), torch.float32)
    check_tensor("chunk_token", buffers.chunk_token, (*by_chunk, num_candidates), torch.int32)
    _rank_chunks[(num_rows, num_chunks)](
        logits,
        target_ids,
        row_slot,
        row_position,
        temperature,
        seed,
        buffers.chunk_max,
        buffers.chunk_sum,
        buffers.chunk_value,
        buffers.chunk_token,
        vocab_size,
        logits.stride(0) if logits.dim() == 3 else 0,
        NUM_CANDIDATES=num_candidates,
        NUM_SLICES=num_slices,
        CHUNK_TOKENS=CHUNK_TOKENS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
    _merge_chunks[(num_rows,)](
        buffers.chunk_max,
        buffers.chunk_sum,
        buffers.chunk_value,
        buffers.chunk_token,
        row_slot,
        temperature,
        buffers.token,
        buffers.logprob,
        num_chunks,
        NUM_CANDIDATES=num_candidates,
        PADDED_CHUNKS=next_power_of_2(num_chunks),
        PADDED_ENTRIES=next_power_of_2(num_chunks * num_candidates),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


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
