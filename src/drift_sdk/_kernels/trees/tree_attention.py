"""Attention of the nodes of trees over a paged cache, each with the bits that it gets in a chain.

    node n sees the keys of its sequence before the root, and those of its ancestors and itself

In a chain, these are the keys at positions 0 ... position[n]. Keys are summed here as `paged_attention` sums
them there: in the same partitions and tiles, with the ancestors gathered into the places that they have in a
chain. Up to the last border of a tile before the root, all nodes see the same tiles, which are read as they
lie. The tiles behind the border are gathered for each node by itself, through the list of its ancestors.

`attend_prefix` sums the partitions before the one that the border lies in, `_attend_paths` the others; then
`add_partitions` combines them as in paged attention.

Order of summation: that of online_softmax.py, tile by tile as in `_attend`.

Grid of `_attend_paths`: (nodes, KV heads, trees). A program owns a node: the nodes of a tile have different
values at the same places of a product, so a product has the query heads of one group only.

Bytes: the keys and values behind the border, and those of the border's partition, for each node from the L2
cache; the partitions' sums, written and read once.

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
from drift_sdk._kernels.common.arguments import check_range, check_tensor, check_tensors
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.trees.prefix_attention import attend_prefix
from drift_sdk._kernels.trees.tree_paths import TreePaths
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
    root_position_ptr,  # [B * ROOT_STRIDE] int32
    node_kv_slot_ptr,  # [B * NUM_TREE_NODES] int64
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,
    max_blocks,
    NUM_NODES: tl.constexpr,  # query rows of each tree, before heads
    NUM_TREE_NODES: tl.constexpr,  # nodes that paths consist of
    ROOT_STRIDE: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    NUM_PATH_TILES: tl.constexpr,  # tiles that a path may reach, from the border on
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # GROUP_SIZE, rounded up to a power of two, 16 or more
    PADDED_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (node, head, tree)."""
    wait_for_producers(PDL)
    NUM_QUERY_ROWS: tl.constexpr = NUM_NODES * GROUP_SIZE
    node, head, tree = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tree * NUM_NODES + node
    slot = tl.load(row_slot_ptr + row)
    if slot >= 0:
        tile_row = tl.arange(0, TILE_ROWS)
        is_row = tile_row < GROUP_SIZE
        dim = tl.arange(0, PADDED_DIM)
        is_dim = dim < HEAD_DIM
        key = tl.arange(0, TILE_KEYS)
        root_position = tl.load(root_position_ptr + tree * ROOT_STRIDE)
        own_position = tl.load(row_position_ptr + row)
        first_seen = FIRST_KEY
        if WINDOW > 0:  # as in `_attend`, for all rows of the tree
            first_seen = tl.maximum(root_position - (WINDOW - 1), FIRST_KEY)
        border = root_position // TILE_KEYS * TILE_KEYS
        partition = partition_of(border, NARROW, NARROW_END, WIDE)
        begin_key = partition_start(partition, NARROW, NARROW_END, WIDE)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + tile_row
        query_mask = is_row[:, None] & is_dim[None, :]
        queries = tl.load(
            query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :], mask=query_mask, other=0.0
        )
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        query_row = node * GROUP_SIZE + tile_row
        first_sum = (tree * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        if WINDOW > 0:
            first_sum -= partition_of(first_seen, NARROW, NARROW_END, WIDE) * NUM_QUERY_ROWS
            begin_key = tl.maximum(begin_key, first_seen // TILE_KEYS * TILE_KEYS)
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
        for first_key in range(begin_key, border, TILE_KEYS):
            position = first_key + key
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, border, head, dim,
                NUM_KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, TILE_KEYS,
            )  # fmt: skip
            key_mask = (position >= first_seen)[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0.0)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0.0)
            is_seen = is_row[:, None] & (position >= FIRST_KEY)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position > own_position - WINDOW)[None, :]
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_seen, scale, True
            )

        for tile in tl.static_range(NUM_PATH_TILES):
            first_key = border + tile * TILE_KEYS
            if first_key <= own_position:
                if tile > 0:
                    tile_partition = partition_of(first_key, NARROW, NARROW_END, WIDE)
                    is_next = tile_partition != partition
                    # The tile before was its partition's last: store the sums, and start the next partition.
                    stored = tile_row < tl.where(is_next, GROUP_SIZE, 0)
                    sum_index = first_sum + partition * NUM_QUERY_ROWS
                    sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                    tl.store(sum_ptrs, total, mask=stored[:, None] & is_dim[None, :])
                    tl.store(maxima_ptr + sum_index, maximum, mask=stored)
                    tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=stored)
                    maximum = tl.where(is_next, float("-inf"), maximum)
                    weight = tl.where(is_next, 0.0, weight)
                    total = tl.where(is_next, 0.0, total)
                    partition = tile_partition

                # The tile as the node sees it in a chain: the prefix, then its ancestors.
                position = first_key + key
                is_prefix = (position < root_position) & (position >= first_seen)
                block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=is_prefix, other=0).to(tl.int64)
                prefix_slot = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
                depth = position - root_position
                on_path = (depth >= 0) & (depth < NUM_PATH_ENTRIES)
                ancestor = tl.load(row_path_ptr + row * NUM_PATH_ENTRIES + depth, mask=on_path, other=-1)
                is_ancestor = ancestor >= 0
                node_ptr = node_kv_slot_ptr + tree * NUM_TREE_NODES + ancestor
                tree_slot = tl.load(node_ptr, mask=is_ancestor, other=0)
                kv_slot = tl.where(is_prefix, prefix_slot, tree_slot)
                is_key = is_prefix | is_ancestor
                cache_row = (kv_slot // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE
                cache_offset = (cache_row + kv_slot % KV_BLOCK_SIZE)[:, None] * HEAD_DIM + dim[None, :]
                key_mask = is_key[:, None] & is_dim[None, :]
                keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0.0)
                values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0.0)
                is_seen = is_row[:, None] & is_key[None, :]
                if WINDOW > 0:
                    is_seen = is_seen & (position > own_position - WINDOW)[None, :]
                maximum, weight, total = attend_tile(
                    maximum, weight, total, queries, keys, values, is_seen, scale, True
                )

        sum_index = first_sum + partition * NUM_QUERY_ROWS
        sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(sum_ptrs, total, mask=query_mask)
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
    paths: TreePaths,
    out: Tensor,
    scratch: AttentionScratch,
    config: AttentionConfig,
    *,
    nodes_per_tree: int,
    first_key: int = 0,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention of the nodes of trees to their prefix and their ancestors, in `out`.

    query, out: [R, num_heads, head_dim]. keys, values: [num_blocks, num_kv_heads, block_size, head_dim], all
    four of the storage type. block_table: [S, max_blocks] int32.
    row_slot, row_position [R] int32: `nodes_per_tree` rows a tree; `scratch.plan` was made of them, and with
    a window, the first row of each tree is its root. Rows of slot -1 get zeros.
    first_key, scale, sinks: as of `paged_attention`.
    All contiguous. Raises ValueError for another shape, type or layout.
    """
    plan = scratch.plan
    _check_tree_attention(
        query, keys, values, block_table, row_slot, row_position, paths, out, scratch, nodes_per_tree
    )
    check_range("first_key", first_key, 0, plan.partitions.tile - 1)
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    group, num_trees = num_heads // num_kv_heads, num_rows // nodes_per_tree
    scale = head_dim**-0.5 if scale is None else scale
    attend_prefix(
        query,
        keys,
        values,
        block_table,
        row_slot,
        row_position,
        paths.root_position,
        scratch,
        config,
        nodes_per_tree=nodes_per_tree,
        first_key=first_key,
        scale=scale,
    )
    _attend_paths[(nodes_per_tree, num_kv_heads, num_trees)](
        query,
        keys,
        values,
        block_table,
        row_slot,
        row_position,
        paths.root_position,
        paths.kv_slot,
        paths.path,
        scratch.sums,
        scratch.maxima,
        scratch.weights,
        scale * LOG2_E.value,
        plan.max_num_partitions,
        block_table.shape[1],
        NUM_NODES=nodes_per_tree,
        NUM_TREE_NODES=paths.kv_slot.shape[0] // num_trees,
        ROOT_STRIDE=paths.root_position.shape[0] // num_trees,
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        NUM_PATH_TILES=triton.cdiv(plan.partitions.tile - 1 + PATH_ENTRIES, plan.partitions.tile),
        TILE_ROWS=max(MIN_DOT_SIZE, triton.next_power_of_2(group)),
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim)),
        KV_BLOCK_SIZE=block_size,
        FIRST_KEY=first_key,
        WINDOW=plan.window,
        TILE_KEYS=plan.partitions.tile,
        NARROW=plan.partitions.narrow,
        NARROW_END=plan.partitions.narrow_end,
        WIDE=plan.partitions.wide,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )
    add_partitions(scratch, row_slot, row_position, out, nodes_per_tree, num_kv_heads, sinks=sinks)


def _check_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    paths: TreePaths,
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
    num_trees = num_rows // nodes_per_tree
    for name, tensor, dtype in (
        ("root_position", paths.root_position, torch.int32),
        ("kv_slot", paths.kv_slot, torch.int64),
    ):
        size = max(tensor.shape[0] // num_trees, 1)
        check_tensor(name, tensor, (num_trees * size,), dtype)
    check_tensor("path", paths.path, (num_rows, PATH_ENTRIES), torch.int32)
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
    paths: TreePaths,
    *,
    nodes_per_tree: int,
    first_key: int = 0,
    window: int = 0,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of each node in float64, one after the other: [R, num_heads, head_dim]."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    num_trees = num_rows // nodes_per_tree
    kv_slot, root = paths.kv_slot.view(num_trees, -1), paths.root_position.view(num_trees, -1)[:, 0]
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=torch.float64, device=query.device)
    for row, slot in enumerate(row_slot.tolist()):
        if slot < 0:
            continue

        tree = row // nodes_per_tree
        prefix = torch.arange(int(root[tree]), device=query.device)
        block = block_table[slot, prefix // block_size].long()
        ancestors = paths.path[row][paths.path[row] >= 0].long()
        kv_slots = torch.cat((block * block_size + prefix % block_size, kv_slot[tree, ancestors]))
        first = max(first_key, int(row_position[row]) - window + 1) if window else first_key
        kv_slots = kv_slots[first:]
        key, value = (
            cache[kv_slots // block_size, :, kv_slots % block_size]
            .double()
            .repeat_interleave(num_heads // num_kv_heads, dim=1)
            for cache in (keys, values)
        )
        scores = torch.einsum("hd,nhd->hn", query[row].double(), key) * scale
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(key)], value)

    return out
