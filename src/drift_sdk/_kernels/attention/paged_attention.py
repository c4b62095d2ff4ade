"""Attention of a few query rows a sequence over a paged cache, for decoding and for verifying drafts.

    score[r, h, p] = query[r, h] . key[p] * scale                          for positions p <= position[r]
    out[r, h] = sum over p of softmax(score[r, h])[p] * value[p]

With a window w, a row sees only the last w of these positions. A sink is one more score in the softmax, whose
value is zero.

Two kernels. `_attend` sums the keys of each partition by itself, in the form of a softmax's maximum, weight
and weighted sum of values; `_add_partitions` of partition_sums.py combines the partitions of each row.

Order of summation: that of online_softmax.py. `_attend` takes the tiles of a partition, `_add_partitions`
adds the partitions of a row. A row's bits depend on its query and on the keys it sees: not on the rows beside
it, on other sequences, or on which program computes what.

Grid of `_attend`: (KV heads, shares). Program (h, s) owns KV head h of the s-th share of the plan's tiles
(see attention_plan.py), for all rows of each sequence and all query heads of the group. For each of its
partitions it writes the sums of these rows. Sequences that share a prefix are companions there: their rows
lie in one tile.

A cache of e4m3 numbers has scales; see e4m3.py. Its keys and values become numbers of the storage type in
registers.

Bytes: the keys and values that some row sees, once for all rows of a sequence and all heads of a group, and
once for companions; and the partitions' sums, written and read once. Many programs a multiprocessor are
needed to keep enough loads under way.

Dependent launch: `_attend` reads the plan and the rows before it waits; they are older than the two kernels
before it, which make queries and keys. It permits its dependents to start at its end, or where programs have
few keys, when it has waited: memory can read weights of the next product then.

Directly behind attention of prompts in CUDA C++, which permits its dependents to start as soon as it has
waited itself, and writes other rows, `_attend` waits only at its end (BESIDE_CHUNKS): queries and keys are
complete when it starts. What it loads bypasses the L1 cache. Triton applies `.cg` only to copies of 16 bytes;
these are, because that kernel is used only for heads of 64 or 128 numbers of 16 bits.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.attention.attention_config import AttentionConfig, attention_config
from drift_sdk._kernels.attention.attention_plan import (
    TILE_COMPANIONS,
    TILE_FIRST_KEY,
    TILE_NUM_KEYS,
    TILE_SEQUENCE,
    TILE_SLOT,
    TILE_WORDS,
    next_partition,
)
from drift_sdk._kernels.attention.cache_offset import offset_in_cache
from drift_sdk._kernels.attention.layer_attention import LayerAttention, padded_size
from drift_sdk._kernels.attention.online_softmax import (
    ONES_COLUMNS,
    attend_tile,
    head_scale,
    load_parts,
    store_parts,
    zero_parts,
)
from drift_sdk._kernels.attention.partition_sums import AttentionScratch, add_partitions
from drift_sdk._kernels.attention.partitions import partition_of, partition_start
from drift_sdk._kernels.attention.planned_rows import PlannedRows
from drift_sdk._kernels.attention.shared_prefixes import most_companions
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = [
    "AttentionConfig",
    "AttentionScratch",
    "attention_config",
    "paged_attention",
]

EARLY_TILES = tl.constexpr(2)
"""Up to so many tiles for each share, `_attend` permits its dependents to start before it computes."""


@kernel(
    do_not_specialize=["num_partitions", "max_blocks"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _attend(
    query_ptr,  # [R, num_heads, HEAD_DIM], storage type; heads of a group side by side
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32: the last position that a row sees
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    ROWS_PER_SEQUENCE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # query heads that share a KV head
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # ROWS_PER_SEQUENCE * GROUP_SIZE, rounded up to a power of two, 16 or more
    NUM_COMPANIONS: tl.constexpr,  # sequences that may share a tile
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # those of a part, rounded up likewise
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,  # positions in a block of the KV cache
    NUM_STAGES: tl.constexpr,
    FIRST_KEY: tl.constexpr,  # positions before it are not seen
    WINDOW: tl.constexpr,  # 0: off
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,  # NARROW, NARROW_END, NUM_DOUBLINGS: see `Partitions`
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    BESIDE_CHUNKS: tl.constexpr,  # wait only at the end
    PDL: tl.constexpr,
):
    """Program (head, share): the tiles of a share, one sequence after the other.

    A "query row" below is one row of the step with one query head of the group. Longer than other kernels:
    one loop over sums that stay in registers.
    """
    NUM_QUERY_ROWS: tl.constexpr = ROWS_PER_SEQUENCE * GROUP_SIZE
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    CACHE: tl.constexpr = ".cg" if BESIDE_CHUNKS else ""
    head = tl.program_id(0)
    query_row = tl.arange(0, TILE_ROWS) % NUM_QUERY_ROWS
    companion = tl.arange(0, TILE_ROWS) // NUM_QUERY_ROWS
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < PART_DIM
    scale = head_scale(scale, key_scale_ptr, head)
    key = tl.arange(0, TILE_KEYS)
    num_tiles = tl.load(num_tiles_ptr, cache_modifier=".cg")
    share = tl.program_id(1)
    tile_index = next_partition(
        tiles_ptr, num_tiles * share // tl.num_programs(1), num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    end_index = next_partition(
        tiles_ptr, num_tiles * (share + 1) // tl.num_programs(1), num_tiles,
        WINDOW, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    while tile_index < end_index:
        # The share's tiles of one sequence, or of the prefix that companions share.
        tile_ptr = tiles_ptr + tile_index * TILE_WORDS
        # The sequence of each query row, -1 of rows without one.
        if NUM_COMPANIONS == 1:
            sequence = tl.load(tile_ptr + TILE_SEQUENCE, cache_modifier=".cg")
            is_row = companion == 0
        else:
            companion_ptrs = tile_ptr + TILE_COMPANIONS + companion
            has_place = companion < NUM_COMPANIONS
            sequence = tl.load(companion_ptrs, mask=has_place, other=-1, cache_modifier=".cg")
            is_row = sequence >= 0
        slot = tl.load(tile_ptr + TILE_SLOT, cache_modifier=".cg")
        num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, cache_modifier=".cg")
        sequence_key = tl.load(tile_ptr + TILE_FIRST_KEY, cache_modifier=".cg")
        num_own_tiles = tl.minimum(
            end_index - tile_index, (num_keys - sequence_key + TILE_KEYS - 1) // TILE_KEYS
        )
        row = sequence * ROWS_PER_SEQUENCE + query_row // GROUP_SIZE
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1, cache_modifier=".cg")
        first_seen = FIRST_KEY
        if WINDOW > 0:
            # Keys that no row sees are not loaded: they may hold anything.
            first_position = tl.min(tl.where(is_live, last_position, 0x7FFFFFFF), 0)
            first_seen = tl.maximum(first_position - (WINDOW - 1), FIRST_KEY)
        query_index = (row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE
        query_mask = is_live[:, None] & is_dim[None, :]
        if not BESIDE_CHUNKS:
            wait_for_producers(PDL)
            if num_tiles <= EARLY_TILES * tl.num_programs(1):
                start_dependents(PDL)
        query_ptrs = query_ptr + query_index[:, None] * HEAD_DIM + dim[None, :]
        queries = load_parts(query_ptrs, query_mask, PART_DIM, NUM_PARTS, CACHE)
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_sum = (sequence * NUM_KV_HEADS + head) * num_partitions * NUM_QUERY_ROWS + query_row
        if WINDOW > 0:  # the first place is that of the first partition that a row sees
            first_sum -= partition_of(first_seen, NARROW, NARROW_END, NUM_DOUBLINGS) * NUM_QUERY_ROWS
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for tile in tl.range(0, num_own_tiles, num_stages=NUM_STAGES):
            first_key = sequence_key + tile * TILE_KEYS
            position = first_key + key
            is_key = position < num_keys
            if FIRST_KEY > 0 or WINDOW > 0:
                is_key = is_key & (position >= first_seen)
            key_mask = is_key[:, None] & is_dim[None, :]
            cache_offset = offset_in_cache(
                table_ptr, first_key, key, position, num_keys, head, dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, CACHE,
            )  # fmt: skip
            keys = tl.load(keys_ptr + cache_offset, mask=key_mask, other=0, cache_modifier=CACHE)
            values = tl.load(values_ptr + cache_offset, mask=key_mask, other=0, cache_modifier=CACHE)
            is_seen = position[None, :] <= last_position[:, None]
            if FIRST_KEY > 0:
                is_seen = is_seen & (position >= FIRST_KEY)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > last_position[:, None] - WINDOW)
            maximum, weight, total = attend_tile(
                maximum, weight, total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )
            partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
            if (first_key + TILE_KEYS >= next_start) | (first_key + TILE_KEYS >= num_keys):
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

    wait_for_producers(PDL)  # every CTA waits before it ends, also one without a tile
    start_dependents(PDL)


def paged_attention(
    layer: LayerAttention,
    rows: PlannedRows,
    scratch: AttentionScratch,
    config: AttentionConfig,
    *,
    beside_chunks: bool = False,
) -> None:
    """Attention of rows to the positions they see, in `layer.out`.

    rows: those that `scratch.plan` was made of, which has the layer's window. Rows of slot -1 get zeros.
    beside_chunks: True only if the launch directly before was attention of prompts in CUDA C++, of other rows
    of the step.
    The first key lies in the first tile. All tensors are contiguous. Raises ValueError for another shape,
    type or layout.
    """
    plan = scratch.plan
    layer.check(max_first_key=plan.partitions.tile - 1)
    scratch.check(layer, rows)
    num_kv_heads = layer.kv.num_heads
    _attend[(num_kv_heads, max(1, config.num_programs // num_kv_heads))](
        tiles_ptr=plan.tiles,
        num_tiles_ptr=plan.num_tiles,
        max_blocks=layer.block_table.shape[1],
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        GROUP_SIZE=layer.group,
        TILE_ROWS=padded_size(rows.rows_per_sequence * layer.group),
        NUM_COMPANIONS=most_companions(rows, layer.group, plan.window),
        NUM_STAGES=config.num_stages,
        FIRST_KEY=layer.first_key,
        TILE_KEYS=plan.partitions.tile,
        BESIDE_CHUNKS=beside_chunks and uses_pdl(),
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **layer.kernel_arguments(),
        **scratch.kernel_arguments(rows),
        **launch_options(),
    )
    add_partitions(layer, rows, scratch)
