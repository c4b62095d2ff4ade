"""Products with quantised weights, whose bits do not depend on the number of rows.

    quantised_multiply:        out[m, n] = sum over k of x[m, k] * weight[n, k]
    quantised_gated_multiply:  out[m, n] = activation(x[m] . gate[n]) * (x[m] . up[n])

The weights keep their codes in memory (packing.py). multiply.cu converts them in registers, exactly, and
multiplies by wgmma in bfloat16 with sums in float32; the weights stand on the M side. Scales are applied to
the sums: those of groups to the sum of a group, that of a row to the sum of a slice.

Order of summation: one tree for each weight. Slices are those of gemm/slices.py, left as partial sums that
the next kernel adds. A slice is cut into steps of 128 columns from its beginning. Tensor cores sum the
columns of a group inside a step, from zero, 16 at a time. The groups of a step are added in ascending order,
and then the steps, in float32. Which warp computes a step, and how many rows there are, changes no bit.

Bytes: the codes once for each 64 rows of x. From 64 rows on, those of the same weights run together, so that
they come from memory once.

Dependent launch: before it waits, a program copies the first steps of its weights, which never change,
to shared memory. It permits its dependents to start after its last step.

The CUDA program needs a GPU of compute capability 9.0, x in bfloat16, and an inner dimension that is a
multiple of 64. Elsewhere, the kernel of twin.py does the same from the same bytes. Its sums have another
order, so other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.cuda_programs import (
    CudaKernel,
    compile_kernel,
    has_compiler,
    launch_kernel,
)
from drift_sdk._kernels.common.launch_order import KernelAccess, note_kernel
from drift_sdk._kernels.layers.activation import Activation
from drift_sdk._kernels.quantised.packing import STEP, UNIT, PackedWeight
from drift_sdk._kernels.quantised.tile_choice import choose_tiles
from drift_sdk._kernels.quantised.tiles import Tiles
from drift_sdk._kernels.quantised.twin import twin_gated_multiply, twin_multiply

__all__ = ["quantised_gated_multiply", "quantised_multiply"]

ACCESS = KernelAccess(frozenset({"codes", "scales", "zeros"}), frozenset({"out"}), False)
"""Arguments that multiply.cu reads before it waits, and those that it writes."""

SCALES = {torch.float32: "GROUP_FLOAT32", torch.bfloat16: "GROUP_BFLOAT16", torch.float16: "GROUP_FLOAT16"}


def quantised_multiply(x: Tensor, weight: PackedWeight, out: Tensor, tiles: Tiles | None = None) -> None:
    """Partial sums of x times weight transposed, in `out`. The product is their sum, added in order.

    x [M, weight.inner]; out [weight.num_slices, M, weight.num_columns] float32. All contiguous. tiles: None:
    those of `choose_tiles`. Raises ValueError for another shape, type or layout, and for a gated weight.
    """
    num_rows = x.shape[0]
    check_tensor("x", x, (num_rows, weight.inner), x.dtype)
    check_tensor("out", out, (weight.num_slices, num_rows, weight.num_columns), torch.float32)
    if weight.is_gated:
        raise ValueError("weight: arranged for a gated product: expected one that is not")
    if has_program(x, weight):
        _launch(x, weight, None, out, "SUMS", tiles)
    else:
        twin_multiply(x, weight, out)


def quantised_gated_multiply(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    gate_up: Tensor,
    activation: Activation = "silu",
    bias: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """activation(x G^T + b) * (x U^T + c) in out [M, N], of x's type, for a gated weight of 2 N rows.

    gate_up [M, 2 N], of x's type: scratch memory of the fallback. bias [2 N], of x's type, the gate
    before up. The other arguments are those of `quantised_multiply`. Raises ValueError likewise.
    """
    num_rows = x.shape[0]
    check_tensor("x", x, (num_rows, weight.inner), x.dtype)
    check_tensor("out", out, (num_rows, weight.num_columns // 2), x.dtype)
    check_tensor("gate_up", gate_up, (num_rows, weight.num_columns), x.dtype)
    check_tensors((weight.num_columns,), x.dtype, bias=bias)
    if not weight.is_gated:
        raise ValueError("weight: not arranged for a gated product: expected one that is")
    if has_program(x, weight):
        _launch(x, weight, bias, out, activation.upper(), tiles)
    else:
        twin_gated_multiply(x, weight, out, gate_up, activation, bias)


def has_program(x: Tensor, weight: PackedWeight) -> bool:
    """Whether the CUDA program computes the product."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or weight.inner % UNIT:
        return False

    return torch.cuda.get_device_capability(x.device) == (9, 0) and has_compiler()


def _launch(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, epilogue: str, tiles: Tiles | None
) -> None:
    num_rows = x.shape[0]
    num_multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    if tiles is None:
        tiles = choose_tiles(weight, num_rows, num_multiprocessors)
    shared_bytes = tiles.shared_bytes(weight)
    kernel = compile_kernel(kernel_of(weight, tiles, epilogue), x.device.index or 0, shared_bytes)
    launch_kernel(
        kernel,
        tiles.grid(weight, num_rows),
        tiles.num_threads,
        shared_bytes,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.row_scales,
        x,
        bias,
        out,
        num_rows,
        weight.num_columns,
        weight.inner,
        weight.num_slices,
        weight.slice_size,
    )
    arguments = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros, "out": out}
    note_kernel("a product with a quantised weight", ACCESS, arguments)


def kernel_of(weight: PackedWeight, tiles: Tiles, epilogue: str) -> CudaKernel:
    """The kernel for a weight's format. epilogue: one of those of multiply.cu."""
    scales = "CHANNEL" if weight.scales is None else SCALES[weight.scales.dtype]
    has_zeros = "false" if weight.zeros is None else "true"
    num_groups = STEP // weight.group_size
    arguments = f"{weight.code_type.upper()}, {scales}, {has_zeros}, {num_groups}, {epilogue}"
    return CudaKernel(
        "drift_sdk._kernels.quantised",
        ("multiply.cu",),
        "product",
        (
            ("MULTIPLY", f"multiply<{arguments}, {tiles.template()}>"),
            ("THREADS", str(tiles.num_threads)),
            ("CTAS", str(tiles.num_ctas)),
        ),
    )
