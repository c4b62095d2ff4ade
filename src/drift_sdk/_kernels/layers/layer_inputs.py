"""Inputs of layers that depend on a row's token alone: made once a step, and gated in each layer.

    own = embedding[row_token[r], l] * embedding_factor
    inputs[r, l] = (rms_norm(sum of slices of product[r, l] * product_factor) * norm + own) * sqrt(1 / 2)

for each layer l, of parts [SIZE] of an embedding and of a product of the stream before the first layer. In a
layer,

    x = sum of slices of gate[r]
    output[r] = activation(x) * inputs[r, l]

Grid: of `_make_inputs` (rows, layers), a program owns the input of a layer for a row; of `_gate_input` (rows,
blocks of columns), BLOCK_COLUMNS columns of a row.

Order of summation: slices in ascending order in float32. Sums, and each product and sum above, are rounded to
the storage type.

Bytes: of each number made, one of the embedding and NUM_SLICES of the product in, one out; of each number
gated, one of the inputs and NUM_SLICES of the gate in, one out.

Dependent launch: both kernels follow a product, and permit their dependents to start at once. Before they
wait, `_make_inputs` reads rows, embedding and norm, which are older than the product or never change, and
`_gate_input` the inputs.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import (
    cdiv,
    check_partial_sums,
    check_rows,
    check_tensor,
    check_tensors,
    next_power_of_2,
)
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.gates import BLOCK_COLUMNS, NUM_WARPS, activate
from drift_sdk._kernels.layers.norm import NormKind, inverse_rms, norm_warps, weigh
from drift_sdk.spec.model import Activation

SQRT_HALF = tl.constexpr(math.sqrt(0.5))


@kernel
def _make_inputs(
    product_ptr,  # [NUM_SLICES, R, NUM_LAYERS * SIZE] fp32, or [R, NUM_LAYERS * SIZE] in the storage type
    row_token_ptr,  # [R] int32; negative: padding row
    row_slot_ptr,  # [R] int32; negative: padding row
    embedding_ptr,  # [V, NUM_LAYERS * SIZE], storage type
    norm_ptr,  # [SIZE], storage type
    inputs_ptr,  # [R, NUM_LAYERS, SIZE], storage type
    eps,
    slice_stride,
    product_stride,
    NUM_LAYERS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,  # SIZE, rounded up to a power of two
    NUM_SLICES: tl.constexpr,
    EMBEDDING_FACTOR: tl.constexpr,
    PRODUCT_FACTOR: tl.constexpr,
    NORM_KIND: tl.constexpr,  # see norm.py
    PDL: tl.constexpr,
):
    """Program (row, layer): the input of a layer for a row."""
    start_dependents(PDL)
    DTYPE: tl.constexpr = inputs_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    is_column = column < SIZE
    place = tl.program_id(1) * SIZE + column
    token = tl.load(row_token_ptr + row, cache_modifier=".cg").to(tl.int64)
    is_live = tl.minimum(token, tl.load(row_slot_ptr + row, cache_modifier=".cg")) >= 0
    own_mask = column < tl.where(is_live, SIZE, 0)
    own = tl.load(embedding_ptr + token * (NUM_LAYERS * SIZE) + place, mask=own_mask, other=0.0)
    own = (own.to(tl.float32) * EMBEDDING_FACTOR).to(DTYPE).to(tl.float32)
    norm = tl.load(norm_ptr + column, mask=is_column, other=0.0)
    wait_for_producers(PDL)
    product_ptrs = product_ptr + row * product_stride + place
    total = tl.load(product_ptrs, mask=is_column, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        total += tl.load(product_ptrs + slice_index * slice_stride, mask=is_column, other=0.0)

    total = (total.to(DTYPE).to(tl.float32) * PRODUCT_FACTOR).to(DTYPE).to(tl.float32)
    scale = inverse_rms(tl.sum(total * total, axis=0), SIZE, eps)
    normed = weigh(total * scale, norm, NORM_KIND).to(tl.float32)
    made = (normed + own).to(DTYPE).to(tl.float32) * SQRT_HALF
    inputs_ptrs = inputs_ptr + row * (NUM_LAYERS * SIZE) + place
    tl.store(inputs_ptrs, tl.where(is_live, made, 0.0).to(DTYPE), mask=is_column)


def make_inputs(
    product: Tensor,
    row_token: Tensor,
    row_slot: Tensor,
    embedding: Tensor,
    norm: Tensor,
    inputs: Tensor,
    *,
    eps: float,
    embedding_factor: float,
    product_factor: float,
    norm_kind: NormKind = "rounded",
) -> None:
    """Fill inputs [R, L, D]: (rms_norm(product * product_factor) + embedding[token] * embedding_factor) *
    sqrt(1 / 2), where the norm is that of each part [D] of a row.

    product: [R, L * D] in the storage type, or fp32 partial sums [num_slices, R, L * D], added in order.
    row_token, row_slot: [R] int32; rows with a negative token or slot get zeros. embedding: [V, L * D]; norm:
    [D], in the storage type. Raises ValueError for another shape, type or layout.
    """
    num_rows, num_layers, size = inputs.shape
    dtype, width = inputs.dtype, num_layers * size
    check_tensor("inputs", inputs, (num_rows, num_layers, size), dtype)
    check_tensors((num_rows,), torch.int32, row_token=row_token, row_slot=row_slot)
    check_tensor("embedding", embedding, (embedding.shape[0], width), dtype)
    check_tensor("norm", norm, (size,), dtype)
    slices = check_partial_sums("product", product, num_rows, width, dtype)
    _make_inputs[(num_rows, num_layers)](
        product_ptr=product,
        row_token_ptr=row_token,
        row_slot_ptr=row_slot,
        embedding_ptr=embedding,
        norm_ptr=norm,
        inputs_ptr=inputs,
        eps=eps,
        slice_stride=slices.slice_stride,
        product_stride=product.stride(-2),
        NUM_LAYERS=num_layers,
        SIZE=size,
        PADDED_SIZE=next_power_of_2(size),
        NUM_SLICES=slices.num_slices,
        EMBEDDING_FACTOR=embedding_factor,
        PRODUCT_FACTOR=product_factor,
        NORM_KIND=norm_kind,
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


@kernel
def _gate_input(
    gate_ptr,  # [NUM_SLICES, R, SIZE] fp32, or [R, SIZE] in the storage type
    input_ptr,  # [R, SIZE], storage type; rows have a stride
    output_ptr,  # [R, SIZE], storage type
    gate_slice_stride,
    gate_stride,
    input_stride,
    SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block): one block of a row's columns."""
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < SIZE
    given = tl.load(input_ptr + row * input_stride + column, mask=is_column, other=0.0, cache_modifier=".cg")
    wait_for_producers(PDL)
    gate_ptrs = gate_ptr + (row * gate_stride + column)
    gate = tl.load(gate_ptrs, mask=is_column, other=0.0).to(tl.float32)
    for slice_index in tl.static_range(1, NUM_SLICES):
        gate += tl.load(gate_ptrs + slice_index * gate_slice_stride, mask=is_column, other=0.0)

    gate = activate(gate.to(given.dtype).to(tl.float32), ACTIVATION).to(given.dtype).to(tl.float32)
    product = (gate * given.to(tl.float32)).to(given.dtype)
    tl.store(output_ptr + row * SIZE + column, product, mask=is_column)


def gate_input(gate: Tensor, given: Tensor, output: Tensor, activation: Activation) -> None:
    """output [R, D] = activation(gate) * given [R, D], in the storage type.

    gate: [R, D] in the storage type, or fp32 partial sums [num_slices, R, D], added in order, then rounded.
    The activation is rounded before the product. given must be older than the product that made `gate`. Rows
    of gate and given may have any stride. Raises ValueError for another shape, type or layout.
    """
    num_rows, size = output.shape
    dtype = output.dtype
    check_tensor("output", output, (num_rows, size), dtype)
    check_rows("given", given, (num_rows, size), dtype)
    slices = check_partial_sums("gate", gate, num_rows, size, dtype)
    _gate_input[(num_rows, cdiv(size, BLOCK_COLUMNS))](
        gate_ptr=gate,
        input_ptr=given,
        output_ptr=output,
        gate_slice_stride=slices.slice_stride,
        gate_stride=gate.stride(-2),
        input_stride=given.stride(0),
        SIZE=size,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        NUM_SLICES=slices.num_slices,
        ACTIVATION=activation,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )
