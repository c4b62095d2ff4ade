"""Products with quantised weights, whose bits do not depend on the number of rows.

    quantised_multiply:        out[m, n] = sum over k of x[m, k] * weight[n, k]
    quantised_gated_multiply:  out[m, n] = activation(x[m] . gate[n]) * (x[m] . up[n])

The weights keep their codes in memory (packing.py). multiply.cu converts them in registers, exactly, and
multiplies by wgmma in bfloat16 with sums in float32; the weights stand on the M side. Scales are applied to
the sums: those of groups to the sum of a group, that of a row to the sum of a slice.

Order of summation: one tree for each weight. Slices are those of gemm/slices.py, left as partial sums that
the next kernel adds. Tensor cores sum the columns of a group, from zero, 16 at a time; of a weight with a
scale a row, all columns. Sums of groups, times their scales, are added in ascending order in float32; of a
group with an offset, then the sum of its columns of x, which tensor cores compute likewise, times the offset.
Where two warpgroups share a slice, each has every second step of 128 columns, and the second one's total is
added to the first one's. Tiles and the number of rows change no bit.

Bytes: the codes once for each 64 or 128 rows of x. CTAs with more rows run together with those of the same
weights, so that these come from memory once.

Dependent launch: before it waits, a program copies the first steps of its weights, which never change,
to shared memory. It permits its dependents to start when all its copies have been started.

The CUDA program needs a GPU of compute capability 9.0, x in bfloat16, and an inner dimension that is a
multiple of 64. Elsewhere, the kernel of twin.py does the same from the same bytes. Its sums have another
order, so other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.cuda_programs import Boxes, CudaKernel, compile_kernel, launch_kernel
from drift_sdk._kernels.common.kernel_access import KernelAccess
from drift_sdk._kernels.common.launch_order import note_kernel
from drift_sdk._kernels.layers.gates import Activation
from drift_sdk._kernels.quantised.packing import UNIT, PackedWeight
from drift_sdk._kernels.quantised.programs import has_programs, program
from drift_sdk._kernels.quantised.tile_choice import choose_tiles
from drift_sdk._kernels.quantised.tiles import Tiles
from drift_sdk._kernels.quantised.twin import twin_gated_multiply, twin_multiply

__all__ = ["quantised_gated_multiply", "quantised_multiply"]

ACCESS = KernelAccess(frozenset({"codes", "scales", "shifts"}), frozenset({"out"}), False)
"""Arguments that multiply.cu reads before it waits, and those that it writes."""


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
    if has_programs(weight, x.dtype):
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
    if has_programs(weight, x.dtype):
        _launch(x, weight, bias, out, activation.upper(), tiles)
    else:
        twin_gated_multiply(x, weight, out, gate_up, activation, bias)


def _launch(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, epilogue: str, tiles: Tiles | None
) -> None:
    num_rows = x.shape[0]
    if tiles is None:
        tiles = choose_tiles(weight, num_rows)
    shared_bytes = tiles.shared_bytes(weight)
    kernel = compile_kernel(kernel_of(weight, tiles, epilogue), x.device.index or 0, shared_bytes)
    launch_kernel(
        kernel,
        tiles.grid(weight, num_rows),
        tiles.num_threads(weight),
        shared_bytes,
        weight.codes,
        weight.scales,
        weight.shifts,
        weight.row_scales,
        Boxes(x, min(tiles.num_rows, num_rows), UNIT),
        bias,
        out,
        num_rows,
        weight.num_columns,
        weight.inner,
        weight.slice_size,
    )
    arguments = {"codes": weight.codes, "scales": weight.scales, "shifts": weight.shifts, "out": out}
    note_kernel("a product with a quantised weight", ACCESS, arguments)


def kernel_of(weight: PackedWeight, tiles: Tiles, epilogue: str) -> CudaKernel:
    """The kernel for a weight's format. epilogue: one of those of multiply.cu."""
    return program(
        weight,
        ("quantised/tile_sums.cu", "quantised/epilogue.cu", "quantised/multiply.cu"),
        "product",
        "MULTIPLY",
        f"{epilogue}, {tiles.template(weight)}",
        THREADS=tiles.num_threads(weight),
    )
