"""Queries, keys and values of a step: biased, normalised, rotated, and the keys and values put in the cache.

Bytes: a row of (num_heads + 2 * num_kv_heads) * head_dim, NUM_SLICES times in fp32 or once in the storage
type, in, and once in the storage type out. A program has some heads of one kind of one row: 1,024 elements,
so that a row of an 8B model is six programs and a step of one row still spreads over the loads' latency.
Cosines and sines come in tables: the fast instructions for them are wrong at large angles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.layers.rms_norm import inverse_rms, rms_norm_reference, weigh

__all__ = ["rotate_and_store", "rotate_and_store_reference"]

PROGRAM_ELEMENTS = 1_024
NUM_WARPS = 4


@triton.jit
def _load(qkv, bias, places, slice_stride, is_place, NUM_SLICES: tl.constexpr, DTYPE: tl.constexpr):
    """Elements of a row, summed over slices, biased, and rounded to the storage type: fp32."""
    total = tl.load(qkv + places, mask=is_place, other=0.0).to(tl.float32)
    for index in tl.static_range(1, NUM_SLICES):
        total += tl.load(qkv + index * slice_stride + places, mask=is_place, other=0.0)

    if bias is not None:
        total += tl.load(bias + places, mask=is_place, other=0.0).to(tl.float32)

    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _turned(x, cosines, y, sines, DTYPE: tl.constexpr):
    """x * cosines + y * sines, each product and the sum rounded to the storage type."""
    left = (x * cosines).to(DTYPE).to(tl.float32)
    right = (y * sines).to(DTYPE).to(tl.float32)
    return (left + right).to(DTYPE)


@triton.jit
def _rotate_and_store(
    qkv, bias, query_norm, key_norm, cos, sin, row_slot, row_position, block_table,
    query_out, keys, values, eps, slice_stride, row_stride, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, PADDED_HALF: tl.constexpr, NUM_SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, group): the first groups are of query heads, then of keys, then of values."""
    start_dependents(PDL)
    DTYPE: tl.constexpr = query_out.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(row_slot + row, cache_modifier=".cg")
    is_query = group < QUERY_GROUPS
    is_value = group >= QUERY_GROUPS + KV_GROUPS
    # Heads of a kind are counted from its own first one.
    kind_group = tl.where(is_query, group, (group - QUERY_GROUPS) % KV_GROUPS)
    head = kind_group * HEADS + tl.arange(0, HEADS)
    num_heads = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    first_head = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))

    i = tl.arange(0, PADDED_HALF)
    is_place = (head < num_heads)[:, None] & (i < HALF)[None, :]
    places = (first_head + head)[:, None] * HEAD_DIM + i[None, :]
    position = tl.load(row_position + row, cache_modifier=".cg")
    position = tl.where(slot < 0, 0, position)
    entry = block_table + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=slot >= 0, other=0, cache_modifier=".cg")
    angle = position.to(tl.int64) * HALF + i
    cosines = tl.load(cos + angle, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + angle, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    # Rows and block table are older than the product that is waited for.
    wait_for_producers(PDL)
    qkv += row * row_stride
    low = _load(qkv, bias, places, slice_stride, is_place, NUM_SLICES, DTYPE)
    high = _load(qkv, bias, places + HALF, slice_stride, is_place, NUM_SLICES, DTYPE)
    if is_value:
        stored_low, stored_high = low.to(DTYPE), high.to(DTYPE)
    else:
        if query_norm is not None:
            squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            scale = inverse_rms(squares, HEAD_DIM, eps)[:, None]
            norm = tl.where(is_query, query_norm, key_norm) + i
            low = weigh(low * scale, tl.load(norm, mask=i < HALF, other=0.0)[None, :]).to(tl.float32)
            high = weigh(high * scale, tl.load(norm + HALF, mask=i < HALF, other=0.0)[None, :]).to(tl.float32)

        stored_low = _turned(low, cosines, high, -sines, DTYPE)
        stored_high = _turned(high, cosines, low, sines, DTYPE)

    if is_query:
        out = query_out + row * NUM_HEADS * HEAD_DIM + places
        tl.store(out, tl.where(slot < 0, 0.0, stored_low), mask=is_place)
        tl.store(out + HALF, tl.where(slot < 0, 0.0, stored_high), mask=is_place)
    else:
        is_stored = (head < tl.where(slot < 0, 0, num_heads))[:, None] & (i < HALF)[None, :]
        cache_row = (block.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
        out = tl.where(is_value, values, keys) + cache_row[:, None] * HEAD_DIM + i[None, :]
        tl.store(out, stored_low, mask=is_stored)
        tl.store(out + HALF, stored_high, mask=is_stored)


def rotate_and_store(
    qkv: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_out: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotated queries to query_out; rotated keys, and values, to the cache.

    qkv: [N, W] in the storage type, or fp32 partial sums [num_slices, N, W], added in the order of slices,
    then bias [W] if given, then rounded; W = (num_heads + 2 * num_kv_heads) * head_dim: queries, keys,
    values. Its rows may stand apart. query_norm and key_norm [head_dim], both or neither, with eps: heads are
    normalised before the rotation.
    row_slot, row_position [N] int32, block_table [S, max_blocks] int32. Rows with a negative slot are
    padding: their queries are zeros and the cache does not see them.
    cos, sin [max_positions, head_dim / 2] in the storage type, for every position of a live row.
    query_out [N, num_heads, head_dim]; keys, values [num_blocks, num_kv_heads, block_size, head_dim].
    Raises ValueError for another shape, type or layout.
    """
    num_rows, num_heads, head_dim = query_out.shape
    num_blocks, num_kv_heads, block_size, _ = keys.shape
    dtype = query_out.dtype
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() == 3:
        check_rows("qkv", qkv, (max(qkv.shape[0], 1), num_rows, width), torch.float32)
    else:
        check_rows("qkv", qkv, (num_rows, width), dtype)

    if head_dim % 2 or block_size & (block_size - 1):
        raise ValueError(
            f"head_dim={head_dim}, block_size={block_size}: expected an even number and a power of two"
        )

    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm, key_norm: one of them is None: expected both or neither")

    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("row_position", row_position, (num_rows,), torch.int32)
    check_rows("block_table", block_table, block_table.shape, torch.int32)
    check_tensor("query_out", query_out, query_out.shape, dtype)
    check_tensor("cos", cos, (cos.shape[0], head_dim // 2), dtype)
    check_tensor("sin", sin, cos.shape, dtype)
    for name, cache in (("keys", keys), ("values", values)):
        check_tensor(name, cache, (num_blocks, num_kv_heads, block_size, head_dim), dtype)

    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check_tensor(name, norm, (head_dim,), dtype)

    if bias is not None:
        check_tensor("bias", bias, (width,), dtype)

    padded_half = int(triton.next_power_of_2(head_dim // 2))
    heads = min(max(PROGRAM_ELEMENTS // (2 * padded_half), 1), int(triton.next_power_of_2(num_heads)))
    num_groups = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    _rotate_and_store[(num_rows, num_groups)](
        qkv,
        bias,
        query_norm,
        key_norm,
        cos,
        sin,
        row_slot,
        row_position,
        block_table,
        query_out,
        keys,
        values,
        eps,
        qkv.stride(0) if qkv.dim() == 3 else 0,
        qkv.stride(-2),
        block_table.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        PADDED_HALF=padded_half,
        NUM_SLICES=qkv.shape[0] if qkv.dim() == 3 else 1,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        # A fused multiply-add would leave out the rounding of a product.
        enable_fp_fusion=False,
        **launch_options(),
    )


def rotate_and_store_reference(
    qkv: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_out: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """What `rotate_and_store` does, written plainly."""
    num_rows, num_heads, head_dim = query_out.shape
    num_kv_heads, block_size = keys.shape[1:3]
    if qkv.dim() == 3:
        total = qkv[0]
        for part in qkv[1:]:
            total = total + part

        qkv = total

    if bias is not None:
        qkv = qkv.to(torch.float32) + bias.to(torch.float32)

    heads = qkv.to(query_out.dtype).view(num_rows, -1, head_dim)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        query = rms_norm_reference(query, query_norm, eps)
        key = rms_norm_reference(key, key_norm, eps)

    query_out.zero_()
    for row in range(num_rows):
        slot, position = int(row_slot[row]), int(row_position[row])
        if slot >= 0:
            block, offset = block_table[slot, position // block_size], position % block_size
            query_out[row] = _rotated(query[row], cos[position], sin[position])
            keys[block, :, offset] = _rotated(key[row], cos[position], sin[position])
            values[block, :, offset] = value[row]


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cos + high * -sin, high * cos + low * sin), dim=-1)
