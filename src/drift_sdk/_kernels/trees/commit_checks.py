"""Checks of what a round of trees has accepted, and of where its keys and values lie; see round_checks.py.

`_check_acceptance`, grid (trees,), after the commit, finds wrong acceptance and lengths. `_check_cache`, grid
(trees, layers times KV heads), after rewinding, finds rows that were not moved to their positions. It also
overwrites the keys and values of rejected nodes with NaN, so that a row which reads them is not finite. Codes
of e4m3 are overwritten too, with that of NaN; but attention takes it for the number 480.

Programmatic dependent launch: both wait for their producers before their first read and let their dependents
start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.e4m3 import cache_words
from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.trees.round_checks import NOTHING, check_rows, set_flag
from drift_sdk._kernels.trees.tree_roots import RootTensors
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["check_acceptance", "check_cache"]

ACCEPTANCE, LENGTH, KV = (tl.constexpr(6 + each) for each in range(3))
"""Places in `REASONS`, counted from 1."""

TWO_NANS = tl.constexpr(0x7F7F)
"""A word of two codes of e4m3 that are NaN."""


@kernel
def _check_acceptance(
    row_slot_ptr,  # [R] int32
    row_parent_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    chosen_ptr,  # [R] int32
    path_ptr,  # [B, NUM_PATH_ENTRIES] int32
    emitted_ptr,  # [B] int32
    length_ptr,  # [S] int32
    last_token_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    flag_ptr,  # [B] int32, read and written
    NUM_NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    first_row = tree * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    if slot >= 0:
        emitted = tl.load(emitted_ptr + tree)
        wrong = slot * 0 + NOTHING
        current = slot * 0
        for depth in range(NUM_PATH_ENTRIES):
            node = tl.load(path_ptr + tree * NUM_PATH_ENTRIES + depth)
            is_listed = (node >= 0) & (node < NUM_NODES)
            is_right = is_listed == (depth < emitted)
            if is_listed & (depth > 0):
                parent = tl.load(row_parent_ptr + first_row + node)
                draft = tl.load(row_token_ptr + first_row + node)
                before = tl.load(chosen_ptr + first_row + current)
                is_right &= (parent == current) & (draft == before) & (node > 0)
            if is_listed & (depth == 0):
                is_right &= node == 0
            current = tl.where(is_listed, node, current)
            wrong = tl.minimum(wrong, tl.where(is_right, NOTHING, depth))
        each = tl.arange(0, PADDED_NODES)
        is_draft = (each > 0) & (each < NUM_NODES)
        is_draft &= tl.load(row_slot_ptr + first_row + each, mask=is_draft, other=-1) >= 0
        parents = tl.load(row_parent_ptr + first_row + each, mask=is_draft, other=-1)
        drafts = tl.load(row_token_ptr + first_row + each, mask=is_draft, other=-1)
        newest = tl.load(chosen_ptr + first_row + current)
        num_missed = tl.sum((is_draft & (parents == current) & (drafts == newest)).to(tl.int32), 0)
        is_ended = tl.load(finish_ptr + slot) != 0
        is_missed = (num_missed > 0) & (is_ended == 0)
        is_missed |= newest != tl.load(last_token_ptr + slot)
        if (wrong < NOTHING) | is_missed:
            set_flag(flag_ptr + tree, ACCEPTANCE, tl.minimum(wrong, NUM_PATH_ENTRIES))
        if tl.load(length_ptr + slot) != tl.load(row_position_ptr + first_row) + 1 + emitted:
            set_flag(flag_ptr + tree, LENGTH, emitted)


@kernel
def _check_cache(
    keys_ptr,  # [L, num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, HEAD_DIM], as words; read and written
    values_ptr,  # as keys
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    row_kv_slot_ptr,  # [R] int64
    path_ptr,  # [B, NUM_PATH_ENTRIES] int32
    flag_ptr,  # [B] int32, written
    layer_stride,
    max_blocks,
    NUM_NODES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
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
        dim = tl.arange(0, PADDED_DIM)
        is_dim = dim < HEAD_DIM
        root_position = tl.load(row_position_ptr + first_row)
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_offset = layer.to(tl.int64) * layer_stride + dim
        for depth in range(NUM_PATH_ENTRIES):
            node = tl.load(path_ptr + tree * NUM_PATH_ENTRIES + depth)
            if (node >= 0) & (node < NUM_NODES):
                source = tl.load(row_kv_slot_ptr + first_row + node)
                position = root_position + depth
                block = tl.load(table_ptr + position // KV_BLOCK_SIZE).to(tl.int64)
                from_row = (source // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE
                from_offset = first_offset + (from_row + source % KV_BLOCK_SIZE) * HEAD_DIM
                to_row = (block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
                to_offset = first_offset + to_row * HEAD_DIM
                key = tl.load(keys_ptr + from_offset, mask=is_dim, other=0).to(tl.float32)
                copied_key = tl.load(keys_ptr + to_offset, mask=is_dim, other=0).to(tl.float32)
                value = tl.load(values_ptr + from_offset, mask=is_dim, other=0).to(tl.float32)
                copied_value = tl.load(values_ptr + to_offset, mask=is_dim, other=0).to(tl.float32)
                is_wrong = (key != copied_key) | (value != copied_value)
                if tl.sum(is_wrong.to(tl.int32), 0) > 0:
                    set_flag(flag_ptr + tree, KV, node)
        tl.debug_barrier()  # rows are read before they are overwritten
        if keys_ptr.dtype.element_ty == tl.int16:
            nothing = tl.full((PADDED_DIM,), TWO_NANS, tl.int16)
        else:
            nothing = tl.full((PADDED_DIM,), float("nan"), tl.float32).to(keys_ptr.dtype.element_ty)
        for node in range(1, NUM_NODES):
            if tl.load(row_slot_ptr + first_row + node) >= 0:
                place = tl.load(row_kv_slot_ptr + first_row + node)
                is_kept = place < 0
                for depth in range(NUM_PATH_ENTRIES):
                    if tl.load(path_ptr + tree * NUM_PATH_ENTRIES + depth) >= 0:
                        position = root_position + depth
                        block = tl.load(table_ptr + position // KV_BLOCK_SIZE).to(tl.int64)
                        is_kept |= place == block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
                if is_kept == 0:
                    row = (place // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE
                    offset = first_offset + (row + place % KV_BLOCK_SIZE) * HEAD_DIM
                    tl.store(keys_ptr + offset, nothing, mask=is_dim)
                    tl.store(values_ptr + offset, nothing, mask=is_dim)


def check_acceptance(
    rows: RootTensors,
    chosen: Tensor,
    path: Tensor,
    emitted: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    flags: Tensor,
) -> None:
    """Check which nodes were accepted after `chosen` [R] int32, and the lengths of the slots.

    path [B, PATH_ENTRIES], emitted [B] int32: as of `tree_accept`. state: length, last_token and finish [S]
    int32 after the commit.
    """
    num_trees, nodes = check_rows(rows, flags)
    check_tensors((num_trees * nodes,), torch.int32, chosen=chosen)
    check_tensor("path", path, (num_trees, PATH_ENTRIES), torch.int32)
    check_tensors((num_trees,), torch.int32, emitted=emitted)
    _check_acceptance[(num_trees,)](
        rows.slot, rows.parent, rows.token, rows.position, chosen, path, emitted, *state, flags,
        NUM_NODES=nodes, PADDED_NODES=next_power_of_2(nodes), NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(), num_warps=2, **launch_options(),
    )  # fmt: skip


def check_cache(
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: RootTensors,
    kv_slot: Tensor,
    path: Tensor,
    flags: Tensor,
) -> None:
    """Check that keys and values of accepted nodes lie at their positions, in all layers, and overwrite those
    of rejected nodes. Arguments as of `kv_rewind`."""
    num_trees, nodes = check_rows(rows, flags)
    keys, values = cache_words(keys), cache_words(values)
    num_layers, _, num_kv_heads, block_size, head_dim = keys.shape
    check_tensors(keys.shape, keys.dtype, keys=keys, values=values)
    check_tensor("kv_slot", kv_slot, (num_trees * nodes,), torch.int64)
    check_tensor("path", path, (num_trees, PATH_ENTRIES), torch.int32)
    _check_cache[(num_trees, num_layers * num_kv_heads)](
        keys, values, block_table, rows.slot, rows.position, kv_slot, path, flags,
        keys.stride(0), block_table.shape[1],
        NUM_NODES=nodes, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_2(head_dim), KV_BLOCK_SIZE=block_size,
        NUM_PATH_ENTRIES=PATH_ENTRIES, PDL=uses_pdl(), num_warps=1, **launch_options(),
    )  # fmt: skip
