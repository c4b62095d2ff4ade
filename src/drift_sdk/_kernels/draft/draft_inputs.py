"""The input of a draft's first layer: the next token's embedding beside the feature, each normalised.

Features that end a KV block are stored beside the block on the way, and those after a prefix hit are loaded
from there.

Grid (rows,): a program owns a row, and keeps it in registers: PADDED_COLUMNS is the whole row. Partial sums
are added slice by slice, in order, then rounded to the storage type. A norm's sum of squares is in the order
of Triton's reduction, which PADDED_COLUMNS and `norm_warps` fix, so a row's bits depend only on that row.
Bytes: a row of the embedding and NUM_SLICES rows of fp32, or one of the storage type, in; three out.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.layers.rms_norm import NormKind, inverse_rms, norm_warps, weigh

__all__ = ["Residual", "draft_inputs"]

Residual = Literal["feature", "normed", "zeros"]
"""What the residual stream begins with: the feature, the feature after its norm, or zeros, to which something
is added."""


@device_function
def _exchange_block_feature(
    feature,  # [PADDED_COLUMNS]: the row's, if it is given
    row_position_ptr,  # [R] int32
    block_table_ptr,  # [S, max_blocks] int32
    block_features_ptr,  # [num_blocks, SIZE], read or written
    row,
    slot,
    column,  # [PADDED_COLUMNS]
    is_live,
    is_given,
    block_table_stride,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The row's feature: its block's where it is not given; one that ends a block is stored beside the
    block."""
    position = tl.load(row_position_ptr + row)
    entry_ptr = block_table_ptr + slot.to(tl.int64) * block_table_stride + (position - 1) // BLOCK_SIZE
    block = tl.load(entry_ptr, mask=is_live, other=0).to(tl.int64)
    block_feature_ptr = block_features_ptr + block * SIZE + column
    is_kept = is_live & (is_given == 0)
    kept = tl.load(block_feature_ptr, mask=column < tl.where(is_kept, SIZE, 0), other=0.0)
    feature = tl.where(is_kept, kept, feature)
    ends_block = is_live & is_given & (position % BLOCK_SIZE == 0)
    tl.store(block_feature_ptr, feature, mask=column < tl.where(ends_block, SIZE, 0))
    return feature


@kernel(do_not_specialize=["num_features"])
def _draft_inputs(
    # The rows.
    row_slot_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    features_ptr,  # [F, SIZE], or partial sums [NUM_SLICES, F, SIZE] fp32
    # The weights.
    embedding_ptr,  # [V, SIZE]
    token_norm_ptr,  # [SIZE]
    feature_norm_ptr,  # [SIZE]
    # The results.
    hidden_ptr,  # [R, SIZE], written; may be features_ptr
    inputs_ptr,  # [R, 2 * SIZE], written
    # The KV blocks.
    block_table_ptr,  # [S, max_blocks] int32
    block_features_ptr,  # [num_blocks, SIZE], read and written; or None
    # Sizes.
    eps,
    num_features,  # F
    features_slice_stride,  # elements from a slice of features to the next
    block_table_stride,  # elements from a row of block_table to the next
    SIZE: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,  # SIZE as a power of two
    BLOCK_SIZE: tl.constexpr,  # tokens of a KV block
    NUM_SLICES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM_KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,). Longer than other kernels by its signature."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_COLUMNS)
    is_column = column < SIZE
    slot = tl.load(row_slot_ptr + row)
    token = tl.load(row_token_ptr + row).to(tl.int64)
    is_live = tl.minimum(token, slot) >= 0
    is_given = row < num_features
    dtype = hidden_ptr.dtype.element_ty
    slice_ptr = features_ptr + row * SIZE + column
    is_loaded = column < tl.where(is_live & is_given, SIZE, 0)
    total = tl.load(slice_ptr, mask=is_loaded, other=0.0).to(tl.float32)
    for index in tl.static_range(1, NUM_SLICES):
        total += tl.load(slice_ptr + index * features_slice_stride, mask=is_loaded, other=0.0)

    feature = total.to(dtype)
    if block_features_ptr is not None:
        feature = _exchange_block_feature(
            feature,
            row_position_ptr,
            block_table_ptr,
            block_features_ptr,
            row,
            slot,
            column,
            is_live,
            is_given,
            block_table_stride,
            SIZE,
            BLOCK_SIZE,
        )

    wide = feature.to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    weights = tl.load(feature_norm_ptr + column, mask=is_column, other=0.0)
    normed = weigh(tl.where(is_live, scaled, 0.0), weights, NORM_KIND)
    tl.store(inputs_ptr + row * 2 * SIZE + SIZE + column, normed, mask=is_column)
    if RESIDUAL == "normed":
        feature = normed
    elif RESIDUAL == "zeros":
        feature = tl.zeros_like(feature)
    tl.store(hidden_ptr + row * SIZE + column, feature, mask=is_column)

    is_loaded = column < tl.where(is_live, SIZE, 0)
    wide = tl.load(embedding_ptr + token * SIZE + column, mask=is_loaded, other=0.0).to(tl.float32)
    scaled = wide * inverse_rms(tl.sum(wide * wide, axis=0), SIZE, eps)
    weights = tl.load(token_norm_ptr + column, mask=is_column, other=0.0)
    normed = weigh(tl.where(is_live, scaled, 0.0), weights, NORM_KIND)
    tl.store(inputs_ptr + row * 2 * SIZE + column, normed, mask=is_column)


def draft_inputs(
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    features: Tensor,
    embedding: Tensor,
    token_norm: Tensor,
    feature_norm: Tensor,
    hidden: Tensor,
    inputs: Tensor,
    *,
    eps: float,
    residual: Residual,
    norm_kind: NormKind = "rounded",
    block_table: Tensor,
    block_features: Tensor | None = None,
    block_size: int = 1,
) -> None:
    """inputs [R, 2 H] = (rms_norm(embedding[row_token]), rms_norm(feature)); hidden [R, H] = what `residual`
    says. Both are zeros for rows with a negative slot or token.

    row_slot, row_token, row_position [R] int32: the feature is that of position row_position - 1.
    features: [F, H] in the storage type, or fp32 partial sums [num_slices, F, H], added in order and rounded;
    hidden may be the same tensor. embedding [V, H], token_norm and feature_norm [H]. eps, norm_kind: of both
    norms.
    block_features [num_blocks, H], with block_table [S, max_blocks] int32 and block_size tokens a block:
    features of rows below F that end a block are written there, and those of rows from F on are read there.
    Without it F must be R.

    Raises ValueError for another shape, type or layout.
    """
    num_rows, size = hidden.shape
    num_slices = features.shape[0] if features.dim() == 3 else 1
    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_rows,), torch.int32)

    _check_features(features, hidden, inputs, block_features)
    check_tensor("embedding", embedding, (embedding.shape[0], size), hidden.dtype)
    check_tensor("token_norm", token_norm, (size,), hidden.dtype)
    check_tensor("feature_norm", feature_norm, (size,), hidden.dtype)
    check_rows("block_table", block_table, block_table.shape, torch.int32)
    _draft_inputs[(num_rows,)](
        row_slot,
        row_token,
        row_position,
        features,
        embedding,
        token_norm,
        feature_norm,
        hidden,
        inputs,
        block_table,
        block_features,
        eps,
        features.shape[-2],
        features.stride(0) if features.dim() == 3 else 0,
        block_table.stride(0),
        SIZE=size,
        PADDED_COLUMNS=next_power_of_2(size),
        BLOCK_SIZE=block_size,
        NUM_SLICES=num_slices,
        RESIDUAL=residual,
        NORM_KIND=norm_kind,
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


def _check_features(features: Tensor, hidden: Tensor, inputs: Tensor, block_features: Tensor | None) -> None:
    (num_rows, size), dtype = hidden.shape, hidden.dtype
    num_features = features.shape[-2]
    if features.dim() == 3:
        check_tensor("features", features, (features.shape[0], num_features, size), torch.float32)
    else:
        check_tensor("features", features, (num_features, size), dtype)

    if num_features > num_rows or (block_features is None and num_features != num_rows):
        raise ValueError(f"features: {num_features} rows: expected {num_rows}, or fewer with block_features")

    check_tensor("hidden", hidden, (num_rows, size), dtype)
    check_tensor("inputs", inputs, (num_rows, 2 * size), dtype)
    if block_features is not None:
        check_tensor("block_features", block_features, (block_features.shape[0], size), dtype)
