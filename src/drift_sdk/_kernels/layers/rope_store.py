"""Queries, keys and values of a step: biased, normalised, rotated, and the keys and values put in the cache.

    x = sum of slices of qkv[r] + bias                          heads of queries, then of keys, then of values
    x = rms_norm(x) * norm                                      queries and keys, where norms are given
    low', high' = low * cos - high * sin, high * cos + low * sin         queries and keys: rotated halves
    x = x * query_scale[position[r]]                            queries, where scales are given

The first 2 * HALF elements of a head are rotated, which are all of it in most models; the rest stays as it
is. Without cosines and sines nothing is rotated. Values may be normalised without weights; keys as they were
projected may be the values too; and of queries alone, nothing is stored.

Grid: (rows, tiles of heads). A program owns some heads of one kind (queries, keys or values) of one row: the
first tiles are of query heads, the next of keys, the last of values.

In a cache of e4m3, what would be stored is divided by the scale of its head and rounded once more; see
cache.py, also for the order of dimensions.

Order of summation: slices in ascending order in float32, then the bias, then rounded to the storage type.
Every product and sum of the rotation is rounded to the storage type, and so is the product with the scale of
a position. The order in which the squares of a head are added follows from the shape of a program. This shape
depends on the size of heads, not on their number, which is smaller where a model is divided between GPUs.

Bytes: a row of (num_heads + 2 * num_kv_heads) * head_dim, NUM_SLICES times in fp32 or once in the storage
type, in, and once in the storage type out. Cosines and sines are read from tables: the GPU's fast
instructions for them are wrong at large angles.

Dependent launch: the kernel always follows the product that made qkv, so it permits its dependents to start
at once. Before it waits, it reads biases, norms and scales of queries, which never change, and rows, their
places, block table, cosines and sines, which are older than the product.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.cache import encode_e4m3
from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk._kernels.launch.arguments import (
    PartialSums,
    cdiv,
    check_partial_sums,
    check_power_of_two,
    check_range,
    check_rows,
    check_tensor,
    check_tensors,
    next_power_of_2,
)
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.norm import NormKind, inverse_rms, weigh
from drift_sdk.quantised.formats import E4M3

Projected = Literal["qkv", "qk", "q"]
"""What is projected: queries, keys and values; no values, which are the keys before norm and rotation; or
queries alone, of a layer that attends to the keys and values of another one."""

PROGRAM_ELEMENTS = 1_024
"""Elements of a program: 8 for each of the 128 threads of four warps. A row of an 8B model (48 heads of 128)
is then six programs, so that a step of one row still spreads the latency of its loads."""

NUM_WARPS = 4


@device_function
def _load_heads(
    qkv_ptr,  # a row: NUM_SLICES times [width]
    bias,  # [TILE_HEADS, PADDED_HALF], storage type, or None
    element_offset,  # [TILE_HEADS, PADDED_HALF]
    slice_stride,
    element_mask,  # [TILE_HEADS, PADDED_HALF]
    NUM_SLICES: tl.constexpr,
    DTYPE: tl.constexpr,  # the storage type
):
    """Return elements of a row, summed over slices, biased, and rounded to the storage type: fp32."""
    total = tl.load(qkv_ptr + element_offset, mask=element_mask, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        total += tl.load(qkv_ptr + slice_index * slice_stride + element_offset, mask=element_mask, other=0.0)

    if bias is not None:
        total += bias.to(tl.float32)

    return total.to(DTYPE).to(tl.float32)


@device_function
def rotate_pairs(
    x,  # fp32, as y
    cosines,
    y,
    sines,
    DTYPE: tl.constexpr,
):
    """Return x * cosines + y * sines, each product and the sum rounded to the storage type DTYPE."""
    left = (x * cosines).to(DTYPE).to(tl.float32)
    right = (y * sines).to(DTYPE).to(tl.float32)
    return (left + right).to(DTYPE)


@device_function
def store_heads(
    cache_ptr,  # of rows: [TILE_HEADS, 1]
    x,  # [TILE_HEADS, PADDED], storage type
    dim,  # [1, PADDED]
    scale,  # [TILE_HEADS, 1] fp32; not read without IS_E4M3
    mask,
    HEAD_DIM: tl.constexpr,
    IS_E4M3: tl.constexpr,
):
    """Store dimensions of heads in the cache."""
    if IS_E4M3:
        codes = encode_e4m3(x.to(tl.float32), scale).to(tl.uint8)
        place = dim % (HEAD_DIM // 2) * 2 + dim // (HEAD_DIM // 2)
        tl.store(cache_ptr + place, codes, mask=mask)
    else:
        tl.store(cache_ptr + dim, x, mask=mask)


@kernel
def _rotate_and_store(
    qkv_ptr,  # [NUM_SLICES, R, width] fp32, or [R, width] in the storage type; see NUM_HEADS for width
    bias_ptr,  # [width], storage type, or None
    query_norm_ptr,  # [HEAD_DIM], storage type, or None
    key_norm_ptr,  # [HEAD_DIM], storage type, or None
    cos_ptr,  # [max_positions, HALF], storage type, or None
    sin_ptr,  # [max_positions, HALF], storage type, or None
    row_slot_ptr,  # [R] int32; negative: padding row
    row_position_ptr,  # [R] int32
    block_table_ptr,  # [S, max_blocks] int32
    query_out_ptr,  # [R, NUM_HEADS, HEAD_DIM], storage type
    keys_ptr,  # [num_blocks, NUM_KV_HEADS, KV_BLOCK_SIZE, HEAD_DIM], storage type or uint8 codes of e4m3
    values_ptr,  # as keys
    key_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    value_scale_ptr,  # as key_scale_ptr
    row_kv_slot_ptr,  # [R] int64, or None
    query_scale_ptr,  # [max_positions], storage type, or None
    eps,
    qkv_slice_stride,
    qkv_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,  # width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, or less, see `Projected`
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,  # positions in a block of the KV cache
    TILE_HEADS: tl.constexpr,  # heads of a program
    HALF: tl.constexpr,  # half of the elements of a head that are rotated
    PADDED_HALF: tl.constexpr,  # HALF, rounded up to a power of two
    PADDED_REST: tl.constexpr,  # HEAD_DIM - 2 * HALF, rounded up likewise; 0: all are rotated
    NUM_SLICES: tl.constexpr,
    NORM_KIND: tl.constexpr,  # see norm.py
    HAS_VALUES: tl.constexpr,  # values are projected
    HAS_VALUE_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, tile): the first tiles are of query heads, then of keys, then of values. Longer than
    other kernels: norm, rotation and store of a head, which stays in registers."""
    start_dependents(PDL)
    DTYPE: tl.constexpr = query_out_ptr.dtype.element_ty
    QUERY_TILES: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(row_slot_ptr + row, cache_modifier=".cg")
    is_query = tile < QUERY_TILES
    is_value = tile >= QUERY_TILES + KV_TILES
    # Heads are counted from the first of their kind.
    tile_of_kind = tl.where(is_query, tile, (tile - QUERY_TILES) % KV_TILES)
    head = tile_of_kind * TILE_HEADS + tl.arange(0, TILE_HEADS)
    num_heads = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    FIRST_VALUE_HEAD: tl.constexpr = NUM_HEADS + NUM_KV_HEADS if HAS_VALUES else NUM_HEADS
    first_head = tl.where(is_query, 0, tl.where(is_value, FIRST_VALUE_HEAD, NUM_HEADS))

    # Elements of the lower half of what is rotated; the upper half lies HALF elements further, then the rest.
    dim = tl.arange(0, PADDED_HALF)
    element_mask = (head < num_heads)[:, None] & (dim < HALF)[None, :]
    element_offset = (first_head + head)[:, None] * HEAD_DIM + dim[None, :]
    position = tl.load(row_position_ptr + row, cache_modifier=".cg")
    position = tl.where(slot < 0, 0, position)
    block_ptr = block_table_ptr + slot.to(tl.int64) * table_stride + position // KV_BLOCK_SIZE
    if row_kv_slot_ptr is None:
        block = tl.load(block_ptr, mask=slot >= 0, other=0, cache_modifier=".cg")
        place = position % KV_BLOCK_SIZE
    else:
        kv_slot = tl.load(row_kv_slot_ptr + row, mask=slot >= 0, other=0, cache_modifier=".cg")
        block = kv_slot // KV_BLOCK_SIZE
        place = kv_slot % KV_BLOCK_SIZE
    angle_offset = position.to(tl.int64) * HALF + dim
    if cos_ptr is not None:
        cosines = tl.load(cos_ptr + angle_offset, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        sines = tl.load(sin_ptr + angle_offset, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    if query_scale_ptr is not None:
        query_scale = tl.load(query_scale_ptr + position).to(tl.float32)
    if PADDED_REST > 0:
        rest_dim = tl.arange(0, PADDED_REST)
        is_rest = rest_dim < HEAD_DIM - 2 * HALF
        rest_mask = (head < num_heads)[:, None] & is_rest[None, :]
        rest_offset = (first_head + head)[:, None] * HEAD_DIM + 2 * HALF + rest_dim[None, :]
    low_bias, high_bias, rest_bias = None, None, None
    if bias_ptr is not None:
        low_bias = tl.load(bias_ptr + element_offset, mask=element_mask, other=0.0)
        high_bias = tl.load(bias_ptr + element_offset + HALF, mask=element_mask, other=0.0)
        if PADDED_REST > 0:
            rest_bias = tl.load(bias_ptr + rest_offset, mask=rest_mask, other=0.0)
    if query_norm_ptr is not None:
        norm_ptr = tl.where(is_query, query_norm_ptr, key_norm_ptr)
        low_norm = tl.load(norm_ptr + dim, mask=dim < HALF, other=0.0)[None, :]
        high_norm = tl.load(norm_ptr + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
        if PADDED_REST > 0:
            rest_norm = tl.load(norm_ptr + 2 * HALF + rest_dim, mask=is_rest, other=0.0)[None, :]
    wait_for_producers(PDL)  # rows and block table are older than the product; weights never change
    qkv_ptr, stride = qkv_ptr + row * qkv_stride, qkv_slice_stride
    low = _load_heads(qkv_ptr, low_bias, element_offset, stride, element_mask, NUM_SLICES, DTYPE)
    high = _load_heads(qkv_ptr + HALF, high_bias, element_offset, stride, element_mask, NUM_SLICES, DTYPE)
    if PADDED_REST > 0:
        rest = _load_heads(qkv_ptr, rest_bias, rest_offset, stride, rest_mask, NUM_SLICES, DTYPE)
    stored_low, stored_high = low.to(DTYPE), high.to(DTYPE)
    if HAS_VALUE_NORM:
        if is_value:
            squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            if PADDED_REST > 0:
                squares += tl.sum(rest * rest, axis=1)
            scale = inverse_rms(squares, HEAD_DIM, eps)[:, None]
            stored_low, stored_high = (low * scale).to(DTYPE), (high * scale).to(DTYPE)
            if PADDED_REST > 0:
                rest = (rest * scale).to(DTYPE).to(tl.float32)

    if not is_value:
        if query_norm_ptr is not None:
            squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            if PADDED_REST > 0:
                squares += tl.sum(rest * rest, axis=1)
            scale = inverse_rms(squares, HEAD_DIM, eps)[:, None]
            low = weigh(low * scale, low_norm, NORM_KIND).to(tl.float32)
            high = weigh(high * scale, high_norm, NORM_KIND).to(tl.float32)
            if PADDED_REST > 0:
                rest = weigh(rest * scale, rest_norm, NORM_KIND).to(tl.float32)

        stored_low, stored_high = low.to(DTYPE), high.to(DTYPE)
        if cos_ptr is not None:
            stored_low = rotate_pairs(low, cosines, high, -sines, DTYPE)
            stored_high = rotate_pairs(high, cosines, low, sines, DTYPE)

    if is_query:
        if query_scale_ptr is not None:
            stored_low = (stored_low.to(tl.float32) * query_scale).to(DTYPE)
            stored_high = (stored_high.to(tl.float32) * query_scale).to(DTYPE)
            if PADDED_REST > 0:
                rest *= query_scale
        out_ptrs = query_out_ptr + row * NUM_HEADS * HEAD_DIM + element_offset
        tl.store(out_ptrs, tl.where(slot < 0, 0.0, stored_low), mask=element_mask)
        tl.store(out_ptrs + HALF, tl.where(slot < 0, 0.0, stored_high), mask=element_mask)
        if PADDED_REST > 0:
            rest_ptrs = query_out_ptr + row * NUM_HEADS * HEAD_DIM + rest_offset
            tl.store(rest_ptrs, tl.where(slot < 0, 0.0, rest.to(DTYPE)), mask=rest_mask)
    else:
        is_stored = head < tl.where(slot < 0, 0, num_heads)
        cache_mask = is_stored[:, None] & (dim < HALF)[None, :]
        cache_row = (block.to(tl.int64) * NUM_KV_HEADS + head) * KV_BLOCK_SIZE + place
        cache_ptrs = tl.where(is_value, values_ptr, keys_ptr) + cache_row[:, None] * HEAD_DIM
        IS_E4M3: tl.constexpr = key_scale_ptr is not None
        kv_scale = tl.zeros((TILE_HEADS, 1), tl.float32)
        if IS_E4M3:
            scale_ptrs = tl.where(is_value, value_scale_ptr, key_scale_ptr) + head[:, None]
            kv_scale = tl.load(scale_ptrs, mask=is_stored[:, None], other=1.0)
        store_heads(cache_ptrs, stored_low, dim[None, :], kv_scale, cache_mask, HEAD_DIM, IS_E4M3)
        store_heads(cache_ptrs, stored_high, HALF + dim[None, :], kv_scale, cache_mask, HEAD_DIM, IS_E4M3)
        if PADDED_REST > 0:
            rest_mask = is_stored[:, None] & is_rest[None, :]
            rest_place = 2 * HALF + rest_dim[None, :]
            store_heads(cache_ptrs, rest.to(DTYPE), rest_place, kv_scale, rest_mask, HEAD_DIM, IS_E4M3)


def rotate_and_store(
    qkv: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    query_out: Tensor,
    kv: LayerKV,
    *,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_kind: NormKind = "rounded",
    row_kv_slot: Tensor | None = None,
    query_scale: Tensor | None = None,
    projected: Projected = "qkv",
    has_value_norm: bool = False,
) -> None:
    """Rotated queries to query_out; rotated keys, and values, to the cache.

    Longer than other wrappers by its arguments.

    qkv: [R, W] in the storage type, or fp32 partial sums [num_slices, R, W], added in the order of slices,
    then bias [W] if given, then rounded; W = (num_heads + 2 * num_kv_heads) * head_dim: queries, keys,
    values. Its rows may have any stride. projected: what of these there is.
    row_slot, row_position: [R] int32. Rows with a negative slot are padding: their queries are zeros, and
    nothing is written to the cache for them. No two live rows may have the same slot and position.
    block_table: [S, max_blocks] int32, the blocks of each slot in order; its rows may have any stride.
    cos, sin: [max_positions, D / 2] in the storage type, for every position of a live row: the first D
    elements of each head are rotated. Both None: nothing is rotated.
    query_out: [R, num_heads, head_dim].
    query_norm, key_norm: [head_dim], both or neither, with eps: heads are normalised before the rotation;
    without keys, key_norm is None. norm_kind: of both, see norm.py.
    has_value_norm: values are normalised, with eps.
    row_kv_slot: [R] int64, the cache slots of the rows' keys and values; None: those of their positions.
    query_scale: [max_positions] in the storage type: queries are multiplied by the number at the position of
    their row, after the rotation and its rounding, and rounded again.
    Raises ValueError for another shape, type or layout.
    """
    slices = _check_rotate_and_store(
        qkv,
        row_slot,
        row_position,
        block_table,
        cos,
        sin,
        query_out,
        kv,
        bias,
        query_norm,
        key_norm,
        projected,
    )
    num_rows, num_heads, head_dim = query_out.shape
    check_tensors((num_rows,), torch.int64, row_kv_slot=row_kv_slot)
    if query_scale is not None:
        max_positions = query_scale.numel() if cos is None else cos.shape[0]
        check_tensor("query_scale", query_scale, (max_positions,), query_out.dtype)

    is_e4m3, num_kv_heads = kv.keys.dtype == E4M3, kv.num_heads
    half = head_dim // 2 if cos is None else cos.shape[1]
    padded_half, rest = next_power_of_2(half), head_dim - 2 * half
    padded_rest = next_power_of_2(rest) if rest else 0
    most_heads = PROGRAM_ELEMENTS // (2 * padded_half + padded_rest)
    tile_heads = max(1 << most_heads.bit_length() - 1, 1)  # the largest power of two that fits
    num_tiles = cdiv(num_heads, tile_heads)
    if projected != "q":
        num_tiles += 2 * cdiv(num_kv_heads, tile_heads)
    _rotate_and_store[(num_rows, num_tiles)](
        qkv_ptr=qkv,
        bias_ptr=bias,
        query_norm_ptr=query_norm,
        key_norm_ptr=query_norm if projected == "q" else key_norm,
        cos_ptr=cos,
        sin_ptr=sin,
        row_slot_ptr=row_slot,
        row_position_ptr=row_position,
        block_table_ptr=block_table,
        query_out_ptr=query_out,
        keys_ptr=kv.keys.view(torch.uint8) if is_e4m3 else kv.keys,
        values_ptr=kv.values.view(torch.uint8) if is_e4m3 else kv.values,
        key_scale_ptr=kv.key_scale,
        value_scale_ptr=kv.value_scale,
        row_kv_slot_ptr=row_kv_slot,
        query_scale_ptr=query_scale,
        eps=eps,
        qkv_slice_stride=slices.slice_stride,
        qkv_stride=qkv.stride(-2),
        table_stride=block_table.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        KV_BLOCK_SIZE=kv.block_size,
        TILE_HEADS=tile_heads,
        HALF=half,
        PADDED_HALF=padded_half,
        PADDED_REST=padded_rest,
        NUM_SLICES=slices.num_slices,
        NORM_KIND=norm_kind,
        HAS_VALUES=projected == "qkv",
        HAS_VALUE_NORM=has_value_norm,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        # A fused multiply-add would leave out the rounding of a product.
        enable_fp_fusion=False,
        **launch_options(),
    )


def _check_rotate_and_store(
    qkv: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    query_out: Tensor,
    kv: LayerKV,
    bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    projected: Projected,
) -> PartialSums:
    """Raise ValueError for arguments of `rotate_and_store` of another shape, type or layout.

    Returns the slices of qkv.
    """
    num_rows, num_heads, head_dim = query_out.shape
    dtype = query_out.dtype
    width = (num_heads + (len(projected) - 1) * kv.num_heads) * head_dim
    slices = check_partial_sums("qkv", qkv, num_rows, width, dtype)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: expected an even number")

    if (cos is None) != (sin is None):
        raise ValueError("cos, sin: one of them is None: expected both or neither")

    if cos is not None:
        check_range("cos.shape[1]", cos.shape[1], 1, head_dim // 2)
        check_tensors(cos.shape, dtype, cos=cos, sin=sin)

    check_power_of_two("block_size", kv.block_size)
    if projected == "q" and key_norm is not None:
        raise ValueError("key_norm: given without keys: expected None")

    if projected != "q" and (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm, key_norm: one of them is None: expected both or neither")

    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_rows("block_table", block_table, block_table.shape, torch.int32)
    check_tensor("query_out", query_out, query_out.shape, dtype)
    kv.check(head_dim, dtype)
    check_tensors((head_dim,), dtype, query_norm=query_norm, key_norm=key_norm)
    check_tensors((width,), dtype, bias=bias)
    return slices
