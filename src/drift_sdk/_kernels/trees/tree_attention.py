"""Attention of the nodes of trees over a paged cache, each with the bits that it gets in a chain.

    node n sees the keys of its sequence before the root, and those of its ancestors and itself

In a chain, these are the keys at positions 0 ... position[n]. Keys are summed here as `paged_attention` sums
them there: in the same partitions and tiles, with the ancestors gathered into the places that they have in a
chain. Up to the last border of a tile before the root, all nodes see the same tiles, which are read as they
lie. The tiles behind the border are gathered for each node by itself, through the list of its ancestors.

One kernel sums the partitions, in two kinds of programs that run side by side: `attend_paths` the partition
that the border lies in and those behind it, `attend_prefix` the partitions before. Then `add_partitions`
combines them as in paged attention.

Order of summation: that of softmax.py, tile by tile as in `_attend`.

Grid: one dimension. First the programs of paths: (trees, tiles of nodes, KV heads), the last being the
fastest. A tile is one node, unless that makes more programs than run at once: then it is as many nodes as the
query heads of a group leave room for in a product. Behind them the programs of the prefix: (shares, KV heads,
tiles of query rows). Program (s, h, t) owns KV head h of the s-th share of the plan's tiles, for the t-th
tile of query rows of each sequence. Row tiles are the fastest, so that the programs of a share run side by
side: the keys come from memory once, and from the L2 cache for the other row tiles.

Bytes: the keys and values of the prefix once; those of the border's partition and behind it, for each tile of
nodes, from the L2 cache; the partitions' sums, written and read once.

Dependent launch: the kernel reads the plan, the rows and the block table before it waits, like `_attend`. It
permits its dependents to start at its end.

Attention of the nodes of trees to the partitions that all of them see whole.

These are the partitions before the one in which the last border of a tile before the root lies. The sums are
those of `_attend` in decode.py, in the same order.

Attention of the nodes of trees to the keys from the partition of the border on.

The border is the last border of a tile before the root. The partition's tiles before it are the same for all
nodes. Those behind it hold, for each node, the keys that it sees there in a chain: the end of the prefix, and
its ancestors in the order of their depth, gathered through the list of its path.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.cache import offset_in_cache
from drift_sdk._kernels.attention.decode import AttentionConfig, AttentionScratch, add_partitions
from drift_sdk._kernels.attention.layer_attention import LayerAttention, padded_size
from drift_sdk._kernels.attention.plan import (
    TILE_FIRST_KEY,
    TILE_NUM_KEYS,
    TILE_SEQUENCE,
    TILE_SLOT,
    TILE_WORDS,
    PlannedRows,
    next_partition,
)
from drift_sdk._kernels.attention.softmax import (
    ONES_COLUMNS,
    attend_tile,
    clear_parts,
    head_scale,
    load_parts,
    partition_of,
    partition_start,
    store_parts,
    zero_parts,
)
from drift_sdk._kernels.launch.arguments import cdiv, check_tensor
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)


class TreePaths(Struct, frozen=True):
    """The keys behind the prefixes of B trees: what `tree_attention` has to know of their rows.

    root_position [B * n] int32: entry b * n is the position of tree b's root; n >= 1.
    kv_slot [B * N] int64: cache slots of the nodes of each tree, the root being node 0.
    path [R, E] int32: for each row, by depth from the root on, the nodes that it sees; then -1. A row's
    position is less than E behind the root's; it may lie behind the last of these nodes.
    """

    root_position: Tensor
    kv_slot: Tensor
    path: Tensor

    def of_trees(self, first: int, end: int, num_trees: int) -> TreePaths:
        """Those of trees first ... end - 1, of `num_trees`."""

        def part(tensor: Tensor) -> Tensor:
            size = tensor.shape[0] // num_trees
            return tensor[first * size : end * size]

        return TreePaths(part(self.root_position), part(self.kv_slot), part(self.path))

    def check(self, num_trees: int, nodes_per_tree: int) -> None:
        """Raise ValueError for tensors of another shape, type or layout."""
        for name, tensor, dtype in (
            ("root_position", self.root_position, torch.int32),
            ("kv_slot", self.kv_slot, torch.int64),
        ):
            size = max(tensor.shape[0] // num_trees, 1)
            check_tensor(name, tensor, (num_trees * size,), dtype)
        num_rows, num_entries = num_trees * nodes_per_tree, self.path.shape[-1]
        check_tensor("path", self.path, (num_rows, num_entries), torch.int32)


@device_function
def attend_prefix(
    row_tile,
    head,
    share,
    num_shares,
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type; heads of a group side by side
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: no node
    row_position_ptr,  # [R] int32
    root_position_ptr,  # [num_sequences * ROOT_STRIDE] int32
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    NUM_NODES: tl.constexpr,  # query rows of each tree, before heads
    ROOT_STRIDE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the sums of one KV head of a share of the plan's tiles, for a tile of query rows of each
    sequence. Plan, rows and block table are read before the kernels before this one have ended. Longer than
    other kernels: one loop over sums that stay in registers."""
    NUM_QUERY_ROWS: tl.constexpr = NUM_NODES * GROUP_SIZE
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    query_row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = query_row < NUM_QUERY_ROWS
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < PART_DIM
    scale = head_scale(scale, key_scale_ptr, head)
    key = tl.arange(0, TILE_KEYS)
    num_tiles = tl.load(num_tiles_ptr, cache_modifier=".cg")
    tile_index = next_partition(
        tiles_ptr, num_tiles * share // num_shares, num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    end_index = next_partition(
        tiles_ptr, num_tiles * (share + 1) // num_shares, num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    while tile_index < end_index:
        # The share's tiles of one sequence.
        tile_ptr = tiles_ptr + tile_index * TILE_WORDS
        sequence = tl.load(tile_ptr + TILE_SEQUENCE, cache_modifier=".cg")
        slot = tl.load(tile_ptr + TILE_SLOT, cache_modifier=".cg")
        num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, cache_modifier=".cg")
        sequence_key = tl.load(tile_ptr + TILE_FIRST_KEY, cache_modifier=".cg")
        num_own_tiles = tl.minimum(
            end_index - tile_index, (num_keys - sequence_key + TILE_KEYS - 1) // TILE_KEYS
        )
        root_position = tl.load(root_position_ptr + sequence * ROOT_STRIDE, cache_modifier=".cg")
        border = root_position // TILE_KEYS * TILE_KEYS
        end_key = partition_start(
            partition_of(border, NARROW, NARROW_END, NUM_DOUBLINGS), NARROW, NARROW_END, NUM_DOUBLINGS
        )
        num_prefix_tiles = tl.minimum(num_own_tiles, tl.maximum(end_key - sequence_key, 0) // TILE_KEYS)
        row = sequence * NUM_NODES + query_row // GROUP_SIZE
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        first_seen = FIRST_KEY
        if WINDOW > 0:
            # Keys that no row sees are not loaded: they may hold anything.
            last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1, cache_modifier=".cg")
            lowest_position = tl.load(row_position_ptr + sequence * NUM_NODES, cache_modifier=".cg")
            first_seen = tl.maximum(lowest_position - (WINDOW - 1), FIRST_KEY)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE
        query_mask = is_live[:, None] & is_dim[None, :]
        wait_for_producers(PDL)
        query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
        queries = load_parts(query_ptrs, query_mask, PART_DIM, NUM_PARTS, "")
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_sum = (sequence * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        if WINDOW > 0:  # the first place is that of the first partition that a row sees
            first_sum -= partition_of(first_seen, NARROW, NARROW_END, NUM_DOUBLINGS) * NUM_QUERY_ROWS
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for tile in tl.range(0, num_prefix_tiles, num_stages=NUM_STAGES):
            first_key = sequence_key + tile * TILE_KEYS
            position = first_key + key
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, num_keys, head, dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, "",
            )  # fmt: skip
            is_key = position < end_key
            if FIRST_KEY > 0 or WINDOW > 0:
                is_key = is_key & (position >= first_seen)
            key_mask = is_key[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0)
            is_seen = is_live[:, None] & (position >= FIRST_KEY)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > last_position[:, None] - WINDOW)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )
            partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
            if first_key + TILE_KEYS >= next_start:
                # The partition's last tile: store its sums, and start the next partition.
                sum_index = first_sum + partition * NUM_QUERY_ROWS
                sum_mask = is_row[:, None] & is_dim[None, :]
                sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                store_parts(sum_ptrs, total, sum_mask, PART_DIM, NUM_PARTS)
                tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
                tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)
                maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
                total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)

        tile_index += num_own_tiles


@device_function
def path_slots(
    slot,  # -1: no node
    row,  # of the step
    tree,
    first_key,  # position of the tile's first key
    key,  # [TILE_KEYS]: 0 ... TILE_KEYS - 1
    root_position,
    first_seen,  # position
    table_ptr,  # [max_blocks] int32: the block table's row of the slot
    node_kv_slot_ptr,  # [B * NUM_TREE_NODES] int64
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32
    NUM_TREE_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
):
    """Return the cache slots [TILE_KEYS] of the keys that a node sees in a tile behind the border, as in a
    chain: the prefix, then its ancestors. -1: no key. Paths of rows without a node may hold anything."""
    position = first_key + key
    is_node = slot + key * 0 >= 0
    is_prefix = is_node & (position < root_position) & (position >= first_seen)
    block_ptrs = table_ptr + position // KV_BLOCK_SIZE
    block = tl.load(block_ptrs, mask=is_prefix, other=0, cache_modifier=".cg").to(tl.int64)
    depth = position - root_position
    on_path = is_node & (depth >= 0) & (depth < NUM_PATH_ENTRIES)
    ancestor_ptrs = row_path_ptr + row * NUM_PATH_ENTRIES + depth
    ancestor = tl.load(ancestor_ptrs, mask=on_path, other=-1, cache_modifier=".cg")
    node_ptrs = node_kv_slot_ptr + tree * NUM_TREE_NODES + ancestor
    tree_slot = tl.load(node_ptrs, mask=ancestor >= 0, other=-1, cache_modifier=".cg")
    return tl.where(is_prefix, block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE, tree_slot)


@device_function
def attend_paths(
    first_node,
    head,
    tree,
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
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
    TILE_NODES: tl.constexpr,  # nodes of the program
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # TILE_NODES * GROUP_SIZE, rounded up to a power of two, 16 or more
    NUM_PARTS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the sums of one KV head of a tree's nodes first_node ... first_node + TILE_NODES - 1. Rows, block
    table and paths are read before the kernels before this one have ended. Longer than other kernels by its
    arguments."""
    NUM_QUERY_ROWS: tl.constexpr = NUM_NODES * GROUP_SIZE
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    scale = head_scale(scale, key_scale_ptr, head)
    tile_row = tl.arange(0, TILE_ROWS)
    member = tile_row // GROUP_SIZE
    node = first_node + member
    is_row = (member < TILE_NODES) & (node < NUM_NODES)
    row = tree * NUM_NODES + node
    slots = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg")
    is_row = slots >= 0
    own_position = tl.load(row_position_ptr + row, mask=is_row, other=-1, cache_modifier=".cg")
    root_position = tl.load(root_position_ptr + tree * ROOT_STRIDE, cache_modifier=".cg")
    slot = tl.max(slots, 0)
    key = tl.arange(0, TILE_KEYS)
    first_seen = FIRST_KEY
    if WINDOW > 0:  # as in `_attend`, for all rows of the tree
        lowest_position = tl.load(row_position_ptr + tree * NUM_NODES, cache_modifier=".cg")
        first_seen = tl.maximum(lowest_position - (WINDOW - 1), FIRST_KEY)
    border = root_position // TILE_KEYS * TILE_KEYS
    table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
    own_slots = ()  # of one node: known before the first key has come
    if TILE_NODES == 1:
        for tile in tl.static_range(NUM_PATH_TILES):
            found = path_slots(
                slot, tree * NUM_NODES + first_node, tree, border + tile * TILE_KEYS, key,
                root_position, first_seen, table_ptr, node_kv_slot_ptr, row_path_ptr, NUM_TREE_NODES,
                NUM_PATH_ENTRIES, KV_BLOCK_SIZE,
            )  # fmt: skip
            own_slots = own_slots + (found,)  # type: ignore[assignment]  # a longer tuple
    wait_for_producers(PDL)
    if slot >= 0:
        dim = tl.arange(0, PADDED_DIM)
        is_dim = dim < PART_DIM
        border_partition = partition_of(border, NARROW, NARROW_END, NUM_DOUBLINGS)
        begin_key = partition_start(border_partition, NARROW, NARROW_END, NUM_DOUBLINGS)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + tile_row % GROUP_SIZE
        query_mask = is_row[:, None] & is_dim[None, :]
        query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
        queries = load_parts(query_ptrs, query_mask, PART_DIM, NUM_PARTS, "")
        query_row = node * GROUP_SIZE + tile_row % GROUP_SIZE
        first_sum = (tree * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        if WINDOW > 0:
            first_sum -= partition_of(first_seen, NARROW, NARROW_END, NUM_DOUBLINGS) * NUM_QUERY_ROWS
            begin_key = tl.maximum(begin_key, first_seen // TILE_KEYS * TILE_KEYS)
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for first_key in tl.range(begin_key, border, TILE_KEYS, num_stages=NUM_STAGES):
            position = first_key + key
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, border, head, dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, "",
            )  # fmt: skip
            key_mask = (position >= first_seen)[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0)
            is_seen = is_row[:, None] & (position >= FIRST_KEY)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > own_position[:, None] - WINDOW)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )

        partition = tile_row * 0 + border_partition
        for index in tl.range(0, TILE_NODES, num_stages=1):
            is_own = is_row & (member == index)
            last_key = tl.max(tl.where(is_own, own_position, -1), 0)  # -1: no node
            for tile in tl.static_range(NUM_PATH_TILES):
                first_key = border + tile * TILE_KEYS
                if first_key <= last_key:
                    if tile > 0:
                        tile_partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
                        stored = is_own & (partition != tile_partition)
                        # The tile before was its partition's last: store the sums, start the next partition.
                        sum_index = first_sum + partition * NUM_QUERY_ROWS
                        sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                        sum_mask = stored[:, None] & is_dim[None, :]
                        store_parts(sum_ptrs, total, sum_mask, PART_DIM, NUM_PARTS)
                        tl.store(maxima_ptr + sum_index, maximum, mask=stored)
                        tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=stored)
                        maximum = tl.where(stored, float("-inf"), maximum)
                        weight = tl.where(stored[:, None], 0.0, weight)
                        total = clear_parts(total, stored, NUM_PARTS)
                        partition = tl.where(stored, tile_partition, partition)

                    if TILE_NODES > 1:
                        kv_slot = path_slots(
                            slot, tree * NUM_NODES + first_node + index, tree, first_key, key,
                            root_position, first_seen, table_ptr, node_kv_slot_ptr, row_path_ptr,
                            NUM_TREE_NODES, NUM_PATH_ENTRIES, KV_BLOCK_SIZE,
                        )  # fmt: skip
                    else:
                        kv_slot = own_slots[tile]
                    is_key = kv_slot >= 0
                    cache_row = (kv_slot // KV_BLOCK_SIZE * NUM_KV_HEADS + head) * KV_BLOCK_SIZE
                    cache_offset = (cache_row + kv_slot % KV_BLOCK_SIZE)[:, None] * PART_DIM + dim[None, :]
                    key_mask = is_key[:, None] & is_dim[None, :]
                    keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0)
                    values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0)
                    is_seen = is_own[:, None] & is_key[None, :]
                    if WINDOW > 0:
                        position = first_key + key
                        is_seen = is_seen & (position[None, :] > own_position[:, None] - WINDOW)
                    maximum, weight, total = attend_tile(
                        maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
                    )

        sum_index = first_sum + partition * NUM_QUERY_ROWS
        sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
        store_parts(sum_ptrs, total, query_mask, PART_DIM, NUM_PARTS)
        tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
        tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)


MAX_TILE_ROWS = 32
"""Most query rows of a program. With head_dim 128, the sums of 64 would take 128 registers of each of the 64
threads of two warps, and spill."""


@kernel(do_not_specialize=["num_partitions", "max_blocks", "num_trees", "num_shares"])
def _attend_trees(
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type; heads of a group side by side
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: no node
    row_position_ptr,  # [R] int32
    root_position_ptr,  # [num_trees * ROOT_STRIDE] int32
    node_kv_slot_ptr,  # [num_trees * NUM_TREE_NODES] int64
    row_path_ptr,  # [R, NUM_PATH_ENTRIES] int32
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    num_trees,
    num_shares,
    NUM_NODES: tl.constexpr,  # query rows of each tree, before heads
    NUM_TREE_NODES: tl.constexpr,  # nodes that paths consist of
    ROOT_STRIDE: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    NUM_PATH_TILES: tl.constexpr,  # tiles that a path may reach, from the border on
    TILE_NODES: tl.constexpr,  # nodes of a program of paths
    PATH_ROWS: tl.constexpr,  # query rows of a program of paths, padded
    TILE_ROWS: tl.constexpr,  # query rows of a program of the prefix, padded
    NUM_ROW_TILES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # those of a part, padded
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: see the module. Nothing but arguments."""
    NUM_NODE_TILES: tl.constexpr = (NUM_NODES + TILE_NODES - 1) // TILE_NODES
    program = tl.program_id(0)
    num_path_programs = num_trees * (NUM_NODE_TILES * NUM_KV_HEADS)
    if program < num_path_programs:
        node_tile = program // NUM_KV_HEADS
        attend_paths(
            node_tile % NUM_NODE_TILES * TILE_NODES, program % NUM_KV_HEADS, node_tile // NUM_NODE_TILES,
            query_ptr, keys_ptr, values_ptr, key_scale_ptr, block_table_ptr, row_slot_ptr, row_position_ptr,
            root_position_ptr, node_kv_slot_ptr, row_path_ptr, sums_ptr, maxima_ptr, weights_ptr,
            scale, num_partitions, max_blocks,
            NUM_NODES, NUM_TREE_NODES, ROOT_STRIDE, NUM_PATH_ENTRIES, NUM_PATH_TILES, TILE_NODES,
            GROUP_SIZE, NUM_KV_HEADS, HEAD_DIM, PATH_ROWS, NUM_PARTS, PADDED_DIM, IN_PAIRS, KV_BLOCK_SIZE,
            NUM_STAGES, FIRST_KEY, WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS, PDL,
        )  # fmt: skip
    else:
        row_tile = (program - num_path_programs) % NUM_ROW_TILES
        share_head = (program - num_path_programs) // NUM_ROW_TILES
        attend_prefix(
            row_tile, share_head % NUM_KV_HEADS, share_head // NUM_KV_HEADS, num_shares,
            query_ptr, keys_ptr, values_ptr, key_scale_ptr, block_table_ptr, row_slot_ptr, row_position_ptr,
            root_position_ptr, tiles_ptr, num_tiles_ptr, sums_ptr, maxima_ptr, weights_ptr,
            scale, num_partitions, max_blocks,
            NUM_NODES, ROOT_STRIDE, GROUP_SIZE, NUM_KV_HEADS, HEAD_DIM, TILE_ROWS, NUM_PARTS, PADDED_DIM,
            IN_PAIRS, KV_BLOCK_SIZE, NUM_STAGES, FIRST_KEY, WINDOW, TILE_KEYS, NARROW, NARROW_END,
            NUM_DOUBLINGS, PDL,
        )  # fmt: skip

    wait_for_producers(PDL)  # every CTA waits before it ends, also one without a tile
    start_dependents(PDL)


def tree_attention(
    layer: LayerAttention,
    rows: PlannedRows,
    paths: TreePaths,
    scratch: AttentionScratch,
    config: AttentionConfig,
) -> None:
    """Attention of the nodes of trees to their prefix and their ancestors, in `layer.out`.

    rows: the nodes, those of each tree being a sequence. `scratch.plan` was made of them, and with a window,
    the first row of each tree has the lowest position. Rows of slot -1 get zeros. Where positions are those
    of a chain, a row sees what it sees there. A row that sees nodes behind its own, as masks of a draft do,
    has a position behind the last of them; a window counts from this position.
    The first key lies in the first tile. All tensors are contiguous. Raises ValueError for another shape,
    type or layout.
    """
    plan = scratch.plan
    layer.check(max_first_key=plan.partitions.tile - 1)
    scratch.check(layer, rows)
    num_trees, nodes_per_tree = rows.num_sequences, rows.rows_per_sequence
    paths.check(num_trees, nodes_per_tree)
    num_rows, num_kv_heads, group = layer.query.shape[0], layer.kv.num_heads, layer.group
    num_entries = paths.path.shape[1]
    path_rows = padded_size(group)
    are_many = num_rows * num_kv_heads > config.num_programs
    tile_nodes = min(path_rows // group, nodes_per_tree) if are_many else 1
    tile_rows = min(padded_size(nodes_per_tree * group), MAX_TILE_ROWS)
    num_row_tiles = cdiv(nodes_per_tree * group, tile_rows)
    num_path_programs = num_trees * cdiv(nodes_per_tree, tile_nodes) * num_kv_heads
    room = max(config.num_programs - num_path_programs, config.num_programs // 2)
    num_shares = max(1, room // (num_kv_heads * num_row_tiles))
    _attend_trees[(num_path_programs + num_shares * num_kv_heads * num_row_tiles,)](
        root_position_ptr=paths.root_position,
        node_kv_slot_ptr=paths.kv_slot,
        row_path_ptr=paths.path,
        tiles_ptr=plan.tiles,
        num_tiles_ptr=plan.num_tiles,
        max_blocks=layer.block_table.shape[1],
        num_trees=num_trees,
        num_shares=num_shares,
        NUM_NODES=nodes_per_tree,
        NUM_TREE_NODES=paths.kv_slot.shape[0] // num_trees,
        ROOT_STRIDE=paths.root_position.shape[0] // num_trees,
        NUM_PATH_ENTRIES=num_entries,
        NUM_PATH_TILES=cdiv(plan.partitions.tile - 1 + num_entries, plan.partitions.tile),
        TILE_NODES=tile_nodes,
        PATH_ROWS=path_rows,
        TILE_ROWS=tile_rows,
        NUM_ROW_TILES=num_row_tiles,
        GROUP_SIZE=group,
        NUM_STAGES=config.num_stages,
        FIRST_KEY=layer.first_key,
        TILE_KEYS=plan.partitions.tile,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **layer.kernel_arguments(),
        **scratch.kernel_arguments(rows),
        **launch_options(),
    )
    add_partitions(layer, rows, scratch)
