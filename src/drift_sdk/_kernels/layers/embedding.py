"""Rows of the embedding as the residual stream, and the first norm of it.

Bytes: three rows of the storage type for each row; a program has one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.layers.rms_norm import inverse_rms, norm_warps, rms_norm_reference, weigh

__all__ = ["embed_norm", "embed_norm_reference"]


@triton.jit
def _embed_norm(
    row_token, row_slot, embedding, weight, hidden, normed, eps, hidden_stride, normed_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    weights = tl.load(weight + column, mask=is_column, other=0.0)
    token = tl.load(row_token + row).to(tl.int64)
    is_live = tl.minimum(token, tl.load(row_slot + row)) >= 0
    x = tl.load(embedding + token * SIZE + column, mask=column < tl.where(is_live, SIZE, 0), other=0.0)
    tl.store(hidden + row * hidden_stride + column, x, mask=is_column)
    wide = x.to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    # With eps 0 a row of zeros has no norm.
    scaled = tl.where(is_live, scaled, 0.0)
    tl.store(normed + row * normed_stride + column, weigh(scaled, weights), mask=is_column)


def embed_norm(
    row_token: Tensor,
    row_slot: Tensor,
    embedding: Tensor,
    weight: Tensor,
    hidden: Tensor,
    normed: Tensor,
    *,
    eps: float,
) -> None:
    """hidden = embedding[row_token], normed = rms_norm(hidden) * weight.

    row_token, row_slot [N] int32: rows with a negative token or slot get zeros in both. embedding [V, H],
    weight [H], hidden and normed [N, H], whose rows may stand apart, in the storage type. Raises ValueError
    for another shape, type or layout.
    """
    (num_rows,) = row_token.shape
    vocab_size, size = embedding.shape
    check_tensor("row_token", row_token, (num_rows,), torch.int32)
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_tensor("embedding", embedding, (vocab_size, size), embedding.dtype)
    check_tensor("weight", weight, (size,), embedding.dtype)
    check_rows("hidden", hidden, (num_rows, size), embedding.dtype)
    check_rows("normed", normed, (num_rows, size), embedding.dtype)
    _embed_norm[(num_rows,)](
        row_token,
        row_slot,
        embedding,
        weight,
        hidden,
        normed,
        eps,
        hidden.stride(0),
        normed.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


def embed_norm_reference(
    row_token: Tensor, row_slot: Tensor, embedding: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(hidden, normed) as `embed_norm` writes them."""
    is_live = ((row_token >= 0) & (row_slot >= 0))[:, None]
    hidden = torch.where(is_live, embedding[row_token.clamp(min=0).to(torch.int64)], 0)
    return hidden, torch.where(is_live, rms_norm_reference(hidden, weight, eps), 0)
