"""Checks of a round of trees: what it does is compared with what its rules say, computed in another way.

A violation is a word of its tree: the place of its reason in `REASONS`, counted from 1, and from bit
FLAG_BITS on the node, depth or block that was found wrong. A tree keeps its first violation, but one by
drafts, which are dropped before they are used, gives way to any other.

| kernel | grid | after | finds |
|---|---|---|---|
| `_check_drafts` | trees | drafting | tokens, structures, block tables |
| `_check_paths` | trees | placing | paths that are not those of parents to the root; positions |
| `_check_hidden` | rows | the forward pass | hidden states that are not finite |
| `_report_flags` | 1 | all checks | nothing: writes the words for the host |

Those that follow the commit are below. Bytes: what the round's kernels read and write.

Programmatic dependent launch: all wait for their producers before their first read and let their dependents
start right after that.

Checks of what a round of trees has accepted, and of where its keys and values lie.

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

from drift_sdk._kernels.attention.cache import cache_words
from drift_sdk._kernels.launch.arguments import check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.trees.tree_rows import LIMIT_WORDS, PATH_ENTRIES, RootTensors

REASONS = (
    "draft_tokens", "draft_tree", "block_table", "mask", "non_finite", "acceptance", "length", "kv",
)  # fmt: skip
NUM_DROPPED = 2
"""The first reasons are those by drafts, which were dropped."""
FLAG_BITS = 4
TOKENS, TREE, TABLE, MASK, FINITE = (tl.constexpr(1 + each) for each in range(5))
SHIFT = tl.constexpr(FLAG_BITS)
LAST_DROPPED = tl.constexpr(NUM_DROPPED)
NOTHING = tl.constexpr(2**30)
TILE_BLOCKS = 64


@device_function
def set_flag(flag_ptr, reason, place):
    """Set the word of a tree, unless one is set that counts more."""
    before = tl.load(flag_ptr)
    word = (place << SHIFT) + reason
    is_new = (before == 0) | (((before & 15) <= LAST_DROPPED) & ((word & 15) > LAST_DROPPED))
    if is_new:
        tl.store(flag_ptr, word)


@kernel
def _check_drafts(
    row_slot_ptr,  # [R] int32, read and written
    row_token_ptr,  # [R] int32
    row_parent_ptr,  # [R] int32
    row_position_ptr,  # [R] int32: of roots
    limits_ptr,  # [B, LIMIT_WORDS] int32
    block_table_ptr,  # [S, max_blocks] int32
    flag_ptr,  # [B] int32, written
    max_blocks,
    num_blocks,
    vocab_size,
    NUM_NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    LIMIT_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.program_id(0)
    first_row = tree * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    tl.store(flag_ptr + tree, 0)
    if slot >= 0:
        most_drafts = tl.load(limits_ptr + tree * LIMIT_WORDS)
        most_depth = tl.load(limits_ptr + tree * LIMIT_WORDS + 1)
        is_chain = tl.load(limits_ptr + tree * LIMIT_WORDS + 2) != 0
        node = tl.arange(0, PADDED_NODES)
        is_draft = (node > 0) & (node < NUM_NODES)
        own_slot = tl.load(row_slot_ptr + first_row + node, mask=is_draft, other=-1)
        is_draft &= own_slot >= 0
        token = tl.load(row_token_ptr + first_row + node, mask=is_draft, other=0)
        parent = tl.load(row_parent_ptr + first_row + node, mask=is_draft, other=0)
        is_wrong_token = is_draft & ((token < 0) | (token >= vocab_size))
        wrong_token = tl.min(tl.where(is_wrong_token, node, NOTHING), 0)
        is_linked = (parent >= 0) & (parent < node)
        parent_slot = tl.load(row_slot_ptr + first_row + parent, mask=is_draft & is_linked, other=-1)
        is_right = is_linked & (parent_slot == slot) & (own_slot == slot)
        is_right &= parent == tl.where(is_chain, node - 1, parent)
        depth = tl.zeros((PADDED_NODES,), tl.int32)
        above = tl.where(is_draft, node, 0)
        for _ in range(NUM_PATH_ENTRIES + 1):
            is_below = above > 0
            depth += is_below.to(tl.int32)
            next_above = tl.load(row_parent_ptr + first_row + above, mask=is_below, other=0)
            # Parents that do not precede their nodes are wrong already, and would never lead to the root.
            above = tl.where((next_above >= 0) & (next_above < above), next_above, 0)
        is_right &= depth <= most_depth
        wrong_node = tl.min(tl.where(is_draft & (is_right == 0), node, NOTHING), 0)
        num_drafts = tl.sum(is_draft.to(tl.int32), 0)
        is_kept = (wrong_token == NOTHING) & (wrong_node == NOTHING) & (num_drafts <= most_drafts)
        if is_kept == 0:
            reason = tl.where((wrong_token < NOTHING) | (num_drafts > most_drafts), TOKENS, TREE)
            place = tl.where(wrong_token < NOTHING, wrong_token, tl.minimum(wrong_node, num_drafts))
            set_flag(flag_ptr + tree, reason, place)
            tl.store(row_slot_ptr + first_row + node, -1, mask=is_draft)

        # The blocks up to the deepest draft exist and differ.
        position = tl.load(row_position_ptr + first_row)
        num_needed = (position + most_depth) // KV_BLOCK_SIZE + 1
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        wrong_block = slot * 0 + NOTHING
        for first in range(0, num_needed, TILE_BLOCKS):
            index = first + tl.arange(0, TILE_BLOCKS)
            block = tl.load(table_ptr + index, mask=index < num_needed, other=-1)
            is_outside = (index < num_needed) & ((block < 0) | (block >= num_blocks))
            wrong_block = tl.minimum(wrong_block, tl.min(tl.where(is_outside, index, NOTHING), 0))
            for first_other in range(0, first + 1, TILE_BLOCKS):
                other = first_other + tl.arange(0, TILE_BLOCKS)
                other_block = tl.load(table_ptr + other, mask=other < num_needed, other=-2)
                is_twice = (block[:, None] == other_block[None, :]) & (other[None, :] < index[:, None])
                num_twice = tl.sum(is_twice.to(tl.int32), 1)
                found = tl.min(tl.where(num_twice > 0, index, NOTHING), 0)
                wrong_block = tl.minimum(wrong_block, found)
        if wrong_block < NOTHING:
            set_flag(flag_ptr + tree, TABLE, wrong_block)
            tl.store(row_slot_ptr + first_row + node, -1, mask=node < NUM_NODES)


@kernel
def _check_paths(
    row_slot_ptr,  # [R] int32
    row_parent_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32
    length_ptr,  # [S] int32
    flag_ptr,  # [B] int32, written
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
        node = tl.arange(0, PADDED_NODES)
        in_tree = node < NUM_NODES
        is_node = tl.load(row_slot_ptr + first_row + node, mask=in_tree, other=-1) >= 0
        paths_ptr = row_path_ptr + (first_row + node) * NUM_PATH_ENTRIES
        last = tl.zeros((PADDED_NODES,), tl.int32) - 1
        depth = tl.zeros((PADDED_NODES,), tl.int32) - 1
        is_right = node >= 0
        for entry in range(NUM_PATH_ENTRIES):
            found = tl.load(paths_ptr + entry, mask=is_node, other=-1)
            is_entry = (found >= 0) & (found < NUM_NODES)
            parent = tl.load(row_parent_ptr + first_row + found, mask=is_entry, other=-2)
            # The root has the parent -1, and each other entry the one before it.
            is_right &= tl.where(is_entry, parent == last, (found == -1) & (entry > 0))
            is_right &= (is_entry == 0) | (depth == entry - 1)
            depth += is_entry.to(tl.int32)
            last = tl.where(is_entry, found, last)
        position = tl.load(row_position_ptr + first_row + node, mask=is_node, other=0)
        is_right &= (last == node) & (position == tl.load(length_ptr + slot) - 1 + depth)
        wrong = tl.min(tl.where(is_node & (is_right == 0), node, NOTHING), 0)
        if wrong < NOTHING:
            set_flag(flag_ptr + tree, MASK, wrong)


@kernel
def _check_hidden(
    row_slot_ptr,  # [R] int32
    hidden_ptr,  # [R, SIZE]
    flag_ptr,  # [B] int32, written
    NUM_NODES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    if tl.load(row_slot_ptr + row) >= 0:
        column = tl.arange(0, PADDED_COLUMNS)
        hidden = tl.load(hidden_ptr + row.to(tl.int64) * SIZE + column, mask=column < SIZE, other=0.0)
        wide = hidden.to(tl.float32)
        is_finite = tl.abs(wide) < float("inf")  # false for NaN
        if tl.sum((is_finite == 0).to(tl.int32), 0) > 0:
            set_flag(flag_ptr + row // NUM_NODES, FINITE, row % NUM_NODES)


@kernel
def _report_flags(
    flag_ptr,  # [B] int32
    output_ring_ptr,  # [num_entries, entry_words] int32, pinned, written
    current_entry_ptr,  # [1] int32
    num_trees,
    entry_words,
    first_word,
    PADDED_TREES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    tree = tl.arange(0, PADDED_TREES)
    is_tree = tree < num_trees
    entry_ptr = output_ring_ptr + tl.load(current_entry_ptr).to(tl.int64) * entry_words + first_word
    tl.store(entry_ptr + tree, tl.load(flag_ptr + tree, mask=is_tree, other=0), mask=is_tree)


def check_drafts(
    rows: RootTensors,
    block_table: Tensor,
    flags: Tensor,
    *,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
) -> None:
    """Check drafts and block tables of B trees; flags [B] int32 is written for all. Wrong drafts, and trees
    with a wrong block table, lose their slots.

    num_blocks: blocks that may be named. Raises ValueError for another shape or type.
    """
    num_trees, nodes = check_rows(rows, flags)
    check_tensor("block_table", block_table, block_table.shape, torch.int32)
    _check_drafts[(num_trees,)](
        rows.slot, rows.token, rows.parent, rows.position, rows.limits, block_table, flags,
        block_table.shape[1], num_blocks, vocab_size,
        NUM_NODES=nodes, PADDED_NODES=next_power_of_2(nodes), NUM_PATH_ENTRIES=PATH_ENTRIES,
        KV_BLOCK_SIZE=block_size, TILE_BLOCKS=TILE_BLOCKS, LIMIT_WORDS=LIMIT_WORDS, PDL=uses_pdl(),
        num_warps=4, **launch_options(),
    )  # fmt: skip


def check_paths(rows: RootTensors, path: Tensor, length: Tensor, flags: Tensor) -> None:
    """Check paths [R, PATH_ENTRIES] and positions of all nodes; length [S]: tokens of each slot."""
    num_trees, nodes = check_rows(rows, flags)
    check_tensor("path", path, (num_trees * nodes, PATH_ENTRIES), torch.int32)
    check_tensor("length", length, length.shape, torch.int32)
    _check_paths[(num_trees,)](
        rows.slot, rows.parent, rows.position, path, length, flags,
        NUM_NODES=nodes, PADDED_NODES=next_power_of_2(nodes), NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip


def check_hidden(rows: RootTensors, hidden: Tensor, flags: Tensor) -> None:
    """Check that hidden states [R, H] are finite."""
    _, nodes = check_rows(rows, flags)
    num_rows, size = hidden.shape
    check_tensor("hidden", hidden, (rows.slot.shape[0], size), hidden.dtype)
    _check_hidden[(num_rows,)](
        rows.slot, hidden, flags, NUM_NODES=nodes, SIZE=size, PADDED_COLUMNS=next_power_of_2(size),
        PDL=uses_pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip


def report_flags(flags: Tensor, output_ring: Tensor, current_entry: Tensor, *, first_word: int) -> None:
    """Write flags [B] for the host: to the words from first_word on of entry current_entry [1] of output_ring
    [num_entries, entry_words], pinned. All int32. Raises ValueError for another shape or type."""
    (num_trees,), entry_words = flags.shape, output_ring.shape[1]
    check_tensor("flags", flags, (num_trees,), torch.int32)
    check_tensor("output_ring", output_ring, output_ring.shape, torch.int32)
    check_tensor("current_entry", current_entry, (1,), torch.int32)
    if entry_words < first_word + num_trees:
        raise ValueError(
            f"output_ring: {entry_words} words an entry: expected at least {first_word + num_trees}"
        )

    _report_flags[(1,)](
        flags, output_ring, current_entry, num_trees, entry_words, first_word,
        PADDED_TREES=next_power_of_2(num_trees), PDL=uses_pdl(), num_warps=1, **launch_options(),
    )  # fmt: skip


def check_rows(rows: RootTensors, flags: Tensor) -> tuple[int, int]:
    """Trees, and nodes of each. Raises ValueError for another shape or type."""
    (num_trees,), (num_rows,) = flags.shape, rows.slot.shape
    columns = {name: getattr(rows, name) for name in ("slot", "token", "parent", "position")}
    check_tensors((num_rows // num_trees * num_trees,), torch.int32, **columns)
    check_tensor("limits", rows.limits, (num_trees, LIMIT_WORDS), torch.int32)
    check_tensor("flags", flags, (num_trees,), torch.int32)
    return num_trees, num_rows // num_trees


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
