"""Attention of the nodes of trees over a paged cache, each with the bits that it gets in a chain.

    node n sees the keys of its sequence before the root, and those of its ancestors and itself

In a chain, these are the keys at positions 0 ... position[n]. Keys are summed here as `paged_attention` sums
them there: in the same partitions and tiles, with the ancestors gathered into the places that they have in a
chain. Up to the last border of a tile before the root, all nodes see the same tiles, which are read as they
lie. The tiles behind the border are gathered for each node by itself, through the list of its ancestors.

One kernel sums the partitions, in two kinds of programs that run side by side: `attend_paths` the partition
that the border lies in and those behind it, `attend_prefix` the partitions before. Then `add_partitions`
combines them as in paged attention.

Order of summation: that of online_softmax.py, tile by tile as in `_attend`.

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
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.attention.layer_attention import LayerAttention, padded_size
from drift_sdk._kernels.attention.paged_attention import AttentionConfig
from drift_sdk._kernels.attention.partition_sums import AttentionScratch, add_partitions
from drift_sdk._kernels.attention.planned_rows import PlannedRows
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import cdiv
from drift_sdk._kernels.trees.path_attention import attend_paths
from drift_sdk._kernels.trees.prefix_attention import attend_prefix
from drift_sdk._kernels.trees.tree_paths import TreePaths
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["tree_attention"]

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
    the first row of each tree is its root. Rows of slot -1 get zeros.
    The first key lies in the first tile. All tensors are contiguous. Raises ValueError for another shape,
    type or layout.
    """
    plan = scratch.plan
    layer.check(max_first_key=plan.partitions.tile - 1)
    scratch.check(layer, rows)
    num_trees, nodes_per_tree = rows.num_sequences, rows.rows_per_sequence
    paths.check(num_trees, nodes_per_tree)
    num_rows, num_kv_heads, group = layer.query.shape[0], layer.kv.num_heads, layer.group
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
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        NUM_PATH_TILES=cdiv(plan.partitions.tile - 1 + PATH_ENTRIES, plan.partitions.tile),
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
