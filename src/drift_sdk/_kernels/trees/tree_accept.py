"""The commit of a round of trees: drafts are accepted along a path, tokens appended, slots ended.

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
from drift_sdk._kernels.launch.arguments import check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.logits import PENALTIES
from drift_sdk._kernels.slots import entry_after
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

NO_NODE = tl.constexpr(2**31 - 1)
"""Larger than the number of any node."""


def tree_record_words(num_trees: int) -> int:
    """Words of the results of a round of so many trees."""
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
    """Advance the slots of trees by what was chosen behind their nodes, and record it for the host.

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
