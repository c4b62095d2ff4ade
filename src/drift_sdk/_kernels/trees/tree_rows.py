"""Rows of trees of drafts: roots and nodes, the commit of a round along accepted paths, and the paths' rows.

The rows of nodes: ancestors as bits, positions, paths, and where keys and values are stored.

A tree has T rows, its nodes; row 0 is the root, the sequence's newest token. A parent has a lower number than
its children. The first path leads from the root by the lowest child of each node.

    position[n]  = position[root] + depth[n]
    bits[n]      = sum of 2**a over n and its ancestors a
    path[n, d]   = the ancestor of n at depth d, n itself at its own depth; -1 behind it
    kv_slot[n]   = the cache slot of position[n] in the sequence's blocks for the first path, else
                   first_tree_slot + b * T + n for tree b of the step

So keys and values of a chain lie at their places from the start, and the other nodes of a tree take no blocks
of the sequence.

Grid: one program a tree, which owns its T rows. Parents are followed by loads, at most MAX_PATH times. Bytes:
8 a row in, and again 4 for each step up, from L1; 12 + 4 * (MAX_PATH + 1) a row out. Integers only.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.

The roots of a round's trees and the limits of their growth: the first kernel of a round of trees.

A tree has T rows, its nodes. Row 0 is the slot's newest token; the other rows have slot -1 until a draft
grows into them. A tree may have as many drafts as the plan says, and paths no longer than leave room for a
token behind the last draft. That of a slot under a constraint is a chain.

The draft computes some nodes of its own, in cache slots behind the blocks. Its list of nodes begins with the
root, whose keys and values lie in the slot's blocks.

Grid: (trees,). A program owns the rows of its tree and its list. Bytes: 28 a slot in, 16 a row and 8 for each
node of the draft out.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.

The rows of accepted paths: what a draft computes after a round of trees, and the hidden states for it.

Row e of a tree's path is that of its node of depth e, as far as a token was emitted behind it. As in
draft_rows.py, the row that pairs the feature of position p with the token of position p + 1 has position
p + 1.

`_path_rows`, grid (trees,): a program owns the rows of a path. `_gather_hidden`, grid (rows,): a program
copies a row. Bytes: 16 a row of a path in, 16 out; a row of hidden states in and out.

Programmatic dependent launch: both wait for their producers before their first read and, being short, let
their dependents start right after that.

The commit of a round of trees: drafts are accepted along a path, tokens appended, slots ended.

A slot's rows are the nodes of a tree. The token chosen behind the root is always emitted. The walk goes on at
the lowest child whose draft is that token, and emits the token chosen behind it; and so on, until no child
has the token, a stop id or the length limit.

Grid: one program a slot of the step, which owns the slot's row of the tables, its record and all of its rows.
Program 0 also moves the ring's index on to the next replay's entry. Bytes: 56 a slot, 20 a row and, for each
token emitted, 8 with penalties and 328 with log-probabilities. Everything computed is an integer;
log-probabilities are copied bit by bit. The record is that of `commit` with PATH_ENTRIES rows a slot, in the
order of the path. Behind all records, each slot has PATH_ENTRIES words: the nodes that tokens were emitted
behind, then -1.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.

The keys and values of accepted nodes, moved to their positions in all layers.

    cache[slot of position[root] + d] = cache[kv_slot[path[d]]]   for the nodes path[d] of each accepted path

Rows of rejected nodes are left as they are: no later row reads them before they are overwritten. A node whose
row lies at its position already is not moved, so nothing is moved for a chain.

Grid: (trees, layers times KV heads). A program owns the rows of one tree in one head of one layer. It reads
all of them before it writes any, so sources and targets of a tree may overlap; those of different trees may
not. Bytes: keys and values of the moved rows, read and written once.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.cache import cache_words
from drift_sdk._kernels.commit import (
    HEADER_SIZE,
    ROW_SIZE,
    CommitTensors,
    append_token,
    find_record,
    finish_of,
    is_stop_token,
    record_words,
    write_empty_record,
    write_slot,
)
from drift_sdk._kernels.launch.arguments import (
    check_range,
    check_rows,
    check_tensor,
    check_tensors,
    next_power_of_2,
)
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.norm import norm_warps
from drift_sdk._kernels.sampling.logits import PENALTIES
from drift_sdk._kernels.slots import CONSTRAINT, SlotState, entry_after
from drift_sdk.trees import MAX_PATH_LENGTH, MAX_TREE_NODES

PATH_ENTRIES = MAX_PATH_LENGTH + 1
"""Nodes of the longest path, the root included."""
NO_NODE = tl.constexpr(2**31 - 1)
"""Larger than the number of any node."""

TreeRowTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Position, ancestor bits, KV slot and path of each row."""


@kernel
def _tree_rows(
    row_slot_ptr,  # [R] int32; -1: no node
    row_parent_ptr,  # [R] int32: number of the parent in its tree; -1: the root
    length_ptr,  # [S] int32: tokens of each slot
    block_table_ptr,  # [S, max_blocks] int32
    row_position_ptr,  # [R] int32, written
    row_bits_ptr,  # [R] int64, written
    row_kv_slot_ptr,  # [R] int64, written
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32, written
    max_blocks,
    first_tree_slot,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_NODES: tl.constexpr,  # T
    PADDED_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    node = tl.arange(0, PADDED_NODES)
    in_tree = node < NUM_NODES
    row = tree * NUM_NODES + node
    slot = tl.load(row_slot_ptr + tree * NUM_NODES)
    if slot >= 0:
        is_node = tl.load(row_slot_ptr + row, mask=in_tree, other=-1) >= 0
        parent = tl.load(row_parent_ptr + row, mask=is_node, other=-2)
        bits = tl.zeros((PADDED_NODES,), tl.int64)
        depth = tl.zeros((PADDED_NODES,), tl.int32) - 1
        ancestor = tl.where(is_node, node, -1)
        for _ in tl.static_range(NUM_PATH_ENTRIES):
            is_ancestor = ancestor >= 0
            depth += is_ancestor.to(tl.int32)
            shift = tl.where(is_ancestor, ancestor, 0).to(tl.int64)
            bits |= is_ancestor.to(tl.int64) << shift
            ancestor = tl.load(row_parent_ptr + tree * NUM_NODES + ancestor, mask=is_ancestor, other=-1)

        ancestor = tl.where(is_node, node, -1)
        first = tl.full((), 0, tl.int32)
        on_first_path = node == 0
        for step in tl.static_range(NUM_PATH_ENTRIES):
            is_ancestor = ancestor >= 0
            path_ptrs = row_path_ptr + row * NUM_PATH_ENTRIES
            tl.store(path_ptrs + depth - step, ancestor, mask=is_ancestor)
            # Entries behind the node's own.
            tl.store(path_ptrs + depth + 1 + step, -1, mask=in_tree & (depth + 1 + step < NUM_PATH_ENTRIES))
            ancestor = tl.load(row_parent_ptr + tree * NUM_NODES + ancestor, mask=is_ancestor, other=-1)
            first = tl.min(tl.where(parent == first, node, NO_NODE), 0)
            on_first_path |= node == first

        position = tl.load(length_ptr + slot) - 1 + depth
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        on_first_path &= is_node
        block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=on_first_path, other=0).to(tl.int64)
        own_slot = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        tree_slot = first_tree_slot + row.to(tl.int64)
        tl.store(row_position_ptr + row, position, mask=is_node)
        tl.store(row_bits_ptr + row, bits, mask=in_tree)
        tl.store(row_kv_slot_ptr + row, tl.where(on_first_path, own_slot, tree_slot), mask=is_node)


def tree_rows(
    row_slot: Tensor,
    row_parent: Tensor,
    length: Tensor,
    block_table: Tensor,
    out: TreeRowTensors,
    *,
    nodes_per_tree: int,
    block_size: int,
    first_tree_slot: int,
) -> None:
    """Write positions, ancestor bits, KV slots and paths of the nodes of B trees with T rows each.

    row_slot, row_parent [B * T] int32: the slot of each node (-1: no node; a tree without a root is padding),
    and the number of its parent in the tree, lower than its own; -1 for the root. length [S] int32: tokens of
    each slot. block_table [S, max_blocks] int32.
    out: position [B * T] int32, bits [B * T] int64, kv_slot [B * T] int64 and path [B * T, PATH_ENTRIES]
    int32. Rows without a node get bits of 0 and paths of -1, and nothing else; those of padding get nothing.
    nodes_per_tree: T, at most MAX_TREE_NODES. first_tree_slot: of the cache's slots, the first of B * T for
    nodes that are not on a first path.

    Raises ValueError for another shape or type. A path of more than PATH_ENTRIES nodes is cut.
    """
    (num_rows,) = row_slot.shape
    check_range("nodes_per_tree", nodes_per_tree, 1, MAX_TREE_NODES)
    if num_rows % nodes_per_tree:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {nodes_per_tree}")

    position, bits, kv_slot, path = out
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_parent=row_parent, position=position)
    check_tensors((num_rows,), torch.int64, bits=bits, kv_slot=kv_slot)
    check_tensor("path", path, (num_rows, PATH_ENTRIES), torch.int32)
    check_tensor("length", length, length.shape, torch.int32)
    check_tensor("block_table", block_table, (length.shape[0], block_table.shape[1]), torch.int32)
    _tree_rows[(num_rows // nodes_per_tree,)](
        row_slot,
        row_parent,
        length,
        block_table,
        *out,
        block_table.shape[1],
        first_tree_slot,
        KV_BLOCK_SIZE=block_size,
        NUM_NODES=nodes_per_tree,
        PADDED_NODES=next_power_of_2(nodes_per_tree),
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(),
        num_warps=2,
        **launch_options(),
    )


LIMIT_WORDS = 3
"""Words of a tree's limits: most drafts, most drafts on a path, and whether it must be a chain."""


class RootTensors(Struct, frozen=True):
    """The rows of B trees of T nodes, int32 [B * T] each, and what their growth starts from.

    slot (-1: no node), token, position, parent (number of a node in its tree; -1 for roots). Positions of
    drafts are not written by `tree_roots`. root_slot, root_position [B] int32: those of the roots alone.
    limits [B, LIMIT_WORDS] int32. draft_kv_slot [B * N] int64: cache slots of the nodes that the draft
    computes, the root being the first.
    """

    slot: Tensor
    token: Tensor
    position: Tensor
    parent: Tensor
    root_slot: Tensor
    root_position: Tensor
    limits: Tensor
    draft_kv_slot: Tensor


@kernel
def _tree_roots(
    slots_ptr,  # [B] int32; -1: none
    max_drafts_ptr,  # [B] int32
    length_ptr,  # [S] int32
    last_token_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    max_length_ptr,  # [S] int32
    flags_ptr,  # [S] int32
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32, written
    row_token_ptr,  # [R] int32, written
    row_position_ptr,  # [R] int32, written for roots
    row_parent_ptr,  # [R] int32, written
    root_slot_ptr,  # [B] int32, written
    root_position_ptr,  # [B] int32, written
    limits_ptr,  # [B, LIMIT_WORDS] int32, written
    draft_kv_slot_ptr,  # [B * NUM_DRAFT_NODES] int64, written
    max_blocks,
    first_draft_slot,
    max_depth,
    NUM_NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    NUM_DRAFT_NODES: tl.constexpr,
    PADDED_DRAFT_NODES: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    LIMIT_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    slot = tl.load(slots_ptr + tree)
    is_live = slot >= 0
    is_live &= tl.load(finish_ptr + slot, mask=is_live, other=1) == 0
    num_tokens = tl.load(length_ptr + slot, mask=is_live, other=1)
    token = tl.load(last_token_ptr + slot, mask=is_live, other=-1)
    room = tl.load(max_length_ptr + slot, mask=is_live, other=0) - num_tokens - 1
    depth = tl.maximum(tl.minimum(max_depth, room), 0)
    num_drafts = tl.where(depth > 0, tl.load(max_drafts_ptr + tree, mask=is_live, other=0), 0)
    flags = tl.load(flags_ptr + slot, mask=is_live, other=0)
    tl.store(limits_ptr + tree * LIMIT_WORDS, num_drafts)
    tl.store(limits_ptr + tree * LIMIT_WORDS + 1, depth)
    tl.store(limits_ptr + tree * LIMIT_WORDS + 2, ((flags & CONSTRAINT) != 0).to(tl.int32))
    node = tl.arange(0, PADDED_NODES)
    row = tree * NUM_NODES + node
    in_tree = node < NUM_NODES
    tl.store(row_slot_ptr + row, tl.where(node == 0, tl.where(is_live, slot, -1), -1), mask=in_tree)
    tl.store(row_token_ptr + row, tl.where(node == 0, token, -1), mask=in_tree)
    tl.store(row_parent_ptr + row, tl.where(node == 0, -1, 0), mask=in_tree)
    tl.store(row_position_ptr + tree * NUM_NODES, num_tokens - 1)
    tl.store(root_slot_ptr + tree, tl.where(is_live, slot, -1))
    tl.store(root_position_ptr + tree, num_tokens - 1)
    position = num_tokens - 1
    table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
    block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=is_live, other=0).to(tl.int64)
    own_slot = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
    draft = tl.arange(0, PADDED_DRAFT_NODES)
    place = first_draft_slot + (tree * NUM_DRAFT_NODES + draft).to(tl.int64)
    kv_slot = tl.where(draft == 0, own_slot, place)
    tl.store(draft_kv_slot_ptr + tree * NUM_DRAFT_NODES + draft, kv_slot, mask=draft < NUM_DRAFT_NODES)


def tree_roots(
    slots: Tensor,
    max_drafts: Tensor,
    state: SlotState,
    flags: Tensor,
    block_table: Tensor,
    out: RootTensors,
    *,
    max_depth: int,
    block_size: int,
    first_draft_slot: int,
) -> None:
    """Write the roots of the trees of slots [B] (-1: none), and the limits of their growth.

    max_drafts [B]: most drafts of each. flags [S]: a `SlotFlag`. block_table [S, max_blocks]. All int32. A
    slot that has finished gets no root. max_depth: most drafts on a path. first_draft_slot: of the draft's
    cache slots, the first of B * N for its nodes.

    Raises ValueError for another shape or type.
    """
    (num_trees,), (num_rows,) = slots.shape, out.slot.shape
    if num_rows % num_trees or out.draft_kv_slot.shape[0] % num_trees:
        raise ValueError(f"out: {num_rows} rows: expected a multiple of {num_trees}, as of draft_kv_slot")

    check_tensors((num_trees,), torch.int32, slots=slots, max_drafts=max_drafts)
    state.check()
    check_tensor("flags", flags, state.length.shape, torch.int32)
    check_tensor("block_table", block_table, (len(flags), block_table.shape[1]), torch.int32)
    for name in ("slot", "token", "position", "parent"):
        check_tensor(name, getattr(out, name), (num_rows,), torch.int32)
    check_tensors((num_trees,), torch.int32, root_slot=out.root_slot, root_position=out.root_position)
    check_tensor("limits", out.limits, (num_trees, LIMIT_WORDS), torch.int32)
    check_tensor("draft_kv_slot", out.draft_kv_slot, out.draft_kv_slot.shape, torch.int64)
    nodes, draft_nodes = num_rows // num_trees, out.draft_kv_slot.shape[0] // num_trees
    _tree_roots[(num_trees,)](
        slots,
        max_drafts,
        state.length,
        state.last_token,
        state.finish,
        state.max_length,
        flags,
        block_table,
        out.slot,
        out.token,
        out.position,
        out.parent,
        out.root_slot,
        out.root_position,
        out.limits,
        out.draft_kv_slot,
        block_table.shape[1],
        first_draft_slot,
        max_depth,
        NUM_NODES=nodes,
        PADDED_NODES=next_power_of_2(nodes),
        NUM_DRAFT_NODES=draft_nodes,
        PADDED_DRAFT_NODES=next_power_of_2(draft_nodes),
        KV_BLOCK_SIZE=block_size,
        LIMIT_WORDS=LIMIT_WORDS,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


@kernel
def _path_rows(
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    chosen_ptr,  # [R] int32
    path_ptr,  # [B, NUM_PATH_ENTRIES] int32
    draft_slot_ptr,  # [B * NUM_ROWS] int32, written
    draft_token_ptr,  # likewise
    draft_position_ptr,
    source_ptr,
    NUM_NODES: tl.constexpr,
    NUM_ROWS: tl.constexpr,  # of a path
    PADDED_ROWS: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    entry = tl.arange(0, PADDED_ROWS)
    is_entry = entry < NUM_ROWS
    node = tl.load(path_ptr + tree * NUM_PATH_ENTRIES + entry, mask=is_entry, other=-1)
    is_live = node >= 0
    row = tree * NUM_NODES + node
    slot = tl.load(row_slot_ptr + row, mask=is_live, other=-1)
    token = tl.load(chosen_ptr + row, mask=is_live, other=-1)
    position = tl.load(row_position_ptr + row, mask=is_live, other=-1)
    place = tree * NUM_ROWS + entry
    tl.store(draft_slot_ptr + place, tl.where(token < 0, -1, slot), mask=is_entry)
    tl.store(draft_token_ptr + place, token, mask=is_entry)
    tl.store(draft_position_ptr + place, position + 1, mask=is_entry)
    tl.store(source_ptr + place, tl.where(is_live, row, -1), mask=is_entry)


@kernel
def _gather_hidden(
    source_ptr,  # [M] int32; -1: none
    hidden_ptr,  # [N, SIZE]
    out_ptr,  # [M, SIZE], written
    hidden_stride,
    out_stride,
    SIZE: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,  # SIZE as a power of two
    PDL: tl.constexpr,
):
    """Grid (M,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + row).to(tl.int64)
    column = tl.arange(0, PADDED_COLUMNS)
    is_loaded = column < tl.where(source >= 0, SIZE, 0)
    values = tl.load(hidden_ptr + source * hidden_stride + column, mask=is_loaded, other=0.0)
    tl.store(out_ptr + row * out_stride + column, values, mask=column < SIZE)


def path_rows(
    row_slot: Tensor,
    row_position: Tensor,
    chosen: Tensor,
    path: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    nodes_per_tree: int,
) -> None:
    """Write the rows (slot, token, position, source) [B * E] that a draft computes of the paths of B trees.

    row_slot, row_position [B * T]: of the round's rows. chosen [B * T]: the token behind each row. path [B,
    PATH_ENTRIES]: as of `tree_accept`; of a path the first E entries, which are all that are not -1. out,
    written: the token is the chosen one, the position that of this token, the source the round's row; slot
    and source are -1 behind the path. All int32. Raises ValueError for another shape or type.
    """
    num_trees = path.shape[0]
    num_rows = out[0].shape[0] // num_trees
    check_range("rows of a path", num_rows, 1, PATH_ENTRIES)
    check_tensors(
        (num_trees * nodes_per_tree,),
        torch.int32,
        row_slot=row_slot,
        row_position=row_position,
        chosen=chosen,
    )
    check_tensor("path", path, (num_trees, PATH_ENTRIES), torch.int32)
    for name, tensor in zip(("slot", "token", "position", "source"), out, strict=True):
        check_tensor(name, tensor, (num_trees * num_rows,), torch.int32)
    _path_rows[(num_trees,)](
        row_slot,
        row_position,
        chosen,
        path,
        *out,
        NUM_NODES=nodes_per_tree,
        NUM_ROWS=num_rows,
        PADDED_ROWS=next_power_of_2(num_rows),
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def gather_hidden(source: Tensor, hidden: Tensor, out: Tensor) -> None:
    """out[m] = hidden[source[m]], zeros where source is -1.

    source [M] int32. hidden [N, H], out [M, H] of one type; their rows may have any stride. Raises ValueError
    for another shape or type.
    """
    (num_rows,), size = source.shape, hidden.shape[1]
    check_tensor("source", source, (num_rows,), torch.int32)
    check_rows("hidden", hidden, hidden.shape, out.dtype)
    check_rows("out", out, (num_rows, size), out.dtype)
    _gather_hidden[(num_rows,)](
        source,
        hidden,
        out,
        hidden.stride(0),
        out.stride(0),
        SIZE=size,
        PADDED_COLUMNS=next_power_of_2(size),
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


def tree_record_words(num_trees: int) -> int:
    """Words of the results of a round."""
    return num_trees * (record_words(PATH_ENTRIES) + PATH_ENTRIES)


@kernel
def _tree_accept(
    # The rows of the step, and what was chosen behind them.
    row_slot_ptr,  # [R] int32
    row_parent_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    chosen_ptr,  # [R] int32
    chosen_logprob_ptr,  # [R] fp32
    top_token_ptr,  # [R, MAX_TOP] int32
    top_logprob_ptr,  # [R, MAX_TOP] fp32
    # The slots.
    length_ptr,  # [S] int32, read and written
    last_token_ptr,  # [S] int32, written
    finish_ptr,  # [S] int32, written
    max_length_ptr,  # [S] int32
    flags_ptr,  # [S] int32
    num_logprobs_ptr,  # [S] int32
    stop_bits_ptr,  # [S, W] int32
    counts_ptr,  # [S, V] int32, counted up
    is_ngram_ptr,  # [B] int32, or None
    # The results.
    path_ptr,  # [B, NUM_PATH_ENTRIES] int32, written
    emitted_ptr,  # [B] int32, written
    output_ring_ptr,  # [num_entries, entry_words] int32, pinned, written
    current_entry_ptr,  # [1] int32
    next_entry_ptr,  # [1] int32, read and written
    # Sizes.
    num_entries,
    entry_words,
    vocab_size,  # V
    num_words,  # W
    NUM_NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PADDED_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,): a program a slot of the step. Longer than other kernels by its lists of arguments."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    first_row = tree * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    record_ptr = find_record(output_ring_ptr, current_entry_ptr, tree, entry_words, NUM_PATH_ENTRIES)
    own_path_ptr = path_ptr + tree * NUM_PATH_ENTRIES
    record_size: tl.constexpr = HEADER_SIZE + NUM_PATH_ENTRIES * ROW_SIZE
    nodes_ptr = record_ptr + (tl.num_programs(0) - tree) * record_size + tree * NUM_PATH_ENTRIES
    if tree == 0:
        tl.store(next_entry_ptr, entry_after(tl.load(next_entry_ptr), num_entries))
    if slot < 0:
        write_empty_record(record_ptr, emitted_ptr + tree)
        entry = tl.arange(0, PADDED_ENTRIES)
        tl.store(own_path_ptr + entry, -1, mask=entry < NUM_PATH_ENTRIES)
        tl.store(nodes_ptr + entry, -1, mask=entry < NUM_PATH_ENTRIES)
    else:
        # Of all nodes at once: a load takes longer than a step of the walk.
        node = tl.arange(0, PADDED_NODES)
        in_tree = node < NUM_NODES
        is_live = tl.load(row_slot_ptr + first_row + node, mask=in_tree, other=-1) >= 0
        is_draft = is_live & (node > 0)
        parent = tl.load(row_parent_ptr + first_row + node, mask=is_draft, other=-1)
        draft = tl.load(row_token_ptr + first_row + node, mask=is_draft, other=-1)
        chosen = tl.load(chosen_ptr + first_row + node, mask=is_live, other=0)
        is_stop = is_stop_token(chosen, is_live, stop_bits_ptr + slot.to(tl.int64) * num_words)
        slot_counts_ptr = counts_ptr + slot.to(tl.int64) * vocab_size
        start = tl.load(length_ptr + slot)
        max_length = tl.load(max_length_ptr + slot)
        is_counted = (tl.load(flags_ptr + slot) & PENALTIES) != 0
        has_logprobs = tl.load(num_logprobs_ptr + slot) >= 0
        # Changed in the loop, so tensors of `start`'s type from the beginning.
        num_tokens = start * 0
        num_accepted = start * 0
        finish = start * 0
        newest = start * 0
        current = start * 0
        entry = tl.arange(0, PADDED_ENTRIES)
        path = entry * 0 - 1
        is_walking = start >= 0
        while is_walking:
            path = tl.where(entry == num_tokens, current, path)
            is_current = node == current
            newest = tl.sum(tl.where(is_current, chosen, 0), 0)
            ends = tl.sum((is_current & is_stop).to(tl.int32), 0) > 0
            append_token(
                newest, first_row + current, is_counted, has_logprobs, slot_counts_ptr, chosen_logprob_ptr,
                top_token_ptr, top_logprob_ptr, record_ptr + HEADER_SIZE + num_tokens * ROW_SIZE,
            )  # fmt: skip
            num_tokens += 1
            finish = finish_of(ends, start + num_tokens, max_length)
            is_match = is_draft & (parent == current) & (draft == newest)
            child = tl.min(tl.where(is_match, node, NO_NODE), 0)
            is_right = child < NO_NODE
            num_accepted += is_right.to(tl.int32)
            current = child
            is_walking = is_right & (finish == 0) & (num_tokens < NUM_PATH_ENTRIES)

        in_path = entry < NUM_PATH_ENTRIES
        tl.store(own_path_ptr + entry, path, mask=in_path)
        tl.store(nodes_ptr + entry, path, mask=in_path)
        write_slot(
            length_ptr + slot,
            last_token_ptr + slot,
            finish_ptr + slot,
            emitted_ptr + tree,
            record_ptr,
            start + num_tokens,
            newest,
            finish,
            num_tokens,
            tl.sum(is_draft.to(tl.int32), 0),
            num_accepted,
            num_tokens * 0 if is_ngram_ptr is None else tl.load(is_ngram_ptr + tree),
        )


def tree_accept(tensors: CommitTensors, row_parent: Tensor, path: Tensor) -> None:
    """Advance the slots of trees by the tokens chosen behind their nodes, and record them for the host.

    tensors: rows are the nodes of B trees, T of each, as of `tree_rows`; the records of slots have
    PATH_ENTRIES rows, and are followed by paths. row_parent [B * T] int32: of each node. No path has more
    than PATH_ENTRIES nodes. path [B, PATH_ENTRIES] int32, written: the nodes that tokens were emitted behind,
    then -1.

    Raises ValueError for another shape or type.
    """
    num_slots, num_nodes = tensors.num_slots, tensors.rows_per_slot
    arguments = tensors.kernel_arguments(tree_record_words(num_slots))
    check_tensor("row_parent", row_parent, tensors.row_slot.shape, torch.int32)
    check_tensor("path", path, (num_slots, PATH_ENTRIES), torch.int32)
    _tree_accept[(num_slots,)](
        **arguments,
        row_parent_ptr=row_parent,
        path_ptr=path,
        NUM_NODES=num_nodes,
        PADDED_NODES=next_power_of_2(num_nodes),
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PADDED_ENTRIES=next_power_of_2(PATH_ENTRIES),
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


@kernel
def _kv_rewind(
    keys_ptr,  # [L, num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, HEAD_DIM], of any type, read and written
    values_ptr,  # as keys
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    row_kv_slot_ptr,  # [R] int64
    path_ptr,  # [B, NUM_PATH_ENTRIES] int32
    layer_stride,  # elements from a layer of the cache to the next
    max_blocks,
    NUM_NODES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PADDED_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, L * NUM_KV_HEADS)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    layer, head = tl.program_id(1) // NUM_KV_HEADS, tl.program_id(1) % NUM_KV_HEADS
    first_row = tree * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    if slot >= 0:
        entry = tl.arange(0, PADDED_ENTRIES)
        in_path = entry < NUM_PATH_ENTRIES
        node = tl.load(path_ptr + tree * NUM_PATH_ENTRIES + entry, mask=in_path, other=-1)
        is_kept = node >= 0
        source = tl.load(row_kv_slot_ptr + first_row + node, mask=is_kept, other=0)
        position = tl.load(row_position_ptr + first_row) + entry
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=is_kept, other=0).to(tl.int64)
        target = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        is_moved = is_kept & (source != target)
        dim = tl.arange(0, PADDED_DIM)
        mask = is_moved[:, None] & (dim < HEAD_DIM)[None, :]
        first_offset = layer.to(tl.int64) * layer_stride + dim[None, :]
        from_row = (source // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + source % KV_BLOCK_SIZE
        to_row = (block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        from_offset = first_offset + from_row[:, None] * HEAD_DIM
        to_offset = first_offset + to_row[:, None] * HEAD_DIM
        keys = tl.load(keys_ptr + from_offset, mask=mask, other=0)
        values = tl.load(values_ptr + from_offset, mask=mask, other=0)
        tl.debug_barrier()  # no thread writes before all have read
        tl.store(keys_ptr + to_offset, keys, mask=mask)
        tl.store(values_ptr + to_offset, values, mask=mask)


def kv_rewind(
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_kv_slot: Tensor,
    path: Tensor,
    *,
    nodes_per_tree: int,
) -> None:
    """Move the keys and values of accepted nodes to their positions.

    keys, values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim], of any type. block_table [S,
    max_blocks] int32. row_slot, row_position [B * T] int32 and row_kv_slot [B * T] int64: as of `tree_rows`.
    path [B, PATH_ENTRIES] int32: as of `tree_accept`. All contiguous.

    Raises ValueError for another shape, type or layout.
    """
    keys, values = cache_words(keys), cache_words(values)
    num_layers, _, num_kv_heads, block_size, head_dim = keys.shape
    num_trees, num_rows = path.shape[0], path.shape[0] * nodes_per_tree
    check_tensors(keys.shape, keys.dtype, keys=keys, values=values)
    check_tensor("block_table", block_table, block_table.shape, torch.int32)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("row_kv_slot", row_kv_slot, (num_rows,), torch.int64)
    check_tensor("path", path, (num_trees, PATH_ENTRIES), torch.int32)
    _kv_rewind[(num_trees, num_layers * num_kv_heads)](
        keys,
        values,
        block_table,
        row_slot,
        row_position,
        row_kv_slot,
        path,
        keys.stride(0),
        block_table.shape[1],
        NUM_NODES=nodes_per_tree,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_2(head_dim),
        KV_BLOCK_SIZE=block_size,
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PADDED_ENTRIES=next_power_of_2(PATH_ENTRIES),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
