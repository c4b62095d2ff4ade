"""The rows of latent attention around it: latents in the cache, queries taken apart, products of each head.

    latent, rotated = down(x)[first :]            key = (rms_norm(latent) * weight, rotation of rotated)
    plain, rotated = query of a head              query = (.., rotation of rotated)

`store_latents` writes keys to the cache, and the normalised latents of queries where these have some.
`split_queries` takes heads apart: plain parts for the product with the matrix of a head's keys, and rotated
parts, behind the places where `multiply_heads` stores these products.

Rotated parts are in the order of `LatentWeights`: element i forms a pair with element i + ROTARY_DIM / 2.

Grids: (rows, kinds of latents) and (rows, tiles of heads). Bytes: the products' partial sums in, a row of
each result out.

Dependent launch: both kernels follow the product that they read, so they permit their dependents to start at
once; before they wait, they read the rows, which are older than it, and `split_queries` reads the rotation
tables.

`multiply_heads` multiplies by a matrix of each head. Its bits do not depend on the number of rows.

    out[m, h, n] = sum over k of x[m, h, k] * weight[h, n, k]

Order of summation: ascending k, in one slice; tensor cores sum in float32, and the result is rounded once. As
in gemm.py, the weights stand on the M side of the MMA, so one row and hundreds use the same instruction, and
neither tiles nor warps change the bits.

Grid: (heads times tiles of the weight, tiles of rows). A program owns TILE_N columns of TILE_M rows of a
head.

Bytes: the weights once, and rows * heads * (K + N) elements beside them: for GLM-4.7-Flash 3.9 MB of matrices
of keys and 5.2 MB of matrices of values, in bfloat16 and each layer. Flops: 2 * rows * heads * N * K.

Dependent launch: a program waits before it reads, and permits its dependents to start when only the store is
left.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.attention.cache import check_cache, check_scales
from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk._kernels.launch.arguments import (
    cdiv,
    check_partial_sums,
    check_power_of_two,
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
from drift_sdk._kernels.layers.norm import inverse_rms, norm_warps, weigh
from drift_sdk._kernels.layers.rope_store import rotate_pairs, store_heads

PROGRAM_ELEMENTS, NUM_WARPS = 1_024, 4
"""Elements of a program of `split_queries`, and its warps."""


@device_function
def _load_sums(
    sums_ptr,  # of a row: NUM_SLICES times [width]
    bias_ptr,  # [width], storage type, or None
    offset,  # of columns
    slice_stride,
    mask,
    NUM_SLICES: tl.constexpr,
    DTYPE: tl.constexpr,  # the storage type
):
    """Return columns of a row, summed over slices, biased, and rounded to the storage type: fp32."""
    total = tl.load(sums_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for index in tl.static_range(1, NUM_SLICES):
        total += tl.load(sums_ptr + index * slice_stride + offset, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@kernel
def _store_latents(
    sums_ptr,  # [NUM_SLICES, R, width] fp32, or [R, width] in the storage type
    bias_ptr,  # [width], storage type, or None
    query_norm_ptr,  # [QUERY_RANK], storage type, or None
    latent_norm_ptr,  # [LATENT_DIM], storage type
    cos_ptr,  # [max_positions, HALF], storage type
    sin_ptr,  # as cos_ptr
    row_slot_ptr,  # [R] int32; negative: padding row
    row_position_ptr,  # [R] int32
    block_table_ptr,  # [S, max_blocks] int32
    row_kv_slot_ptr,  # [R] int64, or None
    query_latent_ptr,  # [R, QUERY_RANK], storage type, or None
    keys_ptr,  # [num_blocks, 1, KV_BLOCK_SIZE, LATENT_DIM + 2 * HALF], storage type or uint8 codes of e4m3
    key_scale_ptr,  # [1] fp32, or None
    eps,
    slice_stride,
    row_stride,
    table_stride,
    FIRST: tl.constexpr,  # column of the latent of keys and values
    QUERY_RANK: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotated elements
    PADDED_RANK: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, kind): 0 the latent of keys and values with the rotated part, 1 the latent of queries."""
    start_dependents(PDL)
    DTYPE: tl.constexpr = latent_norm_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot_ptr + row, cache_modifier=".cg")
    position = tl.load(row_position_ptr + row, cache_modifier=".cg")
    position = tl.where(slot < 0, 0, position)
    wait_for_producers(PDL)
    sums_ptr += row * row_stride
    if tl.program_id(1) == 0:
        dim, half = tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_HALF)
        is_dim, is_half = dim < LATENT_DIM, half < HALF
        if row_kv_slot_ptr is None:
            block_ptr = block_table_ptr + slot.to(tl.int64) * table_stride + position // KV_BLOCK_SIZE
            block = tl.load(block_ptr, mask=slot >= 0, other=0, cache_modifier=".cg").to(tl.int64)
            kv_slot = block * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE
        else:
            kv_slot = tl.load(row_kv_slot_ptr + row, mask=slot >= 0, other=0, cache_modifier=".cg")
        angle = position.to(tl.int64) * HALF + half
        cosines = tl.load(cos_ptr + angle, mask=is_half, other=0.0).to(tl.float32)
        sines = tl.load(sin_ptr + angle, mask=is_half, other=0.0).to(tl.float32)
        weight = tl.load(latent_norm_ptr + dim, mask=is_dim, other=0.0)
        latent = _load_sums(sums_ptr, bias_ptr, FIRST + dim, slice_stride, is_dim, NUM_SLICES, DTYPE)
        rotated = FIRST + LATENT_DIM + half
        low = _load_sums(sums_ptr, bias_ptr, rotated, slice_stride, is_half, NUM_SLICES, DTYPE)
        high = _load_sums(sums_ptr, bias_ptr, rotated + HALF, slice_stride, is_half, NUM_SLICES, DTYPE)
        normed = weigh(latent * inverse_rms(tl.sum(latent * latent, axis=0), LATENT_DIM, eps), weight)
        key_ptr = keys_ptr + kv_slot * (LATENT_DIM + 2 * HALF)
        IS_E4M3: tl.constexpr = key_scale_ptr is not None
        scale = 1.0
        if key_scale_ptr is not None:
            scale = tl.load(key_scale_ptr)
        is_latent, is_rotated = dim < tl.where(slot < 0, 0, LATENT_DIM), half < tl.where(slot < 0, 0, HALF)
        store_heads(key_ptr, normed, dim, scale, is_latent, LATENT_DIM, IS_E4M3)
        rotary_ptr = key_ptr + LATENT_DIM
        first = rotate_pairs(low, cosines, high, -sines, DTYPE)
        second = rotate_pairs(high, cosines, low, sines, DTYPE)
        store_heads(rotary_ptr, first, half, scale, is_rotated, 2 * HALF, IS_E4M3)
        store_heads(rotary_ptr, second, half + HALF, scale, is_rotated, 2 * HALF, IS_E4M3)
    elif query_norm_ptr is not None:
        rank = tl.arange(0, PADDED_RANK)
        is_rank = rank < QUERY_RANK
        query_weight = tl.load(query_norm_ptr + rank, mask=is_rank, other=0.0)
        query = _load_sums(sums_ptr, bias_ptr, rank, slice_stride, is_rank, NUM_SLICES, DTYPE)
        scale = inverse_rms(tl.sum(query * query, axis=0), QUERY_RANK, eps)
        tl.store(query_latent_ptr + row * QUERY_RANK + rank, weigh(query * scale, query_weight), mask=is_rank)


@kernel
def _split_queries(
    sums_ptr,  # [NUM_SLICES, R, width] fp32, or [R, width] in the storage type; heads first
    cos_ptr,  # [max_positions, HALF], storage type
    sin_ptr,  # as cos_ptr
    row_slot_ptr,  # [R] int32; negative: padding row
    row_position_ptr,  # [R] int32
    plain_ptr,  # [R, NUM_HEADS, PLAIN_DIM], storage type
    query_ptr,  # [R, NUM_HEADS, QUERY_DIM], storage type: the last 2 * HALF elements of heads are written
    whole_ptr,  # [R, NUM_HEADS, PLAIN_DIM + 2 * HALF], storage type, or None
    slice_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_PLAIN: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, tile of heads). Padding rows get zeros."""
    start_dependents(PDL)
    DTYPE: tl.constexpr = plain_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
    dim, half = tl.arange(0, PADDED_PLAIN)[None, :], tl.arange(0, PADDED_HALF)[None, :]
    is_dim = (head < NUM_HEADS) & (dim < PLAIN_DIM)
    is_half = (head < NUM_HEADS) & (half < HALF)
    slot = tl.load(row_slot_ptr + row, cache_modifier=".cg")
    position = tl.load(row_position_ptr + row, cache_modifier=".cg")
    angle = tl.where(slot < 0, 0, position).to(tl.int64) * HALF + half
    cosines = tl.load(cos_ptr + angle, mask=half < HALF, other=0.0).to(tl.float32)
    sines = tl.load(sin_ptr + angle, mask=half < HALF, other=0.0).to(tl.float32)
    wait_for_producers(PDL)
    sums_ptr += row * row_stride
    first = head * (PLAIN_DIM + 2 * HALF)
    plain = _load_sums(sums_ptr, None, first + dim, slice_stride, is_dim, NUM_SLICES, DTYPE)
    rotated = first + PLAIN_DIM + half
    low = _load_sums(sums_ptr, None, rotated, slice_stride, is_half, NUM_SLICES, DTYPE)
    high = _load_sums(sums_ptr, None, rotated + HALF, slice_stride, is_half, NUM_SLICES, DTYPE)
    plain_ptrs = plain_ptr + (row * NUM_HEADS + head) * PLAIN_DIM + dim
    tl.store(plain_ptrs, tl.where(slot < 0, 0.0, plain).to(DTYPE), mask=is_dim)
    query_ptrs = query_ptr + (row * NUM_HEADS + head) * QUERY_DIM + QUERY_DIM - 2 * HALF + half
    new_low = rotate_pairs(low, cosines, high, -sines, DTYPE)
    new_high = rotate_pairs(high, cosines, low, sines, DTYPE)
    tl.store(query_ptrs, tl.where(slot < 0, 0.0, new_low), mask=is_half)
    tl.store(query_ptrs + HALF, tl.where(slot < 0, 0.0, new_high), mask=is_half)
    if whole_ptr is not None:
        whole_ptrs = whole_ptr + (row * NUM_HEADS + head) * (PLAIN_DIM + 2 * HALF)
        tl.store(whole_ptrs + dim, tl.where(slot < 0, 0.0, plain).to(DTYPE), mask=is_dim)
        tl.store(whole_ptrs + PLAIN_DIM + half, tl.where(slot < 0, 0.0, new_low), mask=is_half)
        tl.store(whole_ptrs + PLAIN_DIM + HALF + half, tl.where(slot < 0, 0.0, new_high), mask=is_half)


def store_latents(
    product: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    block_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    latent_norm: Tensor,
    *,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    query_latent: Tensor | None = None,
    eps: float = 0.0,
    row_kv_slot: Tensor | None = None,
) -> None:
    """Write the latents and rotated parts of rows to the cache, and normalised latents of queries.

    product: [R, W] in the storage type, or fp32 partial sums [num_slices, R, W], added in the order of
    slices, then bias [W] if given, then rounded. Its last columns are a latent [latent_dim] and a rotated
    part; its first ones a latent of queries, if there is one. Its rows may have any stride.
    row_slot, row_position, block_table, row_kv_slot: as of `rotate_and_store`.
    cos, sin: [max_positions, rotary_dim / 2] in the storage type.
    kv: of the layer, with a scale if it is e4m3; see latent.py for its layout.
    latent_norm: [latent_dim]. query_norm, query_latent: [rank] and [R, rank], both or neither.
    eps: of both norms, which are "rounded".
    Raises ValueError for another shape, type or layout.
    """
    num_rows, width = product.shape[-2:]
    latent_dim, half, dtype = kv.latent_dim, cos.shape[1], latent_norm.dtype
    head_dim, rank = latent_dim + 2 * half, 0 if query_norm is None else query_norm.shape[0]
    slices = check_partial_sums("product", product, num_rows, width, dtype)
    if width < rank + head_dim or (query_norm is None) != (query_latent is None):
        raise ValueError(
            f"product: {width} columns: expected {rank + head_dim} or more, with both of query_norm and "
            "query_latent or neither"
        )

    check_power_of_two("block_size", kv.block_size)
    check_cache(kv.keys, kv.keys, (kv.keys.shape[0], 1, kv.block_size, head_dim), dtype)
    check_scales(kv.keys, 1, key_scale=kv.key_scale)
    check_tensors(cos.shape, dtype, cos=cos, sin=sin)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensors((num_rows,), torch.int64, row_kv_slot=row_kv_slot)
    check_tensors((latent_dim,), dtype, latent_norm=latent_norm)
    check_tensors((width,), dtype, bias=bias)
    check_tensors((rank,), dtype, query_norm=query_norm)
    check_tensors((num_rows, rank), dtype, query_latent=query_latent)
    check_rows("block_table", block_table, block_table.shape, torch.int32)
    _store_latents[(num_rows, 1 if query_norm is None else 2)](
        sums_ptr=product,
        bias_ptr=bias,
        query_norm_ptr=query_norm,
        latent_norm_ptr=latent_norm,
        cos_ptr=cos,
        sin_ptr=sin,
        row_slot_ptr=row_slot,
        row_position_ptr=row_position,
        block_table_ptr=block_table,
        row_kv_slot_ptr=row_kv_slot,
        query_latent_ptr=query_latent,
        keys_ptr=kv.keys if kv.key_scale is None else kv.keys.view(torch.uint8),
        key_scale_ptr=kv.key_scale,
        eps=eps,
        slice_stride=slices.slice_stride,
        row_stride=product.stride(-2),
        table_stride=block_table.stride(0),
        FIRST=width - head_dim,
        QUERY_RANK=rank,
        LATENT_DIM=latent_dim,
        HALF=half,
        PADDED_RANK=next_power_of_2(max(rank, 1)),
        PADDED_LATENT=next_power_of_2(latent_dim),
        PADDED_HALF=next_power_of_2(half),
        KV_BLOCK_SIZE=kv.block_size,
        NUM_SLICES=slices.num_slices,
        PDL=uses_pdl(),
        num_warps=norm_warps(max(latent_dim, rank)),
        # A fused multiply-add would leave out the rounding of a product.
        enable_fp_fusion=False,
        **launch_options(),
    )


def split_queries(
    product: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    cos: Tensor,
    sin: Tensor,
    plain: Tensor,
    query: Tensor,
    whole: Tensor | None = None,
) -> None:
    """Take the heads of queries apart: plain parts to `plain`, rotated ones to the ends of heads of `query`.

    product: [R, W] or partial sums, as of `store_latents`, without bias; the first columns are the heads,
    each a plain part [plain_dim] and a rotated part.
    plain: [R, num_heads, plain_dim]. query: [R, num_heads, query_dim], of which the other elements stay.
    whole: [R, num_heads, plain_dim + rotary_dim], gets both parts, or None.
    Rows with a negative slot are padding: they get zeros. The other arguments as of `store_latents`.
    Raises ValueError for another shape, type or layout.
    """
    (num_rows, num_heads, plain_dim), half, dtype = plain.shape, cos.shape[1], plain.dtype
    width, query_dim = product.shape[-1], query.shape[2]
    slices = check_partial_sums("product", product, num_rows, width, dtype)
    if width < num_heads * (plain_dim + 2 * half) or query_dim < 2 * half:
        raise ValueError(
            f"product: {width} columns, query: {query_dim} elements: expected at least "
            f"{num_heads * (plain_dim + 2 * half)} and {2 * half}"
        )

    check_tensor("plain", plain, (num_rows, num_heads, plain_dim), dtype)
    check_tensor("query", query, (num_rows, num_heads, query_dim), dtype)
    check_tensors((num_rows, num_heads, plain_dim + 2 * half), dtype, whole=whole)
    check_tensors(cos.shape, dtype, cos=cos, sin=sin)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    padded_plain, padded_half = next_power_of_2(plain_dim), next_power_of_2(half)
    tile_heads = next_power_of_2(max(PROGRAM_ELEMENTS // (padded_plain + 2 * padded_half), 1))
    _split_queries[(num_rows, cdiv(num_heads, tile_heads))](
        sums_ptr=product,
        cos_ptr=cos,
        sin_ptr=sin,
        row_slot_ptr=row_slot,
        row_position_ptr=row_position,
        plain_ptr=plain,
        query_ptr=query,
        whole_ptr=whole,
        slice_stride=slices.slice_stride,
        row_stride=product.stride(-2),
        NUM_HEADS=num_heads,
        PLAIN_DIM=plain_dim,
        QUERY_DIM=query_dim,
        HALF=half,
        PADDED_PLAIN=padded_plain,
        PADDED_HALF=padded_half,
        TILE_HEADS=tile_heads,
        NUM_SLICES=slices.num_slices,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # as in `store_latents`
        **launch_options(),
    )


TILE_N, TILE_K, MOST_ROWS = 64, 64, 64
"""Columns and inner indices of a tile, and most rows of one."""
NUM_STAGES, PRODUCT_WARPS = 3, 4


@kernel(do_not_specialize=["M"])
def _multiply_heads(
    x_ptr,  # [M, NUM_HEADS, K], storage type
    weight_ptr,  # [NUM_HEADS, N, K], storage type, of the strides below
    out_ptr,  # [M, NUM_HEADS, N], storage type; OUT_STRIDE elements from head to head
    left_out_ptr,  # [M] int32, not 0 for rows that are left out, or None
    M,  # rows
    NUM_HEADS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head and tile of the weight, tile of rows)."""
    NUM_TILES: tl.constexpr = tl.cdiv(N, TILE_N)
    head = tl.program_id(0) // NUM_TILES
    column = tl.program_id(0) % NUM_TILES * TILE_N + tl.arange(0, TILE_N)
    row = (tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = row < M, column < N
    inner = tl.arange(0, TILE_K)
    weight_ptrs = weight_ptr + head.to(tl.int64) * HEAD_STRIDE + column[:, None] * COLUMN_STRIDE
    x_ptrs = x_ptr + ((row * NUM_HEADS + head) * K)[:, None]
    wait_for_producers(PDL)
    if left_out_ptr is not None:
        is_row = is_row & (tl.load(left_out_ptr + row, mask=is_row, other=1) == 0)
        if tl.max(is_row.to(tl.int32)) == 0:
            return

    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for k in tl.range(0, K, TILE_K, num_stages=NUM_STAGES):
        index = (k + inner)[None, :]
        weights = tl.load(
            weight_ptrs + index * INNER_STRIDE, mask=is_column[:, None] & (index < K), other=0.0
        )
        x = tl.load(x_ptrs + index, mask=is_row[:, None] & (index < K), other=0.0)
        total = tl.dot(weights, x.T, total, input_precision="ieee")

    start_dependents(PDL)
    out_ptrs = out_ptr + ((row * NUM_HEADS + head) * OUT_STRIDE)[None, :] + column[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor, left_out: Tensor | None = None) -> None:
    """The product of each head's rows with its matrix, in `out`.

    x: [M, num_heads, K], contiguous. weight: [num_heads, N, K], whose last two dimensions may have any
    strides. out: [M, num_heads, N], the beginnings of heads of a contiguous [M, num_heads, N or more]. All of
    one type. left_out: [M] int32, not 0 for rows that are neither read nor written; None: there are none.
    Raises ValueError for another shape, type or layout.
    """
    (num_rows, num_heads, inner), num_columns = x.shape, weight.shape[1]
    check_tensor("x", x, x.shape, weight.dtype)
    stride = out.stride(1)
    if weight.shape != (num_heads, num_columns, inner):
        expected = [num_heads, num_columns, inner]
        raise ValueError(f"weight: {list(weight.shape)}: expected {expected}")

    is_laid_out = out.stride() == (num_heads * stride, stride, 1) and stride >= num_columns
    if out.shape != (num_rows, num_heads, num_columns) or out.dtype != x.dtype or not is_laid_out:
        found = f"{list(out.shape)} {out.dtype} with strides {out.stride()}"
        expected = [num_rows, num_heads, num_columns]
        raise ValueError(f"out: {found}: expected {expected} {x.dtype}, the beginnings of heads")

    check_tensors((num_rows,), torch.int32, left_out=left_out)
    tile_m = min(max(next_power_of_2(num_rows), 16), MOST_ROWS)
    _multiply_heads[(num_heads * cdiv(num_columns, TILE_N), cdiv(num_rows, tile_m))](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        left_out_ptr=left_out,
        M=num_rows,
        NUM_HEADS=num_heads,
        N=num_columns,
        K=inner,
        HEAD_STRIDE=weight.stride(0),
        COLUMN_STRIDE=weight.stride(1),
        INNER_STRIDE=weight.stride(2),
        OUT_STRIDE=stride,
        TILE_N=TILE_N,
        TILE_M=tile_m,
        TILE_K=TILE_K,
        NUM_STAGES=NUM_STAGES,
        PDL=uses_pdl(),
        num_warps=PRODUCT_WARPS,
        **launch_options(),
    )
