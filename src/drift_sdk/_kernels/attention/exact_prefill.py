"""Causal attention of prompt chunks over a paged cache, with the bits of decoding.

    output[r, h] = softmax over p <= position[r] of (query[r, h] . key[p] * scale) . value[p]

With a window w, a row sees only the last w of these positions. A sink is one more score in the softmax, whose
value is zero.

Order of summation: that of softmax.py, as `paged_attention` sums. A prompt's rows get the bits that
they have when they are decoded or verified, however the prompt is cut into chunks. `prefill_attention` is
faster (it does not keep the sums of partitions apart) and has other bits.

Grid: (heads, tiles of rows). Program (h, t) owns query head h of the rows of tile t, at most TILE_ROWS rows
of one chunk. Heads run first, so that programs which share keys run together.

Flops: 4 * num_heads * head_dim for each pair of a row and a key it sees, and an eighth of that for the
denominator, which is a product with 16 columns of ones. Bytes: as `prefill_attention`.

Dependent launch: a program waits before it reads anything, and permits its dependents to start when only the
store of its rows is left.

Wide heads have a kernel of their own. Sums of 32 rows of 512 dimensions, of a partition and of all before it,
take half of the registers of a multiprocessor. So a program owns some rows of a tile, and some dimensions of
their values: it computes the scores from all dimensions of queries and keys, as other programs do.

Grid: (heads times shares of the values, tiles of rows times parts of a tile). Flops: of the scores, those of
one program times the shares.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.cache import decode_pairs, offset_in_cache
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.prefill import TILE_FIELDS, cuda_prefill_attention, has_cuda_prefill
from drift_sdk._kernels.attention.softmax import (
    ONES_COLUMNS,
    WIDE_HEAD,
    Partitions,
    add_partition,
    add_sink,
    attend_tile,
    head_scale,
    load_parts,
    multiply_parts,
    partition_of,
    partition_start,
    zero_parts,
)
from drift_sdk._kernels.launch.arguments import cdiv, check_range, check_tensor
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

WIDE_SHARED_BYTES = 107_000
"""Shared memory that 64 rows of heads of 256 dimensions take, rounded up; compute capability 8.6 has less."""

WIDE_FLOAT32_SHARED_BYTES = 147_456
"""Shared memory that 16 rows of heads of 256 dimensions take in float32."""

PART_ROWS, VALUE_SHARES = 32, 2
"""Of wide heads: most rows of a program, and programs that divide the dimensions of values. With a cache of
e4m3 there are two of these, for the two codes of a word. So a thread of 8 warps keeps all that it needs in
188 registers; with all dimensions it would need more than there are, 255. Neither changes a bit."""
WIDE_STAGES, WIDE_HEAD_WARPS = 3, 8


class ExactPrefillConfig(Struct, frozen=True):
    """Launch configuration of the kernel; none of it is part of the result's bits.

    tile_rows: rows of a program, a power of two, 16 or more.
    num_stages: of the pipeline over a partition's tiles. Keys are found through the block table, so stages
    serve two loads one after the other: five of them keep three tiles in shared memory.
    narrow_stages: of the pipeline over narrow partitions, each of which is loaded whole.
    """

    tile_rows: int = 128
    num_warps: int = 8
    num_stages: int = 5
    narrow_stages: int = 3


FEW_ROWS = 256
"""Most rows of a step for which tiles are halved: wide ones would leave multiprocessors without a program."""


def exact_prefill_config(
    head_dim: int, dtype: torch.dtype, num_rows: int | None = None
) -> ExactPrefillConfig:
    """Return the config for heads of this size: what fits in registers and shared memory without spilling.

    num_rows: of all chunks of a step; None: many. In a model with heads of several sizes, the config of the
    largest serves all: it has the fewest rows. Wide heads take tiles of any number of rows.
    """
    if dtype == torch.float32:
        return ExactPrefillConfig(tile_rows=16, num_stages=1, narrow_stages=1)

    if head_dim > 128 and gpu_limits().shared_bytes < WIDE_SHARED_BYTES:
        return ExactPrefillConfig(tile_rows=32, num_warps=4, num_stages=3, narrow_stages=1)

    if head_dim > 128:
        return ExactPrefillConfig(tile_rows=64, num_stages=3, narrow_stages=1)

    if num_rows is not None and num_rows <= FEW_ROWS:
        return ExactPrefillConfig(tile_rows=64, num_warps=4)

    return ExactPrefillConfig()


@device_function
def _load_tile(
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    table_ptr,  # [max_blocks] int32: the block table's row of a slot
    first_key,  # position of the tile's first key, a multiple of TILE_KEYS
    num_keys,  # keys from this position on may never have been written
    head,  # KV head
    NUM_KV_HEADS: tl.constexpr,
    PART_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,  # whether keys of the tile may lie beyond num_keys
):
    """Return a tile of keys and of values [TILE_KEYS, PADDED_DIM] as in the cache, zeros where there is
    none."""
    dim = tl.arange(0, PADDED_DIM)
    position = first_key + tl.arange(0, TILE_KEYS)
    if KV_BLOCK_SIZE >= TILE_KEYS:
        block = tl.load(table_ptr + first_key // KV_BLOCK_SIZE).to(tl.int64)
        tile_offset = ((block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + first_key % KV_BLOCK_SIZE) * PART_DIM
        row_offset = tl.arange(0, TILE_KEYS) * PART_DIM
    else:
        block = tl.load(table_ptr + position // KV_BLOCK_SIZE, mask=position < num_keys, other=0).to(tl.int64)
        tile_offset = 0
        row_offset = ((block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE) * PART_DIM
    cache_offset = tile_offset + (row_offset[:, None] + dim[None, :])
    if IS_MASKED:
        mask = (position < num_keys)[:, None] & (dim < PART_DIM)[None, :]
        keys = tl.load(keys_ptr + cache_offset, mask=mask, other=0)
        values = tl.load(values_ptr + cache_offset, mask=mask, other=0)
    elif PART_DIM < PADDED_DIM:
        keys = tl.load(keys_ptr + cache_offset, mask=(dim < PART_DIM)[None, :], other=0)
        values = tl.load(values_ptr + cache_offset, mask=(dim < PART_DIM)[None, :], other=0)
    else:
        keys = tl.load(keys_ptr + cache_offset)
        values = tl.load(values_ptr + cache_offset)
    return keys, values


@kernel
def _exact_prefill_attention(
    query_ptr,  # [N, NUM_HEADS, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    value_scale_ptr,  # as key_scale_ptr
    block_table_ptr,  # [S, max_blocks] int32; table_stride from slot to slot
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32
    sinks_ptr,  # [NUM_HEADS], storage type, or None
    output_ptr,  # [N, NUM_HEADS * HEAD_DIM], storage type
    scale,  # of scores, times log2(e)
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # those of a part, padded
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,  # NARROW, NARROW_END, NUM_DOUBLINGS: see `Partitions`
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    NUM_STAGES: tl.constexpr,  # of the pipeline over tiles
    NARROW_STAGES: tl.constexpr,  # of the pipeline over narrow partitions
    PDL: tl.constexpr,
):
    """Program (head, tile of rows), in the order of summation of softmax.py.

    Three kinds of partitions, in ascending order: narrow ones that all rows see, a loop whose pipeline spans
    the partitions; wider ones, from NARROW_END on, that all rows see; and those that reach to the diagonal or
    beyond. With a window, all partitions from the first row's first key on are of the last kind, and every
    tile is masked.

    Longer than other kernels: a loop for each kind, over sums that stay in registers.
    """
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    wait_for_producers(PDL)
    head = tl.program_id(0)
    tiles_ptr += tl.program_id(1) * NUM_FIELDS
    slot = tl.load(tiles_ptr)
    if slot < 0:
        return

    first_row = tl.load(tiles_ptr + 1).to(tl.int64)
    num_rows = tl.load(tiles_ptr + 2)
    start = tl.load(tiles_ptr + 3)
    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    row_mask = (row < num_rows)[:, None] & (dim < PART_DIM)[None, :]
    query_ptr += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    query_ptrs = query_ptr + row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :]
    queries = load_parts(query_ptrs, row_mask, PART_DIM, NUM_PARTS, "")
    num_keys = start + num_rows
    # The first row's last key is the last that all rows see.
    diagonal = (start + 1) // TILE_KEYS * TILE_KEYS
    if WINDOW > 0:
        diagonal = start * 0
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    scale = head_scale(scale, key_scale_ptr, kv_head)
    table_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_ROWS,), tl.float32)
    total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)

    # With a window, `diagonal` is 0, and neither of these two loops runs.
    narrow_end = tl.minimum(diagonal, NARROW_END) // NARROW * NARROW
    for begin in tl.range(0, narrow_end, NARROW, num_stages=NARROW_STAGES):
        part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        part_total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for tile in tl.static_range(NARROW // TILE_KEYS):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, begin + tile * TILE_KEYS, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, KV_BLOCK_SIZE, TILE_KEYS, False,
            )  # fmt: skip
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, None, scale, False, IN_PAIRS
            )
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )

    diagonal_partition = partition_of(diagonal, NARROW, NARROW_END, NUM_DOUBLINGS)
    for partition in range(NARROW_END // NARROW, diagonal_partition):
        begin = partition_start(partition, NARROW, NARROW_END, NUM_DOUBLINGS)
        end = partition_start(partition + 1, NARROW, NARROW_END, NUM_DOUBLINGS)
        part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        part_total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for first_key in tl.range(begin, end, TILE_KEYS, num_stages=NUM_STAGES):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, first_key, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, KV_BLOCK_SIZE, TILE_KEYS, False,
            )  # fmt: skip
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, None, scale, False, IN_PAIRS
            )
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )

    partition = diagonal_partition
    first_tile = 0
    if WINDOW > 0:
        first_seen = tl.maximum(start - (WINDOW - 1), 0)
        first_tile = first_seen // TILE_KEYS * TILE_KEYS
        partition = partition_of(first_seen, NARROW, NARROW_END, NUM_DOUBLINGS)
    begin = partition_start(partition, NARROW, NARROW_END, NUM_DOUBLINGS)
    while begin < num_keys:
        partition += 1
        end = partition_start(partition, NARROW, NARROW_END, NUM_DOUBLINGS)
        part_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE_ROWS, ONES_COLUMNS), tl.float32)
        part_total = zero_parts(TILE_ROWS, PADDED_DIM, NUM_PARTS)
        for first_key in tl.range(begin, tl.minimum(end, diagonal), TILE_KEYS, num_stages=NUM_STAGES):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, first_key, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, KV_BLOCK_SIZE, TILE_KEYS, False,
            )  # fmt: skip
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, None, scale, False, IN_PAIRS
            )
        masked_end = tl.minimum(end, num_keys)
        masked_begin = tl.maximum(tl.maximum(begin, diagonal), first_tile)
        for first_key in tl.range(masked_begin, masked_end, TILE_KEYS, num_stages=1):
            keys, values = _load_tile(
                keys_ptr, values_ptr, table_ptr, first_key, num_keys, kv_head,
                NUM_KV_HEADS, PART_DIM, PADDED_DIM, KV_BLOCK_SIZE, TILE_KEYS, True,
            )  # fmt: skip
            position = (first_key + tl.arange(0, TILE_KEYS))[None, :]
            is_seen = position <= (start + row)[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (position > (start + row)[:, None] - WINDOW)
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )
        begin = end

    if sinks_ptr is not None:
        rescale, weight = add_sink(maximum, weight, tl.load(sinks_ptr + head).to(tl.float32))
        total = multiply_parts(total, rescale[:, None])
    if value_scale_ptr is not None:
        total = multiply_parts(total, tl.load(value_scale_ptr + kv_head))
    start_dependents(PDL)
    # Every row that exists has seen a key; what is divided by here for the others is not stored.
    weight = tl.where(row < num_rows, weight, 1.0)
    output_ptr += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    output_ptrs = output_ptr + row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :]
    for part in tl.static_range(NUM_PARTS):
        result = (total[part] / weight[:, None]).to(DTYPE)
        tl.store(output_ptrs + part * PART_DIM, result, mask=row_mask)


@kernel
def _wide_prefill_attention(
    query_ptr,  # [N, NUM_HEADS, HEAD_DIM], storage type; rows have a stride
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    value_scale_ptr,  # as key_scale_ptr
    block_table_ptr,  # [S, max_blocks] int32; rows have a stride
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32
    sinks_ptr,  # [NUM_HEADS], storage type, or None
    output_ptr,  # [N, NUM_HEADS * HEAD_DIM], storage type
    scale,  # of scores, times log2(e)
    query_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # dimensions of a part, rounded up to a power of two
    VALUE_DIM: tl.constexpr,  # dimensions of the values of a program; with e4m3, a part
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_TILE_PARTS: tl.constexpr,  # programs that divide the rows of a tile
    PART_ROWS: tl.constexpr,  # rows of a program
    TILE_KEYS: tl.constexpr,
    NARROW: tl.constexpr,  # NARROW, NARROW_END, NUM_DOUBLINGS: see `Partitions`
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    NUM_STAGES: tl.constexpr,  # of the pipeline over the tiles of a partition
    PDL: tl.constexpr,
):
    """Program (head and share of the values, part of a tile of rows), in the order of softmax.py.

    Every tile of keys is masked. Longer than other kernels by its signature.
    """
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
    NUM_SHARES: tl.constexpr = NUM_PARTS * PADDED_DIM // VALUE_DIM
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    wait_for_producers(PDL)
    head = tl.program_id(0) // NUM_SHARES
    share = tl.program_id(0) % NUM_SHARES
    tiles_ptr += tl.program_id(1) // NUM_TILE_PARTS * NUM_FIELDS
    num_before = tl.program_id(1) % NUM_TILE_PARTS * PART_ROWS
    slot = tl.load(tiles_ptr)
    num_rows = tl.minimum(tl.load(tiles_ptr + 2) - num_before, PART_ROWS)
    if (slot < 0) | (num_rows <= 0):
        return

    first_row = (tl.load(tiles_ptr + 1) + num_before).to(tl.int64)
    start = tl.load(tiles_ptr + 3) + num_before
    row = tl.arange(0, PART_ROWS)
    # Dimensions of a part of queries and of keys, and of the words with the values of the program.
    dim = tl.arange(0, PADDED_DIM)
    if NUM_PARTS == 1:
        word_dim = share * VALUE_DIM + tl.arange(0, VALUE_DIM)
    else:
        word_dim = tl.arange(0, VALUE_DIM)
    query_ptr += first_row * query_stride + head * HEAD_DIM
    query_ptrs = query_ptr + row[:, None] * query_stride + dim[None, :]
    query_mask = (row < num_rows)[:, None] & (dim < PART_DIM)[None, :]
    queries = load_parts(query_ptrs, query_mask, PART_DIM, NUM_PARTS, "")
    num_keys = start + num_rows
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    scale = head_scale(scale, key_scale_ptr, kv_head)
    table_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    maximum = tl.full((PART_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((PART_ROWS,), tl.float32)
    total = zero_parts(PART_ROWS, VALUE_DIM, 1)
    first_seen = 0
    if WINDOW > 0:
        first_seen = tl.maximum(start - (WINDOW - 1), 0)
    partition = partition_of(start * 0 + first_seen, NARROW, NARROW_END, NUM_DOUBLINGS)
    begin = start * 0 + first_seen // TILE_KEYS * TILE_KEYS
    while begin < num_keys:
        partition += 1
        end = tl.minimum(partition_start(partition, NARROW, NARROW_END, NUM_DOUBLINGS), num_keys)
        part_maximum = tl.full((PART_ROWS,), float("-inf"), tl.float32)
        part_weight = tl.zeros((PART_ROWS, ONES_COLUMNS), tl.float32)
        part_total = zero_parts(PART_ROWS, VALUE_DIM, 1)
        for first_key in tl.range(begin, end, TILE_KEYS, num_stages=NUM_STAGES):
            key = tl.arange(0, TILE_KEYS)
            position = first_key + key
            is_key = (position >= first_seen) & (position < num_keys)
            key_offset = offset_in_cache(
                table_ptr, first_key, key, position, num_keys, kv_head, dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, "",
            )  # fmt: skip
            value_offset = offset_in_cache(
                table_ptr, first_key, key, position, num_keys, kv_head, word_dim,
                NUM_KV_HEADS, PART_DIM, KV_BLOCK_SIZE, TILE_KEYS, "",
            )  # fmt: skip
            key_mask = is_key[:, None] & (dim < PART_DIM)[None, :]
            keys = tl.load(keys_ptr + key_offset, mask=key_mask, other=0)
            value_mask = is_key[:, None] & (word_dim < PART_DIM)[None, :]
            values = tl.load(values_ptr + value_offset, mask=value_mask, other=0)
            if NUM_PARTS == 2:
                low, high = decode_pairs(values, DTYPE, IN_PAIRS)
                values = tl.where(share == 0, low, high)
            is_seen = position[None, :] <= (start + row)[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (position[None, :] > (start + row)[:, None] - WINDOW)
            part_maximum, part_weight, part_total = attend_tile(
                part_maximum, part_weight, part_total, queries, keys, values, is_seen, scale, True, IN_PAIRS
            )
        maximum, weight, total = add_partition(
            maximum, weight, total, part_maximum, tl.max(part_weight, 1), part_total
        )
        begin = end

    if sinks_ptr is not None:
        rescale, weight = add_sink(maximum, weight, tl.load(sinks_ptr + head).to(tl.float32))
        total = multiply_parts(total, rescale[:, None])
    if value_scale_ptr is not None:
        total = multiply_parts(total, tl.load(value_scale_ptr + kv_head))
    start_dependents(PDL)
    # Every row that exists has seen a key; what is divided by here for the others is not stored.
    result = total[0] / tl.where(row < num_rows, weight, 1.0)[:, None]
    output_ptr += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    if NUM_PARTS == 2:
        output_ptr += share * PART_DIM
    output_ptrs = output_ptr + row[:, None] * (NUM_HEADS * HEAD_DIM) + word_dim[None, :]
    output_mask = (row < num_rows)[:, None] & (word_dim < PART_DIM)[None, :]
    tl.store(output_ptrs, result.to(DTYPE), mask=output_mask)


def wide_prefill_attention(
    layer: LayerAttention, tiles: Tensor, tile_rows: int, partitions: Partitions
) -> None:
    """`exact_prefill_attention` for heads of more than WIDE_HEAD dimensions.

    tile_rows: most rows of a tile, a power of two. Rows of query and block table may have any stride.
    """
    layer.check(max_first_key=0, has_strides=True)
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    check_range("head_dim", layer.head_dim, WIDE_HEAD + 1)
    if has_cuda_prefill(layer, tile_rows, partitions):
        cuda_prefill_attention(layer, tiles, tile_rows, partitions)
        return

    part_rows, arguments = min(tile_rows, PART_ROWS), layer.kernel_arguments()
    num_parts = arguments["NUM_PARTS"]
    num_shares = num_parts if num_parts > 1 else VALUE_SHARES
    _wide_prefill_attention[(layer.num_heads * num_shares, tiles.shape[0] * cdiv(tile_rows, part_rows))](
        value_scale_ptr=layer.kv.value_scale,
        tiles_ptr=tiles,
        sinks_ptr=layer.sinks,
        output_ptr=layer.out,
        query_stride=layer.query.stride(0),
        table_stride=layer.block_table.stride(0),
        NUM_HEADS=layer.num_heads,
        VALUE_DIM=num_parts * arguments["PADDED_DIM"] // num_shares,
        NUM_TILE_PARTS=cdiv(tile_rows, part_rows),
        PART_ROWS=part_rows,
        TILE_KEYS=partitions.tile,
        NARROW=partitions.narrow,
        NARROW_END=partitions.narrow_end,
        NUM_DOUBLINGS=partitions.num_doublings,
        NUM_STAGES=WIDE_STAGES,
        PDL=uses_pdl(),
        num_warps=WIDE_HEAD_WARPS,
        **arguments,
        **launch_options(),
    )


def exact_prefill_attention(
    layer: LayerAttention, tiles: Tensor, config: ExactPrefillConfig, partitions: Partitions
) -> None:
    """Attention of the rows of `tiles` to the positions they see, in `layer.out`.

    tiles: as of `prefill_attention`. partitions: those of `paged_attention`, for equal bits.
    The first key is 0. All tensors are contiguous. Raises ValueError for another shape, type or layout.
    Where it can, prefill.py computes the same bits in less time.
    """
    layer.check(max_first_key=0)
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    if layer.head_dim > WIDE_HEAD:
        wide_prefill_attention(layer, tiles, config.tile_rows, partitions)
        return

    if has_cuda_prefill(layer, config.tile_rows, partitions):
        cuda_prefill_attention(layer, tiles, config.tile_rows, partitions)
        return

    _exact_prefill_attention[(layer.num_heads, tiles.shape[0])](
        value_scale_ptr=layer.kv.value_scale,
        tiles_ptr=tiles,
        sinks_ptr=layer.sinks,
        output_ptr=layer.out,
        table_stride=layer.block_table.stride(0),
        NUM_HEADS=layer.num_heads,
        TILE_ROWS=config.tile_rows,
        TILE_KEYS=partitions.tile,
        NARROW=partitions.narrow,
        NARROW_END=partitions.narrow_end,
        NUM_DOUBLINGS=partitions.num_doublings,
        NUM_STAGES=config.num_stages,
        NARROW_STAGES=config.narrow_stages,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **layer.kernel_arguments(),
        **launch_options(),
    )
