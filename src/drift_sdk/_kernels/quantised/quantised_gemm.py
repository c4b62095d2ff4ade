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
multiple of 64. Elsewhere, a kernel in Triton does the same from the same bytes. Its sums have
another order, so other bits.

Launch configurations of products with quantised weights. None of them changes a bit of a result.

The choice of tiles for products with quantised weights, by the weight's shape and the number of rows.

A CTA has a multiprocessor to itself. It has so many panels that the CTAs of all of them take the least time,
as the multiprocessors work on one CTA after the other, unless its sums would not fit into registers. More
warpgroups that share a slice, two CTAs a multiprocessor, and clusters whose CTAs share rows of x by multicast
were not faster on an H200.

Products with quantised weights in Triton: the fallback of multiply.cu, and its oracle in tests.

The kernel reads the same bytes (packing.py), so an error in their arrangement shows in both. It is written
for clarity: an address is computed for each code. A program sums a slice by groups in ascending order, by a
product and an addition each; its bits differ from those of multiply.cu.

Grid: (tiles of TILE_N rows of the weight times tiles of TILE_M rows of x, slices).

Dependent launch: the kernel waits first. It permits its dependents to start after its loop.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_tensor, check_tensors
from drift_sdk._kernels.launch.cuda_programs import Boxes, CudaKernel, compile_kernel, launch_kernel
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel
from drift_sdk._kernels.layers.gates import glu
from drift_sdk._kernels.quantised.packing import (
    BYTE_CODES,
    PANEL,
    STEP,
    UNIT,
    PackedWeight,
    has_programs,
    natural_column,
    packed_codes,
    packed_numbers,
    packed_zeros,
    program,
    scale_place,
)
from drift_sdk.spec.model import Activation

MAX_SHARED_BYTES = 232_448
"""Shared memory that a CTA may have on compute capability 9.0."""
UNIT_BYTES = {"e4m3": 4096, "int8": 4096, "int4": 2048, "e2m1": 2048}
"""Bytes of the codes of 64 rows and 64 columns."""
FEW_ITEMS = 132
"""As many items, a panel and a slice each, as an H200 has multiprocessors."""
MAX_THREADS = 1024
COPY_THREADS = 64
"""Threads of the warps that copy."""
BARRIER_BYTES = 8
ALIGNMENT = 1024
"""Bytes at whose multiples a stage lies in shared memory."""


class Tiles(Struct, frozen=True):
    """Work of a CTA of multiply.cu.

    num_panels: panels of 64 weight rows, each with its warpgroups. num_rows: rows of x, 8, 16, 32, 64 or 128.
    num_stages: steps in shared memory.
    """

    num_panels: int
    num_rows: int
    num_stages: int

    def num_threads(self, weight: PackedWeight) -> int:
        """Threads of the warpgroups, and of the warps that copy."""
        return 128 * self.num_panels * num_splits(weight) + COPY_THREADS

    def template(self, weight: PackedWeight) -> str:
        """The last template arguments of `multiply`."""
        return f"{self.num_panels}, {num_splits(weight)}, {self.num_rows // 8}, {self.num_stages}"

    def shared_bytes(self, weight: PackedWeight) -> int:
        """Bytes of shared memory: stages with two barriers each, which totals replace at the end; at least so
        many that a multiprocessor has one CTA: with two, others would have none."""
        totals = (num_splits(weight) - 1) * self.num_panels * PANEL * self.num_rows * 4
        stages = self.num_stages * (self.stage_bytes(weight) + 2 * BARRIER_BYTES)
        return max(stages, totals, MAX_SHARED_BYTES // 2 + 1024)

    def stage_bytes(self, weight: PackedWeight) -> int:
        """Bytes of a step in shared memory: of x and of the weight."""
        step = self.num_rows * STEP * 2 + self.num_panels * panel_bytes(weight)
        return -(-step // ALIGNMENT) * ALIGNMENT

    def fits(self, weight: PackedWeight) -> bool:
        """Whether the program can be launched so for a weight."""
        splits = num_splits(weight)
        return (
            self.num_panels <= most_panels(weight, self.num_rows)
            and self.shared_bytes(weight) <= MAX_SHARED_BYTES
            and self.num_stages > splits
            and self.num_stages % splits == 0
        )

    def grid(self, weight: PackedWeight, num_rows: int) -> tuple[int, int, int]:
        """CTAs along the rows, along the weight, and slices."""
        return -(-num_rows // self.num_rows), -(-weight.num_panels // self.num_panels), weight.num_slices


def num_splits(weight: PackedWeight) -> int:
    """Warpgroups with the same rows of the weight, which take the steps of a slice in turn.

    Part of the order of summation: a function of the weight's shape alone.
    """
    return 2 if num_items(weight) <= 2 * FEW_ITEMS else 1


def num_items(weight: PackedWeight) -> int:
    """Panels of all slices."""
    return weight.num_panels * weight.num_slices


def panel_bytes(weight: PackedWeight) -> int:
    """Bytes of a step of a panel in shared memory: codes, scales, and zero points or offsets."""
    codes = STEP // UNIT * UNIT_BYTES[weight.code_type]
    by_group = (weight.scales, weight.zeros, weight.offsets)
    sizes = [tensor.dtype.itemsize for tensor in by_group if tensor is not None]
    return codes + STEP // weight.group_size * PANEL * sum(sizes)


ROWS = (8, 16, 32, 64)
"""Rows of x that a CTA may have."""
MANY_ROWS = 128
"""Rows of x that a CTA may have of large products, with few panels: more registers."""
BY_ROW_MANY = 256
"""With more rows of x, a CTA has MANY_ROWS of them beside a weight with codes of a byte and a scale a row,
whose sums take few registers, and three panels, or two with two warpgroups each. For the weights of
Llama-3.1-8B and 2,048 rows, these are the fastest of the tiles that were measured on an H200."""
NUM_REGISTERS = 65_536
"""Registers of a multiprocessor."""
OTHER_REGISTERS = 40
"""Registers of a thread beside its sums: fragments, scales and places."""
MAX_STAGES = 16
MIN_STAGES = 3
"""Of the numbers of panels that were measured on an H200, none had fewer."""


def choose_tiles(weight: PackedWeight, num_rows: int) -> Tiles:
    """Return the tiles for a product of `num_rows` rows, with as many stages as fit."""
    splits = num_splits(weight)
    rows = next((rows for rows in ROWS if rows >= num_rows), None)
    if weight.row_scales is not None and weight.code_type in BYTE_CODES and num_rows > BY_ROW_MANY:
        rows, num_panels = MANY_ROWS, 4 - splits
    elif rows is not None:
        num_panels = choose_panels(weight, rows)
    elif weight.offsets is not None:
        rows, num_panels = ROWS[-1], most_panels(weight, ROWS[-1])
    else:
        # Steps of codes of a byte are so large that four stages fit beside 128 rows, two for each of two
        # warpgroups.
        has_many = splits == 1 or weight.code_type not in BYTE_CODES
        rows, num_panels = (MANY_ROWS, 2 // splits) if has_many else (ROWS[-1], 2)
    return Tiles(num_panels, rows, most_stages(weight, num_panels, rows))


def choose_panels(weight: PackedWeight, rows: int) -> int:
    """Return the panels of a CTA with so many rows of x, for which the multiprocessors take the least time.

    One that has several CTAs works on them one after the other, and for each it waits for its first steps,
    about as long as it works on half a panel. There are MIN_STAGES at least.
    """

    def cost(num_panels: int) -> tuple[int, int]:
        num_ctas = -(-weight.num_panels // num_panels) * weight.num_slices
        return -(-num_ctas // FEW_ITEMS) * (2 * num_panels + 1), -num_panels

    numbers = range(1, most_panels(weight, rows) + 1)
    return min((each for each in numbers if most_stages(weight, each, rows) >= MIN_STAGES), key=cost)


def most_stages(weight: PackedWeight, num_panels: int, rows: int) -> int:
    """Return as many stages as fit, at most MAX_STAGES."""
    splits = num_splits(weight)
    number = (MAX_SHARED_BYTES - 1024) // Tiles(num_panels, rows, 1).stage_bytes(weight)
    return min(number, MAX_STAGES) // splits * splits


def most_panels(weight: PackedWeight, rows: int) -> int:
    """Return the most panels of a CTA with so many rows of x, whose threads keep their sums in registers.

    A thread has rows / 2 sums of all columns, as many of a group, and with offsets twice as many of the
    columns of x.
    """
    kinds = 1 if weight.row_scales is not None else 2 if weight.offsets is None else 4
    num_threads = min(NUM_REGISTERS // (OTHER_REGISTERS + kinds * rows // 2), MAX_THREADS)
    return (num_threads - COPY_THREADS) // (128 * num_splits(weight))


TILE_N = 64
TILE_M = 16
NUM_WARPS = 4


@device_function
def packed_sums(
    x_ptrs,  # [TILE_M, 1]: rows of x
    is_row,  # [TILE_M]
    codes_ptr,  # uint8, as packing.py arranges them
    scales_ptr,  # [panels, groups, 4, 8, 2], or None
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    offsets_ptr,  # [panels, groups, 4, 8, 2], or None
    row_scales_ptr,  # fp32 [N], in the order of packed rows, or None
    packed_row,  # [TILE_N]
    is_column,  # [TILE_N]
    first_inner,
    end_inner,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Return the sums [TILE_N, TILE_M] fp32 of some packed rows times rows of x, from first_inner on."""
    NUM_UNITS: tl.constexpr = (K + 63) // 64
    dtype = x_ptrs.dtype.element_ty
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for k in range(first_inner, end_inner, GROUP_SIZE):
        inner = k + tl.arange(0, GROUP_SIZE)
        is_inner = inner < end_inner
        is_code = is_column[:, None] & is_inner[None, :]
        codes = packed_codes(codes_ptr, packed_row[:, None], inner[None, :], is_code, NUM_UNITS, CODES)
        place = scale_place(packed_row, k // GROUP_SIZE, NUM_UNITS * 64 // GROUP_SIZE)
        zeros = packed_zeros(zeros_ptr, place, is_column, ZERO_POINT)[:, None]
        weights = tl.where(is_code, packed_numbers(codes, zeros, dtype, CODES), 0.0).to(dtype)
        x = tl.load(x_ptrs + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        part = tl.dot(weights, x.T, input_precision="ieee")
        if scales_ptr is not None:
            part *= tl.load(scales_ptr + place, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + place, mask=is_column, other=0.0).to(tl.float32)
            part += offsets[:, None] * tl.sum(x.to(tl.float32), axis=1)[None, :]
        total += part

    if row_scales_ptr is not None:
        total *= tl.load(row_scales_ptr + packed_row, mask=is_column, other=0.0)[:, None]
    return total


@kernel(do_not_specialize=["M"])
def _twin_multiply(
    x_ptr,  # [M, K], storage type
    codes_ptr,  # uint8, as packing.py arranges them
    scales_ptr,  # [panels, groups, 4, 8, 2], or None
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    offsets_ptr,  # [panels, groups, 4, 8, 2], or None
    row_scales_ptr,  # fp32 [N], in the order of packed rows, or None
    bias_ptr,  # [N], storage type, or None
    out_ptr,  # [slices, M, N] fp32; of a gated weight [M, N] in the storage type, the gate before up
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICE_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, s): tile t of the output, slice s. Longer than other kernels by its signature."""
    num_tiles_m = tl.cdiv(M, TILE_M)
    packed_row = tl.program_id(0) // num_tiles_m * TILE_N + tl.arange(0, TILE_N)
    row = (tl.program_id(0) % num_tiles_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = row < M, packed_row < N
    wait_for_producers(PDL)
    first_inner = tl.program_id(1) * SLICE_SIZE
    total = packed_sums(
        x_ptr + row[:, None] * K,
        is_row,
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        offsets_ptr,
        row_scales_ptr,
        packed_row,
        is_column,
        first_inner,
        tl.minimum(first_inner + SLICE_SIZE, K),
        K,
        GROUP_SIZE,
        CODES,
        ZERO_POINT,
        TILE_N,
        TILE_M,
    )
    start_dependents(PDL)
    column = natural_column(packed_row, N, IS_GATED)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    out_ptr += tl.program_id(1).to(tl.int64) * M * N
    out_ptrs = out_ptr + row[None, :] * N + column[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def twin_multiply(x: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """`quantised_multiply`, whose checked arguments it takes."""
    _launch_twin(x, weight, None, out)


def twin_gated_multiply(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    gate_up: Tensor,
    activation: Activation = "silu",
    bias: Tensor | None = None,
) -> None:
    """`quantised_gated_multiply`, whose checked arguments it takes. Two kernels."""
    _launch_twin(x, weight, bias, gate_up)
    glu(gate_up, out, activation)


def _launch_twin(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    num_rows, num_columns = x.shape[0], weight.num_columns
    num_tiles = cdiv(num_columns, TILE_N) * cdiv(num_rows, TILE_M)
    _twin_multiply[(num_tiles, weight.num_slices)](
        x_ptr=x,
        codes_ptr=weight.codes,
        scales_ptr=weight.scales,
        zeros_ptr=weight.zeros,
        offsets_ptr=weight.offsets,
        row_scales_ptr=weight.row_scales,
        bias_ptr=bias,
        out_ptr=out,
        M=num_rows,
        N=num_columns,
        K=weight.inner,
        SLICE_SIZE=weight.slice_size,
        GROUP_SIZE=weight.group_size,
        CODES=weight.code_type,
        ZERO_POINT=weight.zero_point,
        IS_GATED=weight.is_gated,
        TILE_N=TILE_N,
        TILE_M=TILE_M,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


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
