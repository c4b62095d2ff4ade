"""Causal attention of prompt chunks over a paged cache, to which their own keys were written before.

    score[r, h, p] = query[r, h] . key[p] * scale                          for positions p <= position[r]
    output[r, h] = sum over p of softmax(score[r, h])[p] * value[p]

With a window w, a row sees only the last w of these positions. A sink is one more score in the softmax, whose
value is zero.

Grid: (query heads, tiles of rows). A program owns one tile of a chunk's rows for one query head, and writes
each of its outputs once. It takes the keys that the rows see from position 0 on: first those that all of its
rows see, without any mask, then the few tiles of keys along the diagonal.

Order of summation: keys are cut at multiples of TILE_KEYS, whatever the tile of rows, and keys that a row
does not see leave its sums as they are. A row's result therefore does not depend on where its chunk began.

Flops: 4 * num_heads * head_dim for each pair of a row and a key it sees. Bytes: a program reads the keys and
values it sees once, TILE_ROWS flops for each byte of bfloat16. At 128 rows and 600 TFLOP/s that is 4.7 TB/s,
most of it from L2, because programs of one tile's heads are neighbours and take the same keys in the same
order; 64 rows would need twice that, more than L2 gives. Blocks of TILE_KEYS or more are the fast path: a
tile of keys is then one contiguous piece, found by one entry of the table.

Dependent launch: the kernel waits first. It permits its dependents to start when only the output is left to
store; a program without rows does so by ending.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.cuda_prefill import cuda_prefill_attention, has_cuda_prefill
from drift_sdk._kernels.attention.e4m3 import decode_rows
from drift_sdk._kernels.attention.layer_attention import MIN_DOT_SIZE, LayerAttention
from drift_sdk._kernels.attention.online_softmax import LOG2_E, head_scale
from drift_sdk._kernels.attention.prefill_config import PrefillAttentionConfig, prefill_attention_config
from drift_sdk._kernels.attention.prefill_tiles import TILE_FIELDS
from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = [
    "PrefillAttentionConfig",
    "prefill_attention",
    "prefill_attention_config",
]

NUM_FIELDS = tl.constexpr(TILE_FIELDS)


@device_function
def _attend_keys(
    maximum,  # [TILE_ROWS] fp32: the highest score so far, times log2(e)
    weight,  # [TILE_ROWS] fp32: the sum of exp2(score - maximum)
    total,  # [TILE_ROWS, NUM_PARTS * PADDED_DIM] fp32: values weighted likewise
    queries,  # [TILE_ROWS, NUM_PARTS * PADDED_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    table_ptr,  # [max_blocks] int32: the block table's row of the slot
    head,  # KV head
    position,  # [TILE_ROWS]: the last position that each row sees
    begin,  # a multiple of TILE_KEYS
    end,
    first_key,  # positions before it are not loaded
    num_keys,  # positions from it on are not loaded
    scale,  # of scores, times log2(e)
    NUM_KV_HEADS: tl.constexpr,
    PART_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # PART_DIM, rounded up to a power of two, 16 or more
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,  # positions in a block of the KV cache
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    NUM_STAGES: tl.constexpr,
    IS_MASKED: tl.constexpr,  # whether some row does not see some of these keys
):
    """Add keys begin ... end - 1 to the sums of the rows; return maximum, weight and total.

    Keys before first_key or from num_keys on may never have been written: they are not loaded.
    """
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < PART_DIM
    for k in tl.range(begin, end, TILE_KEYS, num_stages=NUM_STAGES):
        key_position = k + tl.arange(0, TILE_KEYS)
        is_key = (key_position >= first_key) & (key_position < num_keys)
        if KV_BLOCK_SIZE >= TILE_KEYS:  # a tile lies in one block, and is contiguous in it
            block = tl.load(table_ptr + k // KV_BLOCK_SIZE).to(tl.int64)
            tile_offset = ((block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + k % KV_BLOCK_SIZE) * PART_DIM
            key_offset = (tl.arange(0, TILE_KEYS) * PART_DIM)[:, None] + dim[None, :]
        else:
            block = tl.load(table_ptr + key_position // KV_BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            cache_row = (block * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + key_position % KV_BLOCK_SIZE
            tile_offset = 0
            key_offset = (cache_row * PART_DIM)[:, None] + dim[None, :]

        if IS_MASKED:
            key_mask = is_key[:, None] & is_dim[None, :]
            keys = tl.load(keys_ptr + tile_offset + key_offset, mask=key_mask, other=0)
            values = tl.load(values_ptr + tile_offset + key_offset, mask=key_mask, other=0)
        elif PART_DIM < PADDED_DIM:
            keys = tl.load(keys_ptr + tile_offset + key_offset, mask=is_dim[None, :], other=0)
            values = tl.load(values_ptr + tile_offset + key_offset, mask=is_dim[None, :], other=0)
        else:
            keys = tl.load(keys_ptr + tile_offset + key_offset)
            values = tl.load(values_ptr + tile_offset + key_offset)

        if NUM_PARTS == 2:
            keys = decode_rows(keys, queries.dtype, IN_PAIRS)
            values = decode_rows(values, queries.dtype, IN_PAIRS)
        score = tl.dot(queries, keys.T, input_precision="ieee")
        if IS_MASKED:
            is_seen = (key_position[None, :] <= position[:, None]) & (key_position >= first_key)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (key_position[None, :] > position[:, None] - WINDOW)

            score = tl.where(is_seen, score, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(score, axis=1) * scale)
        reference = new_maximum
        if IS_MASKED and WINDOW > 0:
            # A row that has seen no key yet has the maximum -inf, and -inf - -inf would be NaN.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)

        rescale = tl.exp2(maximum - reference)
        probability = tl.exp2(score * scale - reference[:, None])
        weight = weight * rescale + tl.sum(probability, axis=1)
        share = probability.to(queries.dtype)
        total = tl.dot(share, values, total * rescale[:, None], input_precision="ieee")
        maximum = new_maximum

    return maximum, weight, total


@kernel
def _prefill_attention(
    query_ptr,  # [R, NUM_HEADS, HEAD_DIM], storage type; rows have a stride
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, PART_DIM], storage type or words of two e4m3 codes
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    value_scale_ptr,  # as key_scale_ptr
    block_table_ptr,  # [S, max_blocks] int32; rows have a stride
    tiles_ptr,  # [num_tiles, NUM_FIELDS] int32, see prefill_tiles.py; slot -1: unused
    sinks_ptr,  # [NUM_HEADS], storage type, or None
    output_ptr,  # [R, NUM_HEADS * HEAD_DIM], storage type
    scale,  # of scores, times log2(e)
    query_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the dimensions: 2 with e4m3, else 1
    PADDED_DIM: tl.constexpr,  # those of a part, rounded up to a power of two, 16 or more
    IN_PAIRS: tl.constexpr,  # see `decode_pairs`
    KV_BLOCK_SIZE: tl.constexpr,  # positions in a block of the KV cache
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    FIRST_KEY: tl.constexpr,  # positions before it are not seen
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, tile): heads run first, so those that share keys run together. Longer than other
    kernels: three ranges of keys, with the same sums in registers."""
    PART_DIM: tl.constexpr = HEAD_DIM // NUM_PARTS
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
    place = tl.arange(0, NUM_PARTS * PADDED_DIM)
    dim = place // PADDED_DIM * PART_DIM + place % PADDED_DIM
    row_mask = (row < num_rows)[:, None] & (place % PADDED_DIM < PART_DIM)[None, :]
    query_ptr += first_row * query_stride + head * HEAD_DIM
    query_ptrs = query_ptr + row[:, None] * query_stride + dim[None, :]
    queries = tl.load(query_ptrs, mask=row_mask, other=0.0)

    if sinks_ptr is None:
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS,), tl.float32)
    else:
        # As if a key with this score and no value had been seen before all others.
        maximum = tl.zeros((TILE_ROWS,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        weight = tl.full((TILE_ROWS,), 1.0, tl.float32)

    total = tl.zeros((TILE_ROWS, NUM_PARTS * PADDED_DIM), tl.float32)
    position = start + row
    num_keys = start + num_rows
    # The last key that the first row sees is the last that all rows see: tiles before need no mask for it.
    diagonal = (start + 1) // TILE_KEYS * TILE_KEYS
    first_key = FIRST_KEY
    begin = 0
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    scale = head_scale(scale, key_scale_ptr, kv_head)
    table_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    if WINDOW > 0 or FIRST_KEY > 0:
        # Tiles of keys along the early edge, which not all rows see in full, are masked too. The edge begins
        # at the first key that the first row sees, and ends at the first key that the last row sees.
        last_edge = FIRST_KEY
        if WINDOW > 0:
            first_key = tl.maximum(start - WINDOW + 1, FIRST_KEY)
            last_edge = tl.maximum(num_keys - WINDOW, FIRST_KEY)

        edge = first_key // TILE_KEYS * TILE_KEYS
        begin = tl.minimum((last_edge + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS, diagonal)
        maximum, weight, total = _attend_keys(
            maximum, weight, total, queries, keys_ptr, values_ptr, table_ptr, kv_head, position,
            edge, begin, first_key, num_keys, scale,
            NUM_KV_HEADS, PART_DIM, NUM_PARTS, PADDED_DIM, IN_PAIRS, KV_BLOCK_SIZE, TILE_KEYS, WINDOW,
            NUM_STAGES, True,
        )  # fmt: skip

    # Tiles of keys that all rows see.
    maximum, weight, total = _attend_keys(
        maximum, weight, total, queries, keys_ptr, values_ptr, table_ptr, kv_head, position,
        begin, diagonal, first_key, num_keys, scale,
        NUM_KV_HEADS, PART_DIM, NUM_PARTS, PADDED_DIM, IN_PAIRS, KV_BLOCK_SIZE, TILE_KEYS, WINDOW, NUM_STAGES,
        False,
    )  # fmt: skip
    # Tiles of keys along the diagonal.
    maximum, weight, total = _attend_keys(
        maximum, weight, total, queries, keys_ptr, values_ptr, table_ptr, kv_head, position,
        diagonal, num_keys, first_key, num_keys, scale,
        NUM_KV_HEADS, PART_DIM, NUM_PARTS, PADDED_DIM, IN_PAIRS, KV_BLOCK_SIZE, TILE_KEYS, WINDOW, NUM_STAGES,
        True,
    )  # fmt: skip
    start_dependents(PDL)
    # Every row that exists has seen a key. The others are divided by 1, and not stored.
    factor = 1.0 / tl.where(row < num_rows, weight, 1.0)
    if value_scale_ptr is not None:
        factor = factor * tl.load(value_scale_ptr + kv_head)
    output_ptr += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    output_ptrs = output_ptr + (row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :])
    tl.store(output_ptrs, (total * factor[:, None]).to(output_ptr.dtype.element_ty), mask=row_mask)


def prefill_attention(layer: LayerAttention, tiles: Tensor, config: PrefillAttentionConfig) -> None:
    """Attention of the rows of `tiles` to the keys they see, in `layer.out`.

    tiles: [num_tiles, 4] int32, as `prefill_tiles` fills it for config.tile_rows: slot, or -1 for an unused
    tile; first row in query; number of rows; position of the first row. Row j of a tile sees positions
    0 ... position + j. Rows of no tile are left as they are.
    The first key is at most 15, and at most any row's own position. Rows of query and block table may have
    any stride. Raises ValueError for another shape, type or layout.
    Where it can, cuda_prefill.py computes the same in less time, with other bits.
    """
    layer.check(max_first_key=MIN_DOT_SIZE - 1, has_strides=True)  # it lies in the first tile of keys
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    if has_cuda_prefill(layer, config.tile_rows, partitions=None):
        cuda_prefill_attention(layer, tiles, config.tile_rows, partitions=None)
        return

    _prefill_attention[(layer.num_heads, tiles.shape[0])](
        value_scale_ptr=layer.kv.value_scale,
        tiles_ptr=tiles,
        sinks_ptr=layer.sinks,
        output_ptr=layer.out,
        query_stride=layer.query.stride(0),
        table_stride=layer.block_table.stride(0),
        NUM_HEADS=layer.num_heads,
        TILE_ROWS=config.tile_rows,
        TILE_KEYS=config.tile_keys,
        FIRST_KEY=layer.first_key,
        NUM_STAGES=config.num_stages,
        PDL=uses_pdl(),
        num_warps=config.num_warps,
        **layer.kernel_arguments(),
        **launch_options(),
    )
