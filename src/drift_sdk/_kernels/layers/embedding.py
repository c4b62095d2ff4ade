"""Rows of the embedding as the residual stream, and its first norm.

    hidden[r] = embedding[row_token[r]] * multiplier
    hidden[r] = rms_norm(hidden[r])                                      where its epsilon is given
    normed[r] = rms_norm(hidden[r]) * normed_multiplier * weight

Grid: (rows). A program owns one row, in registers.

Bytes: three rows of the storage type for each row: one in, two out.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.layers.rms_norm import NormKind, inverse_rms, norm_warps, weigh

__all__ = ["embed_norm"]


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
    NORM_KIND: tl.constexpr,  # see rms_norm.py
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
