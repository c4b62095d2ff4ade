"""RMS norm, with what it is fused with: the sum of the residual stream, and the look-up of embeddings.

Normalisation by the root mean square (RMS norm), as a part of other kernels.

    rms_norm(x) = x / sqrt(mean(x^2) + eps) * weight

Kinds of norms differ in the product with the weight:

- rounded: the normalised value is rounded to the storage type, and its product with the weight again
- wide: the product with the weight is float32, and rounded once
- offset: as wide, with 1 + weight in place of the weight (Gemma)

The sum of squares is float32, in an order that depends on the size and on the number of warps (see
`norm_warps`).

The residual stream: a layer's output is added to it, and it is normalised, in one pass.

    total[r] = sum of slices of delta[r] + bias
    total[r] = rms_norm(total[r]) * delta_norm                                      where this norm is given
    hidden[r] = hidden[r] + total[r] * delta_multiplier
    hidden[r] = hidden[r] * factor                                                  where this factor is given
    normed[r] = rms_norm(hidden[r]) * normed_multiplier * weight

Grid: (rows). A program owns one row, in registers: made for H up to 16,384, which are 32 values for each of
the 512 threads of 16 warps.

Order of summation: slices in ascending order in float32, then the bias, then rounded to the storage type and
added to the residual stream. The norm of the delta, its product with the multiplier and the stream's with the
factor are each rounded too.

Bytes: three rows of the storage type and NUM_SLICES rows of fp32 for each row. With a few rows the time is
that of a launch and one trip to memory.

Dependent launch: with a delta, the kernel always follows the product that made it, so it permits its
dependents to start at once; before it waits, it reads the weights, which never change, and the residual
stream, which is older than the product. Without a delta it reads the weight, waits, and then permits them.

Two outputs that are each normalised, and added.

    out[r] = rms_norm(sum of slices of first[r] + bias) * first_norm
           + rms_norm(sum of slices of second[r]) * second_norm

Grid: (rows). A program owns one row. Sums, norms and their sum are each rounded to the storage type.

Bytes: NUM_SLICES rows of fp32 or one of the storage type of both, and one row out.

Dependent launch: the kernel follows the product that made the second, so it permits its dependents to start
at once. It reads the norms before it waits.

Rows of the embedding as the residual stream, and its first norm.

    hidden[r] = embedding[row_token[r]] * multiplier
    hidden[r] = rms_norm(hidden[r])                                      where its epsilon is given
    normed[r] = rms_norm(hidden[r]) * normed_multiplier * weight

Grid: (rows). A program owns one row, in registers.

Bytes: three rows of the storage type for each row: one in, two out.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import (
    PartialSums,
    check_partial_sums,
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

NormKind = Literal["rounded", "wide", "offset"]


@device_function
def inverse_rms(
    sum_of_squares,  # fp32
    SIZE: tl.constexpr,  # of how many values
    eps,
):
    """Return 1 / sqrt(sum_of_squares / SIZE + eps), the factor that normalises the values."""
    return tl.rsqrt(sum_of_squares / SIZE + eps)


@device_function
def weigh(
    normed,  # fp32, any shape
    weight,  # storage type, the same shape
    NORM_KIND: tl.constexpr = tl.constexpr("rounded"),  # noqa: B008 - older Triton takes no other default
):
    """Return normed times weight in the storage type, as the kind of norm says."""
    if NORM_KIND == "offset":
        return (normed * (1.0 + weight.to(tl.float32))).to(weight.dtype)
    elif NORM_KIND == "wide":
        return (normed * weight.to(tl.float32)).to(weight.dtype)
    else:
        rounded = normed.to(weight.dtype).to(tl.float32)
        return (rounded * weight.to(tl.float32)).to(weight.dtype)


def norm_warps(size: int) -> int:
    """Return the warps of a program that normalises a row of `size` values: 1 to 16, a power of two.

    256 values a warp are 8 for each of its 32 threads, 16 bytes of bfloat16: the widest load. 16 warps, which
    are reached at 4,096 values, are half of the 32 that a CTA may have. The result depends on the size alone,
    since the order of the sum of squares, and so its bits, depend on the number of warps.
    """
    return min(max(next_power_of_2(size) // 256, 1), 16)


@device_function
def add_total(
    x,  # [PADDED_SIZE], storage type: a row of the residual stream
    total,  # [PADDED_SIZE] fp32: the sum of the delta's slices
    bias_ptr,  # [SIZE], storage type, or None
    bias,  # [PADDED_SIZE], storage type: what bias_ptr points to; without it anything
    delta_norm_ptr,  # [SIZE], storage type, or None
    delta_weight,  # [PADDED_SIZE], storage type: what delta_norm_ptr points to; without it anything
    eps,  # of the norm of the delta
    SIZE: tl.constexpr,
    DELTA_MULTIPLIER: tl.constexpr,
    NORM_KIND: tl.constexpr,
):
    """Return the row after a delta, to which bias, norm and multiplier are applied first."""
    if bias_ptr is not None:
        total += bias.to(tl.float32)

    total = total.to(x.dtype).to(tl.float32)
    if delta_norm_ptr is not None:
        total *= inverse_rms(tl.sum(total * total, axis=0), SIZE, eps)
        total = weigh(total, delta_weight, NORM_KIND).to(tl.float32)
    if DELTA_MULTIPLIER != 1.0:
        total = (total * DELTA_MULTIPLIER).to(x.dtype).to(tl.float32)
    return (x.to(tl.float32) + total).to(x.dtype)


@device_function
def normalise(
    x,  # [PADDED_SIZE], storage type: a row of the residual stream
    weight,  # [PADDED_SIZE], storage type
    eps,
    SIZE: tl.constexpr,
    NORMED_MULTIPLIER: tl.constexpr,
    NORM_KIND: tl.constexpr,
):
    """Return the normalised row times the multiplier and the weight."""
    wide = x.to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    if NORMED_MULTIPLIER != 1.0:
        scaled *= NORMED_MULTIPLIER
    return weigh(scaled, weight, NORM_KIND)


@kernel
def _add_norm(
    hidden_ptr,  # [R, SIZE], storage type; updated in place
    delta_ptr,  # [NUM_SLICES, R, SIZE] fp32, or [R, SIZE] in the storage type, or None
    bias_ptr,  # [SIZE], storage type, or None
    delta_norm_ptr,  # [SIZE], storage type, or None
    factor_ptr,  # [1], storage type, or None
    weight_ptr,  # [SIZE], storage type
    normed_ptr,  # [R, SIZE], storage type
    aux_hidden_ptr,  # [R, SIZE], storage type: a copy of the updated hidden; or None
    eps,
    delta_eps,  # or None: eps
    hidden_stride,
    delta_slice_stride,
    delta_stride,
    normed_stride,
    aux_hidden_stride,
    SIZE: tl.constexpr,  # hidden size
    PADDED_SIZE: tl.constexpr,  # SIZE, rounded up to a power of two
    NUM_SLICES: tl.constexpr,  # 0: no delta
    DELTA_MULTIPLIER: tl.constexpr,
    NORMED_MULTIPLIER: tl.constexpr,
    NORM_KIND: tl.constexpr,  # see `weigh`
    PDL: tl.constexpr,
):
    """Program (row): one row. Longer than other kernels by its signature."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    column_mask = column < SIZE
    hidden_ptrs = hidden_ptr + (row * hidden_stride + column)
    # Weights are loaded before the sum, so that they have arrived when it is done.
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    delta_weight, bias = weight, weight
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
    if delta_norm_ptr is not None:
        delta_weight = tl.load(delta_norm_ptr + column, mask=column_mask, other=0.0)
    if NUM_SLICES > 0:
        # A product has made delta right before; the residual stream is older.
        start_dependents(PDL)
        x = tl.load(hidden_ptrs, mask=column_mask, other=0.0, cache_modifier=".cg")
        wait_for_producers(PDL)
    else:
        wait_for_producers(PDL)
        start_dependents(PDL)
        x = tl.load(hidden_ptrs, mask=column_mask, other=0.0)
    if NUM_SLICES > 0:
        delta_ptrs = delta_ptr + (row * delta_stride + column)
        total = tl.load(delta_ptrs, mask=column_mask, other=0.0).to(tl.float32)
        for slice_index in tl.static_range(1, NUM_SLICES):
            total += tl.load(delta_ptrs + slice_index * delta_slice_stride, mask=column_mask, other=0.0)

        x = add_total(
            x, total, bias_ptr, bias, delta_norm_ptr, delta_weight, eps if delta_eps is None else delta_eps,
            SIZE, DELTA_MULTIPLIER, NORM_KIND,
        )  # fmt: skip
        if factor_ptr is not None:
            x = (x.to(tl.float32) * tl.load(factor_ptr).to(tl.float32)).to(x.dtype)
        tl.store(hidden_ptrs, x, mask=column_mask)

    if aux_hidden_ptr is not None:
        tl.store(aux_hidden_ptr + row * aux_hidden_stride + column, x, mask=column_mask)

    normed = normalise(x, weight, eps, SIZE, NORMED_MULTIPLIER, NORM_KIND)
    tl.store(normed_ptr + row * normed_stride + column, normed, mask=column_mask)


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    aux_hidden: Tensor | None = None,
    delta_norm: Tensor | None = None,
    delta_eps: float | None = None,
    delta_multiplier: float = 1.0,
    factor: Tensor | None = None,
    normed_multiplier: float = 1.0,
    norm_kind: NormKind = "rounded",
) -> None:
    """hidden += delta in place, then normed = rms_norm(hidden) * normed_multiplier * weight.

    Longer than other wrappers by its arguments.
    hidden, normed: [R, H] in the storage type. weight: [H], likewise.
    delta: [R, H] in the storage type, or fp32 partial sums [num_slices, R, H], added in the order of slices,
    then bias [H] (storage type) if given, then rounded to the storage type; or None for the norm alone.
    Beside a delta, which a product made right before, hidden must be older than that product.
    delta_norm [H] in the storage type, if given: delta is normalised, and weighed by it, before it is added.
    delta_eps: of the norm of delta; None: eps.
    delta_multiplier: delta is multiplied by it, after its norm.
    factor [1] in the storage type, if given: then hidden is multiplied by it.
    normed_multiplier: applied before the first rounding of `normed`. norm_kind: see `weigh`.
    aux_hidden: [R, H] in the storage type, if given, takes a copy of the updated hidden.
    Rows of all but weights and bias may have any stride. Raises ValueError for another shape, type or layout.
    """
    num_rows, size = hidden.shape
    dtype = hidden.dtype
    check_rows("hidden", hidden, (num_rows, size), dtype)
    check_tensor("weight", weight, (size,), dtype)
    check_rows("normed", normed, (num_rows, size), dtype)
    slices = PartialSums(0, 0)
    if delta is not None:
        slices = check_partial_sums("delta", delta, num_rows, size, dtype)

    check_tensors((size,), dtype, bias=bias, delta_norm=delta_norm)
    check_tensors((1,), dtype, factor=factor)
    for name, tensor in (("bias", bias), ("delta_norm", delta_norm), ("factor", factor)):
        if tensor is not None and delta is None:
            raise ValueError(f"{name}: given without delta: expected None")

    if aux_hidden is not None:
        check_rows("aux_hidden", aux_hidden, (num_rows, size), dtype)

    _add_norm[(num_rows,)](
        hidden_ptr=hidden,
        delta_ptr=delta,
        bias_ptr=bias,
        delta_norm_ptr=delta_norm,
        factor_ptr=factor,
        weight_ptr=weight,
        normed_ptr=normed,
        aux_hidden_ptr=aux_hidden,
        eps=eps,
        delta_eps=delta_eps,
        hidden_stride=hidden.stride(0),
        delta_slice_stride=slices.slice_stride,
        delta_stride=0 if delta is None else delta.stride(-2),
        normed_stride=normed.stride(0),
        aux_hidden_stride=0 if aux_hidden is None else aux_hidden.stride(0),
        SIZE=size,
        PADDED_SIZE=next_power_of_2(size),
        NUM_SLICES=slices.num_slices,
        DELTA_MULTIPLIER=delta_multiplier,
        NORMED_MULTIPLIER=normed_multiplier,
        NORM_KIND=norm_kind,
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


@device_function
def _normed_sum(
    ptrs,  # [PADDED_SIZE]: of a row, NUM_SLICES times
    slice_stride,
    bias,  # [PADDED_SIZE], storage type, or None
    weight,  # [PADDED_SIZE], storage type
    column_mask,
    eps,
    SIZE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NORM_KIND: tl.constexpr,
):
    """Return the sum of the slices and the bias, normalised and weighed, in fp32."""
    total = tl.load(ptrs, mask=column_mask, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        total += tl.load(ptrs + slice_index * slice_stride, mask=column_mask, other=0.0)

    if bias is not None:
        total += bias.to(tl.float32)
    total = total.to(weight.dtype).to(tl.float32)
    scale = inverse_rms(tl.sum(total * total, axis=0), SIZE, eps)
    return weigh(total * scale, weight, NORM_KIND).to(tl.float32)


@kernel
def _add_normed(
    first_ptr,  # [FIRST_SLICES, R, SIZE] fp32, or [R, SIZE] in the storage type
    second_ptr,  # [SECOND_SLICES, R, SIZE] fp32, or likewise
    bias_ptr,  # [SIZE], storage type, or None
    first_norm_ptr,  # [SIZE], storage type
    second_norm_ptr,  # [SIZE], storage type
    out_ptr,  # [R, SIZE], storage type
    eps,
    first_slice_stride,
    first_stride,
    second_slice_stride,
    second_stride,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,  # SIZE, rounded up to a power of two
    FIRST_SLICES: tl.constexpr,
    SECOND_SLICES: tl.constexpr,
    NORM_KIND: tl.constexpr,  # see `weigh`
    PDL: tl.constexpr,
):
    """Program (row): one row."""
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    column_mask = column < SIZE
    first_norm = tl.load(first_norm_ptr + column, mask=column_mask, other=0.0)
    second_norm = tl.load(second_norm_ptr + column, mask=column_mask, other=0.0)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
    wait_for_producers(PDL)
    first = _normed_sum(
        first_ptr + (row * first_stride + column), first_slice_stride, bias, first_norm, column_mask, eps,
        SIZE, FIRST_SLICES, NORM_KIND,
    )  # fmt: skip
    second = _normed_sum(
        second_ptr + (row * second_stride + column), second_slice_stride, None, second_norm, column_mask, eps,
        SIZE, SECOND_SLICES, NORM_KIND,
    )  # fmt: skip
    tl.store(out_ptr + row * SIZE + column, (first + second).to(first_norm.dtype), mask=column_mask)


def add_normed(
    first: Tensor,
    second: Tensor,
    first_norm: Tensor,
    second_norm: Tensor,
    out: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    norm_kind: NormKind = "rounded",
) -> None:
    """out = rms_norm(first + bias) * first_norm + rms_norm(second) * second_norm.

    first, second: [R, H] in the storage type, or fp32 partial sums [num_slices, R, H], added in order. Rows
    may have any stride. bias, first_norm, second_norm: [H]; out: [R, H], all in the storage type. norm_kind:
    of both, see `weigh`. Raises ValueError for another shape, type or layout.
    """
    num_rows, size = out.shape
    dtype = out.dtype
    check_tensor("out", out, (num_rows, size), dtype)
    check_tensors((size,), dtype, first_norm=first_norm, second_norm=second_norm, bias=bias)
    first_slices = check_partial_sums("first", first, num_rows, size, dtype)
    second_slices = check_partial_sums("second", second, num_rows, size, dtype)
    _add_normed[(num_rows,)](
        first_ptr=first,
        second_ptr=second,
        bias_ptr=bias,
        first_norm_ptr=first_norm,
        second_norm_ptr=second_norm,
        out_ptr=out,
        eps=eps,
        first_slice_stride=first_slices.slice_stride,
        first_stride=first.stride(-2),
        second_slice_stride=second_slices.slice_stride,
        second_stride=second.stride(-2),
        SIZE=size,
        PADDED_SIZE=next_power_of_2(size),
        FIRST_SLICES=first_slices.num_slices,
        SECOND_SLICES=second_slices.num_slices,
        NORM_KIND=norm_kind,
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


@kernel
def _embed_norm(
    row_token_ptr,  # [R] int32; negative: padding row
    row_slot_ptr,  # [R] int32; negative: padding row
    embedding_ptr,  # [V, SIZE], storage type
    weight_ptr,  # [SIZE], storage type
    hidden_ptr,  # [R, SIZE], storage type
    normed_ptr,  # [R, SIZE], storage type
    eps,
    embedding_eps,  # or None
    hidden_stride,
    normed_stride,
    SIZE: tl.constexpr,  # hidden size
    PADDED_SIZE: tl.constexpr,  # SIZE, rounded up to a power of two
    MULTIPLIER: tl.constexpr,
    NORMED_MULTIPLIER: tl.constexpr,
    NORM_KIND: tl.constexpr,  # see `weigh`
    PDL: tl.constexpr,
):
    """Program (row): one row."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    column_mask = column < SIZE
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    token = tl.load(row_token_ptr + row).to(tl.int64)
    is_live = tl.minimum(token, tl.load(row_slot_ptr + row)) >= 0
    live_mask = column < tl.where(is_live, SIZE, 0)
    x = tl.load(embedding_ptr + token * SIZE + column, mask=live_mask, other=0.0)
    if MULTIPLIER != 1.0:
        x = (x.to(tl.float32) * MULTIPLIER).to(x.dtype)
    if embedding_eps is not None:
        embedded = x.to(tl.float32)
        embedded *= inverse_rms(tl.sum(embedded * embedded, axis=0), SIZE, embedding_eps)
        x = tl.where(is_live, embedded, 0.0).to(x.dtype)
    tl.store(hidden_ptr + row * hidden_stride + column, x, mask=column_mask)
    wide = x.to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    if NORMED_MULTIPLIER != 1.0:
        scaled *= NORMED_MULTIPLIER
    # With eps 0 a row of zeros has no norm.
    scaled = tl.where(is_live, scaled, 0.0)
    tl.store(normed_ptr + row * normed_stride + column, weigh(scaled, weight, NORM_KIND), mask=column_mask)


def embed_norm(
    row_token: Tensor,
    row_slot: Tensor,
    embedding: Tensor,
    weight: Tensor,
    hidden: Tensor,
    normed: Tensor,
    *,
    eps: float,
    embedding_eps: float | None = None,
    multiplier: float = 1.0,
    normed_multiplier: float = 1.0,
    norm_kind: NormKind = "rounded",
) -> None:
    """hidden = embedding[row_token] * multiplier, normed = rms_norm(hidden) * normed_multiplier * weight.

    row_token, row_slot: [R] int32; rows with a negative token or slot get zeros in both outputs.
    embedding_eps: hidden is normalised with it, without a weight, after the multiplier; None: it is not.
    embedding [V, H], weight [H], hidden and normed [R, H]: in the storage type. Rows of hidden and normed may
    have any stride. Raises ValueError for another shape, type or layout.
    """
    (num_rows,) = row_token.shape
    vocab_size, size = embedding.shape
    dtype = embedding.dtype
    check_tensors((num_rows,), torch.int32, row_token=row_token, row_slot=row_slot)
    check_tensor("embedding", embedding, (vocab_size, size), dtype)
    check_tensor("weight", weight, (size,), dtype)
    check_rows("hidden", hidden, (num_rows, size), dtype)
    check_rows("normed", normed, (num_rows, size), dtype)
    _embed_norm[(num_rows,)](
        row_token_ptr=row_token,
        row_slot_ptr=row_slot,
        embedding_ptr=embedding,
        weight_ptr=weight,
        hidden_ptr=hidden,
        normed_ptr=normed,
        eps=eps,
        embedding_eps=embedding_eps,
        hidden_stride=hidden.stride(0),
        normed_stride=normed.stride(0),
        SIZE=size,
        PADDED_SIZE=next_power_of_2(size),
        MULTIPLIER=multiplier,
        NORMED_MULTIPLIER=normed_multiplier,
        NORM_KIND=norm_kind,
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )
