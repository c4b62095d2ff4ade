"""Attention of the nodes of trees over a paged cache, each with the bits that it gets in a chain.

    node n sees the keys of its sequence before the root, and those of its ancestors and itself

In a chain, these are the keys at positions 0 ... position[n]. Keys are summed here as `paged_attention` sums
them there: in the same partitions and tiles, with the ancestors gathered into the places that they have in a
chain. Up to the last border of a tile before the root, all nodes see the same tiles, which are read as they
lie. The tiles behind the border are gathered for each node by itself, through the list of its ancestors.

`attend_prefix` sums the partitions before the one that the border lies in, `_attend_paths` the others; then
`add_partitions` combines them as in paged attention.

Order of summation: that of online_softmax.py, tile by tile as in `_attend`. A tile that was gathered for a
node changes nothing for the rows of other nodes: their scores are -inf, their weights 0 and their sums are
multiplied by 1.

Grid of `_attend_paths`: (node tiles, KV heads, trees). A program owns the nodes whose query rows fill the 16
rows of a product.

Bytes: the keys and values behind the border, and those of the border's partition, for each tile of nodes from
the L2 cache; the partitions' sums, written and read once.

Dependent launch: the kernel waits before its first read, and permits its dependents to start at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import partition_of, partition_start
from drift_sdk._kernels.attention.cache_offset import offset_in_cache
from drift_sdk._kernels.attention.online_softmax import LOG2_E, ONES_COLUMNS, attend_tile
from drift_sdk._kernels.attention.paged_attention import AttentionConfig
from drift_sdk._kernels.attention.partition_sums import MIN_DOT_SIZE, AttentionScratch, add_partitions
from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.trees.prefix_attention import attend_prefix
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["tree_attention", "tree_attention_reference"]


@triton.jit(do_not_specialize=["num_partitions", "max_blocks"])
def _attend_paths(
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, HEAD_DIM], storage type
    values_ptr,  # as keys
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: no node
    row_position_ptr,  # [R] int32
    row_kv_slot_ptr,  # [R] int64
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores: log2(e) / sqrt(HEAD_DIM)
    num_partitions,
    max_blocks,
    NUM_NODES: tl.constexpr,
    TILE_NODES: tl.constexpr,  # nodes of a program
    NUM_PATH_ENTRIES: tl.constexpr,
    NUM_PATH_TILES: tl.constexpr,  # tiles that a path may reach, from the border on
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # TILE_NODES * GROUP_SIZE, rounded up to a power of two, 16 or more
    PADDED_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (node tile, head, tree)."""
    wait_for_producers(PDL)
    NUM_QUERY_ROWS: tl.constexpr = NUM_NODES * GROUP_SIZE
    first_node, head, tree = tl.program_id(0) * TILE_NODES, tl.program_id(1), tl.program_id(2)
    first_row = tree * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    if slot >= 0:
        tile_row = tl.arange(0, TILE_ROWS)
        node = first_node + tile_row // GROUP_SIZE
        is_row = (tile_row < TILE_NODES * GROUP_SIZE) & (node < NUM_NODES)
        row = first_row + node
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1) >= 0
        dim = tl.arange(0, PADDED_DIM)
        is_dim = dim < HEAD_DIM
        key = tl.arange(0, TILE_KEYS)
        root_position = tl.load(row_position_ptr + first_row)
        last_position = tl.max(tl.load(row_position_ptr + row, mask=is_live, other=-1), 0)
        border = root_position // TILE_KEYS * TILE_KEYS
        partition = partition_of(border, NARROW, NARROW_END, WIDE)
        first_start = partition_start(partition, NARROW, NARROW_END, WIDE)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + tile_row % GROUP_SIZE
        query_mask = is_live[:, None] & is_dim[None, :]
        queries = tl.load(
            query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :], mask=query_mask, other=0.0
        )
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        query_row = node * GROUP_SIZE + tile_row % GROUP_SIZE
        first_sum = (tree * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        sum_mask = is_row[:, None] & is_dim[None, :]
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
        for first_key in range(first_start, border, TILE_KEYS):
            position = first_key + key
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, border, head, dim,
                NUM_KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, TILE_KEYS,
            )  # fmt: skip
            keys = tl.load(keys_ptr + cache_offset, mask=is_dim[None, :], other=0.0)
            values = tl.load(values_ptr + cache_offset, mask=is_dim[None, :], other=0.0)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_live[:, None], scale, True
            )

        for tile in tl.static_range(NUM_PATH_TILES):
            first_key = border + tile * TILE_KEYS
            if first_key <= last_position:
                tile_partition = partition_of(first_key, NARROW, NARROW_END, WIDE)
                if tile_partition != partition:
                    # The tile before was its partition's last: store the sums, and start the next partition.
                    sum_index = first_sum + partition * NUM_QUERY_ROWS
                    sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                    tl.store(sum_ptrs, total, mask=sum_mask)
                    tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
                    tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)
                    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                    weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
                    total = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
                    partition = tile_partition

                position = first_key + key
                is_prefix = position < root_position
                block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=is_prefix, other=0).to(tl.int64)
                prefix_slot = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
                depth = position - root_position
                for index in range(TILE_NODES):
                    # The tile as the node sees it in a chain: the prefix, then its ancestors.
                    own_node = first_node + index
                    path_row = first_row + tl.minimum(own_node, NUM_NODES - 1)
                    own_path_ptr = row_path_ptr + path_row * NUM_PATH_ENTRIES
                    on_path = (depth >= 0) & (depth < NUM_PATH_ENTRIES)
                    ancestor = tl.load(own_path_ptr + depth, mask=on_path, other=-1)
                    is_ancestor = ancestor >= 0
                    tree_slot = tl.load(row_kv_slot_ptr + first_row + ancestor, mask=is_ancestor, other=0)
                    kv_slot = tl.where(is_prefix, prefix_slot, tree_slot)
                    is_key = is_prefix | is_ancestor
                    cache_row = (kv_slot // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE
                    cache_row += kv_slot % KV_BLOCK_SIZE
                    cache_offset = cache_row[:, None] * HEAD_DIM + dim[None, :]
                    key_mask = is_key[:, None] & is_dim[None, :]
                    keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0.0)
                    values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0.0)
                    is_seen = (is_live & (node == own_node))[:, None] & is_key[None, :]
                    maximum, weight, total = attend_tile(
                        maximum, weight, total, queries, keys, values, is_seen, scale, True
                    )

        sum_index = first_sum + partition * NUM_QUERY_ROWS
        sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(sum_ptrs, total, mask=sum_mask)
        tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
        tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)

    start_dependents(PDL)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_kv_slot: Tensor,
    row_path: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    config: AttentionConfig,
    *,
    nodes_per_tree: int,
) -> None:
    """Attention of the nodes of trees to their prefix and their ancestors, in `out`.

    query, out: [R, num_heads, head_dim]. keys, values: [num_blocks, num_kv_heads, block_size, head_dim], all
    four of the storage type. block_table: [S, max_blocks] int32.
    row_slot, row_position [R] int32, row_kv_slot [R] int64, row_path [R, PATH_ENTRIES] int32: as of
    `tree_rows`, `nodes_per_tree` rows a tree; `scratch.plan` was made of row_slot and row_position. Rows of
    slot -1 get zeros.
    All contiguous. Raises ValueError for another shape, type or layout.
    """
    plan = scratch.plan
    _check_tree_attention(
        query, keys, values, block_table, row_slot, row_position, row_kv_slot, row_path, out, scratch,
        nodes_per_tree,
    )  # fmt: skip
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    group = num_heads // num_kv_heads
    attend_prefix(
        query,
        keys,
        values,
        block_table,
        row_slot,
        row_position,
        scratch,
        config,
        nodes_per_tree=nodes_per_tree,
    )
    tile_nodes = max(1, MIN_DOT_SIZE // group)
    _attend_paths[(triton.cdiv(nodes_per_tree, tile_nodes), num_kv_heads, num_rows // nodes_per_tree)](
        query,
        keys,
        values,
        block_table,
        row_slot,
        row_position,
        row_kv_slot,
        row_path,
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        head_dim**-0.5 * LOG2_E.value,
        plan.max_num_partitions,
        block_table.shape[1],
        TILE_NODES=tile_nodes,
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        NUM_PATH_TILES=triton.cdiv(plan.partitions.tile - 1 + PATH_ENTRIES, plan.partitions.tile),
        TILE_ROWS=max(MIN_DOT_SIZE, triton.next_power_of_2(tile_nodes * group)),
        NUM_NODES=nodes_per_tree,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim)),
        KV_BLOCK_SIZE=block_size,
        TILE_KEYS=plan.partitions.tile,
        NARROW=plan.partitions.narrow,
        NARROW_END=plan.partitions.narrow_end,
        WIDE=plan.partitions.wide,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )
    add_partitions(scratch, row_slot, row_position, out, nodes_per_tree, num_kv_heads)


def _check_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_kv_slot: Tensor,
    row_path: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    nodes_per_tree: int,
) -> None:
    """Raise ValueError for arguments of `tree_attention` of another shape, type or layout."""
    num_rows, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, _ = keys.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads}: expected a multiple of num_kv_heads={num_kv_heads}")

    if num_rows % nodes_per_tree or num_rows > scratch.plan.num_sequences * nodes_per_tree:
        raise ValueError(
            f"query: {num_rows} rows: expected {nodes_per_tree} for each of at most "
            f"{scratch.plan.num_sequences} trees"
        )

    check_tensors((num_rows, num_heads, head_dim), query.dtype, query=query, out=out)
    check_tensors((num_blocks, num_kv_heads, block_size, head_dim), query.dtype, keys=keys, values=values)
    check_tensor("block_table", block_table, block_table.shape, torch.int32)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("row_kv_slot", row_kv_slot, (num_rows,), torch.int64)
    check_tensor("row_path", row_path, (num_rows, PATH_ENTRIES), torch.int32)
    num_query_rows, room = nodes_per_tree * (num_heads // num_kv_heads), scratch.maxima.shape[-1]
    if room < num_query_rows:
        raise ValueError(f"scratch: room for {room} query rows: expected {num_query_rows} or more")


def tree_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_kv_slot: Tensor,
    row_path: Tensor,
    *,
    nodes_per_tree: int,
) -> Tensor:
    """Return the attention of each node in float64, one after the other: [R, num_heads, head_dim]."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=torch.float64, device=query.device)
    for row, slot in enumerate(row_slot.tolist()):
        if slot < 0:
            continue

        first_row = row // nodes_per_tree * nodes_per_tree
        prefix = torch.arange(int(row_position[first_row]), device=query.device)
        block = block_table[slot, prefix // block_size].long()
        ancestors = row_path[row][row_path[row] >= 0].long()
        kv_slots = torch.cat((block * block_size + prefix % block_size, row_kv_slot[first_row + ancestors]))
        key, value = (
            cache[kv_slots // block_size, :, kv_slots % block_size]
            .double()
            .repeat_interleave(num_heads // num_kv_heads, dim=1)
            for cache in (keys, values)
        )
        scores = torch.einsum("hd,nhd->hn", query[row].double(), key) * head_dim**-0.5
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)

    return out
