"""Attention of all heads to one latent of each token, over a paged cache: of rows that are decoded or
verified, and of chunks of prompts, with the same bits.

    score[r, h, p] = (query[r, h] . key[p]) * scale                          for positions p <= position[r]
    out[r, h] = sum over p of softmax(score[r, h])[p] * key[p][:LATENT_DIM]

A key is the latent and, behind it, the part that is rotated; values are the latents. See `LatentAttention`
in spec/model.py.

Order of summation: that of softmax.py, with the products of queries and latents before those of the rotated
parts. Where `_attend_latents` leaves the sums of partitions, decode.py adds them.

Bytes: the latents and rotated parts that some row sees, (LATENT_DIM + ROTARY_DIM) numbers each, once for all
rows of a sequence and all heads of a tile of query rows; further tiles find them in the L2 cache. Flops:
2 * (2 * LATENT_DIM + ROTARY_DIM) for each query row and key. For a decoded row of GLM-4.7-Flash (20 heads)
that is 38 flops a byte in bfloat16, far below the 206 of an H200, which is bound by its memory then; for
DeepSeek-V3 (128 heads) 242.

Grid of `_attend_latents`: (tiles of query rows, shares). Program (t, s) owns query rows of tile t, each of
which is a row of the step with one head, and the s-th share of the plan's tiles of keys. A tile of keys is
loaded once, for scores and sums.

Grid of `_attend_prompts`: (heads, tiles of rows, parts of a tile). A program owns some rows of one chunk with
one head. It keeps the sums of a partition apart from those of the partitions before, which takes the
registers of 32 rows.

Dependent launch: both wait before they read queries and keys. `_attend_latents` reads the plan and the rows
before, which are older than the kernels that make queries and keys. They permit their dependents to start at
their ends.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.decode import AttentionScratch, add_partitions
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
from drift_sdk._kernels.attention.prefill import TILE_FIELDS
from drift_sdk._kernels.attention.softmax import (
    ONES_COLUMNS,
    Partitions,
    add_partition,
    partition_of,
    partition_start,
)
from drift_sdk._kernels.launch.arguments import cdiv, check_tensor
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

NUM_FIELDS = tl.constexpr(TILE_FIELDS)

MIN_TILE_ROWS, MAX_TILE_ROWS, MAX_PROMPT_ROWS, MAX_FLOAT32_ROWS = 16, 64, 32, 16
"""Rows of a tile, least and most: of `_attend_latents`, whose sums take 128 registers of each of 256 threads;
of `_attend_prompts`, which has two such sums; and of either in float32, for which there is shared memory."""
SHARED_RESERVE = 16 * 1024
"""Bytes of shared memory beside queries and tiles of keys: probabilities, and changes of layout."""


class LatentConfig(Struct, frozen=True, kw_only=True):
    """Launch configuration of a kernel; none of it is part of the result's bits.

    tile_rows: query rows of a program, a power of two. num_stages: of Triton's pipeline over tiles of keys.
    """

    tile_rows: int
    num_warps: int
    num_stages: int


def latent_config(
    most_rows: int, num_query_rows: int, head_dim: int, dtype: torch.dtype, tile_keys: int
) -> LatentConfig:
    """Return the configuration for tiles of at most `most_rows` query rows on the current GPU.

    Raises ValueError if its shared memory has no room for a tile of keys beside the fewest queries.
    """
    most = MAX_FLOAT32_ROWS if dtype == torch.float32 else most_rows
    tile_rows = min(padded_size(num_query_rows), most)
    row_bytes = head_dim * dtype.itemsize
    room = gpu_limits().shared_bytes - SHARED_RESERVE
    while tile_rows > MIN_TILE_ROWS and (tile_rows + tile_keys) * row_bytes > room:
        tile_rows //= 2
    num_stages = (room - tile_rows * row_bytes) // (tile_keys * row_bytes)
    if num_stages < 1:
        needed = (tile_rows + tile_keys) * row_bytes + SHARED_RESERVE
        raise ValueError(
            f"head_dim={head_dim} in {dtype}: {needed} bytes of shared memory: expected at most "
            f"{gpu_limits().shared_bytes}"
        )

    return LatentConfig(
        tile_rows=tile_rows,
        num_warps=8 if 2 * tile_rows > most_rows and tile_rows > MIN_TILE_ROWS else 4,
        num_stages=min(num_stages, 2),
    )


@device_function
def _load_keys(
    keys_ptr,  # [num_blocks, KV_BLOCK_SIZE, HEAD_DIM]
    table_ptr,  # [max_blocks] int32: the block table's row of a slot
    first_key,  # position of the tile's first key, a multiple of TILE_KEYS
    num_keys,  # keys from this position on may never have been written
    HEAD_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,  # whether keys of the tile may lie beyond num_keys
):
    """Return the latents [TILE_KEYS, PADDED_LATENT] and the rotated parts [TILE_KEYS, PADDED_ROTARY] of a
    tile of keys, zeros where there is none."""
    dim, rotary = tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_ROTARY)
    key = tl.arange(0, TILE_KEYS)
    position = first_key + key
    if KV_BLOCK_SIZE >= TILE_KEYS:  # a tile lies in one block, and is contiguous in it
        block = tl.load(table_ptr + first_key // KV_BLOCK_SIZE).to(tl.int64)
        offset = (block * KV_BLOCK_SIZE + first_key % KV_BLOCK_SIZE) * HEAD_DIM + key[:, None] * HEAD_DIM
    else:
        block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=position < num_keys, other=0).to(tl.int64)
        offset = ((block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE) * HEAD_DIM)[:, None]
    latent_ptrs = keys_ptr + (offset + dim[None, :])
    rotary_ptrs = keys_ptr + (offset + LATENT_DIM + rotary[None, :])
    if IS_MASKED:
        is_key = (position < num_keys)[:, None]
        latents = tl.load(latent_ptrs, mask=is_key & (dim < LATENT_DIM)[None, :], other=0.0)
        rotated = tl.load(rotary_ptrs, mask=is_key & (rotary < HEAD_DIM - LATENT_DIM)[None, :], other=0.0)
    elif LATENT_DIM < PADDED_LATENT or HEAD_DIM - LATENT_DIM < PADDED_ROTARY:
        latents = tl.load(latent_ptrs, mask=(dim < LATENT_DIM)[None, :], other=0.0)
        rotated = tl.load(rotary_ptrs, mask=(rotary < HEAD_DIM - LATENT_DIM)[None, :], other=0.0)
    else:
        latents = tl.load(latent_ptrs)
        rotated = tl.load(rotary_ptrs)
    return latents, rotated


@device_function
def _attend_tile(
    maximum,  # [TILE_ROWS] fp32: highest score so far (times log2(e)); -inf at the partition's start
    weight,  # [TILE_ROWS, ONES_COLUMNS] fp32: sum of exp2(score - maximum), in every column
    total,  # [TILE_ROWS, PADDED_LATENT] fp32: sum of exp2(score - maximum) * latent
    query,  # [TILE_ROWS, PADDED_LATENT], storage type
    rotated_query,  # [TILE_ROWS, PADDED_ROTARY]
    latents,  # [TILE_KEYS, PADDED_LATENT]; zeros where there is no key
    rotated,  # [TILE_KEYS, PADDED_ROTARY]
    is_seen,  # [TILE_ROWS, TILE_KEYS]: which keys a row sees; not read without IS_MASKED
    scale,  # of scores, times log2(e)
    IS_MASKED: tl.constexpr,
):
    """Return maximum, weight and total with a tile of keys taken in: the steps of `attend_tile` of
    softmax.py."""
    score = tl.dot(query, latents.T, input_precision="ieee")
    score = tl.dot(rotated_query, rotated.T, score, input_precision="ieee")
    if IS_MASKED:
        score = tl.where(is_seen, score, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(score, 1) * scale)
    reference = new_maximum
    if IS_MASKED:
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.exp2(maximum - reference)
    probability = tl.exp2(tl.fma(score, scale, -reference[:, None])).to(query.dtype)
    ones = tl.full((latents.shape[0], ONES_COLUMNS), 1.0, query.dtype)
    weight = tl.dot(probability, ones, weight * rescale[:, None], input_precision="ieee")
    total = tl.dot(probability, latents, total * rescale[:, None], input_precision="ieee")
    return new_maximum, weight, total


EARLY_TILES = tl.constexpr(2)
"""Up to so many tiles for each share, `_attend_latents` permits its dependents to start before it
computes."""


@kernel(
    do_not_specialize=["num_partitions", "max_blocks"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _attend_latents(
    query_ptr,  # [R, NUM_HEADS, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, 1, KV_BLOCK_SIZE, HEAD_DIM], storage type
    block_table_ptr,  # [S, max_blocks] int32
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32: the last position that a row sees
    tiles_ptr,  # [max_num_tiles, TILE_WORDS] int32
    num_tiles_ptr,  # [1] int32
    sums_ptr,  # [num_sequences, 1, num_partitions, query rows, LATENT_DIM] fp32
    maxima_ptr,  # [num_sequences, 1, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    scale,  # of scores, times log2(e)
    num_partitions,  # for which sums have room, of each sequence
    max_blocks,
    ROWS_PER_SEQUENCE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PADDED_LATENT: tl.constexpr,  # LATENT_DIM, rounded up to a power of two, 16 or more
    PADDED_ROTARY: tl.constexpr,  # HEAD_DIM - LATENT_DIM, rounded up likewise
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,  # NARROW, NARROW_END, NUM_DOUBLINGS: see `Partitions`
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of query rows, share): the tiles of a share, one sequence after the other. Longer than
    other kernels: one loop over sums that stay in registers."""
    NUM_QUERY_ROWS: tl.constexpr = ROWS_PER_SEQUENCE * NUM_HEADS
    query_row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = query_row < NUM_QUERY_ROWS
    dim, rotary = tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_ROTARY)
    num_tiles = tl.load(num_tiles_ptr, cache_modifier=".cg")
    share = tl.program_id(1)
    tile_index = next_partition(
        tiles_ptr, num_tiles * share // tl.num_programs(1), num_tiles,
        0, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    end_index = next_partition(
        tiles_ptr, num_tiles * (share + 1) // tl.num_programs(1), num_tiles,
        0, TILE_KEYS, NARROW, NARROW_END, NUM_DOUBLINGS,
    )  # fmt: skip
    while tile_index < end_index:
        tile_ptr = tiles_ptr + tile_index * TILE_WORDS  # of the share's tiles of one sequence
        sequence = tl.load(tile_ptr + TILE_SEQUENCE, cache_modifier=".cg")
        slot = tl.load(tile_ptr + TILE_SLOT, cache_modifier=".cg")
        num_keys = tl.load(tile_ptr + TILE_NUM_KEYS, cache_modifier=".cg")
        sequence_key = tl.load(tile_ptr + TILE_FIRST_KEY, cache_modifier=".cg")
        num_own_tiles = tl.minimum(
            end_index - tile_index, (num_keys - sequence_key + TILE_KEYS - 1) // TILE_KEYS
        )
        row = sequence * ROWS_PER_SEQUENCE + query_row // NUM_HEADS
        is_live = tl.load(row_slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        last_position = tl.load(row_position_ptr + row, mask=is_live, other=-1, cache_modifier=".cg")
        wait_for_producers(PDL)
        if num_tiles <= EARLY_TILES * tl.num_programs(1):
            start_dependents(PDL)
        query_ptrs = query_ptr + (row.to(tl.int64) * NUM_HEADS + query_row % NUM_HEADS)[:, None] * HEAD_DIM
        latent_mask = is_live[:, None] & (dim < LATENT_DIM)[None, :]
        rotary_mask = is_live[:, None] & (rotary < HEAD_DIM - LATENT_DIM)[None, :]
        query = tl.load(query_ptrs + dim[None, :], mask=latent_mask, other=0.0)
        rotated_query = tl.load(query_ptrs + LATENT_DIM + rotary[None, :], mask=rotary_mask, other=0.0)
        table_ptr = block_table_ptr + slot.to(tl.int64) * max_blocks
        first_sum = sequence * num_partitions * NUM_QUERY_ROWS + query_row
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        total = tl.zeros((TILE_ROWS, PADDED_LATENT), tl.float32)
        for tile in tl.range(0, num_own_tiles, num_stages=NUM_STAGES):
            first_key = sequence_key + tile * TILE_KEYS
            latents, rotated = _load_keys(
                keys_ptr, table_ptr, first_key, num_keys,
                HEAD_DIM, LATENT_DIM, PADDED_LATENT, PADDED_ROTARY, KV_BLOCK_SIZE, TILE_KEYS, True,
            )  # fmt: skip
            is_seen = (first_key + tl.arange(0, TILE_KEYS))[None, :] <= last_position[:, None]
            maximum, weight, total = _attend_tile(
                maximum, weight, total, query, rotated_query, latents, rotated, is_seen, scale, True
            )
            partition = partition_of(first_key, NARROW, NARROW_END, NUM_DOUBLINGS)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
            if (first_key + TILE_KEYS >= next_start) | (first_key + TILE_KEYS >= num_keys):
                # The partition's last tile: store its sums, and start the next partition.
                sum_index = first_sum + partition * NUM_QUERY_ROWS
                sum_ptrs = sums_ptr + sum_index.to(tl.int64)[:, None] * LATENT_DIM + dim[None, :]
                tl.store(sum_ptrs, total, mask=is_row[:, None] & (dim < LATENT_DIM)[None, :])
                tl.store(maxima_ptr + sum_index, maximum, mask=is_row)
                tl.store(weights_ptr + sum_index, tl.max(weight, 1), mask=is_row)
                maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
                total = tl.zeros((TILE_ROWS, PADDED_LATENT), tl.float32)

        tile_index += num_own_tiles

    wait_for_producers(PDL)  # every CTA waits before it ends, also one without a tile
    start_dependents(PDL)


@kernel
def _attend_prompts(
    query_ptr,  # [N, NUM_HEADS, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, 1, KV_BLOCK_SIZE, HEAD_DIM], storage type
    block_table_ptr,  # [S, max_blocks] int32; table_stride from slot to slot
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32
    output_ptr,  # [N, NUM_HEADS, LATENT_DIM], storage type
    scale,  # of scores, times log2(e)
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, tile of rows, part of it). Tiles of keys that all rows see come first, then those that
    reach to the diagonal or beyond. Longer than other kernels: a loop for each kind, over sums that stay in
    registers."""
    wait_for_producers(PDL)
    head = tl.program_id(0)
    tiles_ptr += tl.program_id(1) * NUM_FIELDS
    slot = tl.load(tiles_ptr)
    first = tl.program_id(2) * TILE_ROWS
    num_rows = tl.load(tiles_ptr + 2) - first
    if (slot < 0) | (num_rows <= 0):
        return

    first_row = (tl.load(tiles_ptr + 1) + first).to(tl.int64)
    start = tl.load(tiles_ptr + 3) + first
    row = tl.arange(0, TILE_ROWS)
    dim, rotary = tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_ROTARY)
    is_row = (row < num_rows)[:, None]
    query_ptrs = query_ptr + ((first_row + row) * NUM_HEADS + head)[:, None] * HEAD_DIM
    query = tl.load(query_ptrs + dim[None, :], mask=is_row & (dim < LATENT_DIM)[None, :], other=0.0)
    rotary_mask = is_row & (rotary < HEAD_DIM - LATENT_DIM)[None, :]
    rotated_query = tl.load(query_ptrs + LATENT_DIM + rotary[None, :], mask=rotary_mask, other=0.0)
    num_keys = start + tl.minimum(num_rows, TILE_ROWS)
    # The first row's last key is the last that all rows see.
    diagonal = (start + 1) // TILE_KEYS * TILE_KEYS
    table_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_ROWS,), tl.float32)
    total = tl.zeros((TILE_ROWS, PADDED_LATENT), tl.float32)
    partition = 0
    begin = 0
    while begin < num_keys:
        partition += 1
        end = partition_start(partition, NARROW, NARROW_END, NUM_DOUBLINGS)
        part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        part_total = tl.zeros((TILE_ROWS, PADDED_LATENT), tl.float32)
        for first_key in tl.range(begin, tl.minimum(end, diagonal), TILE_KEYS, num_stages=NUM_STAGES):
            latents, rotated = _load_keys(
                keys_ptr, table_ptr, first_key, num_keys,
                HEAD_DIM, LATENT_DIM, PADDED_LATENT, PADDED_ROTARY, KV_BLOCK_SIZE, TILE_KEYS, False,
            )  # fmt: skip
            part_maximum, part_weight, part_total = _attend_tile(
                part_maximum, part_weight, part_total, query, rotated_query, latents, rotated, None, scale,
                False,
            )  # fmt: skip
        masked_end = tl.minimum(end, num_keys)
        for first_key in tl.range(tl.maximum(begin, diagonal), masked_end, TILE_KEYS, num_stages=1):
            latents, rotated = _load_keys(
                keys_ptr, table_ptr, first_key, num_keys,
                HEAD_DIM, LATENT_DIM, PADDED_LATENT, PADDED_ROTARY, KV_BLOCK_SIZE, TILE_KEYS, True,
            )  # fmt: skip
            is_seen = (first_key + tl.arange(0, TILE_KEYS))[None, :] <= (start + row)[:, None]
            part_maximum, part_weight, part_total = _attend_tile(
                part_maximum, part_weight, part_total, query, rotated_query, latents, rotated, is_seen, scale,
                True,
            )  # fmt: skip
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )
        begin = end

    start_dependents(PDL)
    # Every row that exists has seen a key; what is divided by here for the others is not stored.
    result = total / tl.where(row < num_rows, weight, 1.0)[:, None]
    output_ptrs = output_ptr + ((first_row + row) * NUM_HEADS + head)[:, None] * LATENT_DIM + dim[None, :]
    tl.store(output_ptrs, result.to(query.dtype), mask=is_row & (dim < LATENT_DIM)[None, :])


def latent_attention(layer: LayerAttention, rows: PlannedRows, scratch: AttentionScratch) -> None:
    """Attention of rows to the positions they see, in `layer.out`.

    layer: with latents, without window, sinks and a first key. rows: those that `scratch.plan` was made of,
    without shared prefixes. Rows of slot -1 get zeros. All tensors are contiguous. Raises ValueError for
    another shape, type or layout, and for a GPU without room for a tile of keys.
    """
    plan, num_query_rows = scratch.plan, rows.rows_per_sequence * layer.num_heads
    _check(layer)
    scratch.check(layer, rows)
    config = latent_config(
        MAX_TILE_ROWS, num_query_rows, layer.head_dim, layer.query.dtype, plan.partitions.tile
    )
    num_row_tiles = cdiv(num_query_rows, config.tile_rows)
    num_shares = max(1, gpu_limits().num_multiprocessors // num_row_tiles)
    _attend_latents[(num_row_tiles, num_shares)](
        query_ptr=layer.query,
        keys_ptr=layer.kv.keys,
        block_table_ptr=layer.block_table,
        tiles_ptr=plan.tiles,
        num_tiles_ptr=plan.num_tiles,
        scale=layer.log2_scale,
        max_blocks=layer.block_table.shape[1],
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        TILE_KEYS=plan.partitions.tile,
        **_constants(layer, config),
        **scratch.kernel_arguments(rows),
        **launch_options(),
    )
    add_partitions(layer, rows, scratch)


def latent_prompt_attention(
    layer: LayerAttention, tiles: Tensor, tile_rows: int, partitions: Partitions
) -> None:
    """Attention of the rows of `tiles` to the positions they see, in `layer.out`.

    layer: as of `latent_attention`; rows of its block table may have any stride. tiles: as of
    `prefill_attention`, of at most `tile_rows` rows each. partitions: those of `latent_attention`, for equal
    bits. Raises ValueError likewise.
    """
    _check(layer)
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    config = latent_config(MAX_PROMPT_ROWS, tile_rows, layer.head_dim, layer.query.dtype, partitions.tile)
    _attend_prompts[(layer.num_heads, tiles.shape[0], cdiv(tile_rows, config.tile_rows))](
        query_ptr=layer.query,
        keys_ptr=layer.kv.keys,
        block_table_ptr=layer.block_table,
        tiles_ptr=tiles,
        output_ptr=layer.out,
        scale=layer.log2_scale,
        table_stride=layer.block_table.stride(0),
        TILE_KEYS=partitions.tile,
        NARROW=partitions.narrow,
        NARROW_END=partitions.narrow_end,
        NUM_DOUBLINGS=partitions.num_doublings,
        **_constants(layer, config),
        **launch_options(),
    )


def _check(layer: LayerAttention) -> None:
    layer.check(max_first_key=0)
    if not layer.kv.latent_dim or layer.window or layer.sinks is not None:
        raise ValueError("layer: expected latents, and neither a window nor sinks")


def _constants(layer: LayerAttention, config: LatentConfig) -> dict[str, int | bool]:
    """The compile-time arguments of either kernel."""
    return {
        "NUM_HEADS": layer.num_heads,
        "HEAD_DIM": layer.head_dim,
        "LATENT_DIM": layer.value_dim,
        "PADDED_LATENT": padded_size(layer.value_dim),
        "PADDED_ROTARY": padded_size(layer.head_dim - layer.value_dim),
        "KV_BLOCK_SIZE": layer.kv.block_size,
        "TILE_ROWS": config.tile_rows,
        "NUM_STAGES": config.num_stages,
        "PDL": uses_pdl(),
        "num_warps": config.num_warps,
    }
