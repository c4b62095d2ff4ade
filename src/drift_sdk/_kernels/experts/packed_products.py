"""Products of experts with quantised weights that stay quantised in memory.

    packed_gated_expert_multiply:  activated[p] = silu(x[p // K] . gate[e]) * (x[p // K] . up[e])
    packed_expert_multiply:        partials[p % K, p // K] = share[p] * (x[p] . weight[e])

for each pair p = row * K + rank of an expert e (routing.py), as expert_gemm.py does
with numbers. The weights of all experts, in one format, lie one after the other as quantised/packing.py
arranges them; packed_products.cu converts them in registers, exactly.

Order of summation: that of quantised_gemm.py with one slice and one warpgroup for all columns. A row's bits
depend neither on the other rows nor on how many of them its expert has.

Grid: as many CTAs as the GPU holds at once. Each goes through tasks, tiles of rows and groups of panels, and
copies the weights of the next ones while it ends one: a CTA for each task would wait longer than it works.

Bytes: the codes of the experts that rows have, once for each tile of their rows. CTAs that run together have
the same weights, so that these come from memory once.

Dependent launch: the rows of experts are listed right before the gated product, so it waits first. The other
one finds its rows, and copies the first steps of its weights, before it waits. Both permit dependents to
start when all copies have been started.

The CUDA program needs a GPU of compute capability 9.0, and x in bfloat16. Elsewhere, a kernel in
Triton does the same from the same bytes. Its sums have another order, so other bits.

Products of experts with quantised weights in Triton: the fallback of packed_products.cu, and its oracle.

The kernels read the same bytes, and sum as quantised/quantised_gemm.py does: a row's bits depend neither on
the other rows nor on how many of them its expert has, and are not those of packed_products.cu. Tiles and
programs are those of expert_gemm.py.

Dependent launch: the kernels wait first. They permit their dependents to start when only the store is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.experts.expert_gemm import (
    ExpertGemmConfig,
    check_expert_rows,
    tile_indices,
    tile_pairs,
)
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk._kernels.launch.arguments import cdiv, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.cuda_programs import Boxes, CudaKernel, compile_kernel, launch_kernel
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel
from drift_sdk._kernels.quantised.packing import PANEL, UNIT, PackedWeight, has_programs, program
from drift_sdk._kernels.quantised.quantised_gemm import BARRIER_BYTES, MAX_SHARED_BYTES, Tiles, packed_sums

TILES = ExpertGemmConfig(tile_n=64, tile_m=16, tile_k=0, num_stages=0, num_warps=4)
"""Tiles of the output and warps; the others have no meaning here."""


@kernel(do_not_specialize=["num_tiles_m", "num_rows"])
def _twin_expert_multiply(
    x_ptr,  # [R, K] of a gated weight, else [R * NUM_ACTIVE, K]: storage type
    codes_ptr,  # uint8, as packing.py arranges them, of all experts
    scales_ptr,  # [panels, groups, 4, 8, 2], or None
    zeros_ptr,  # bfloat16 [panels, groups, 4, 8, 2], or None
    offsets_ptr,  # [panels, groups, 4, 8, 2], or None
    row_scales_ptr,  # fp32 [E * weight rows], in the order of packed rows, or None
    counts_ptr,  # [E] int32
    pairs_ptr,  # [E, R] int32
    shares_ptr,  # [R * NUM_ACTIVE] fp32
    out_ptr,  # [R * NUM_ACTIVE, N] in the storage type of a gated weight, else [NUM_ACTIVE, R, N] fp32
    num_tiles_m,  # the most tiles of rows
    num_rows,  # R
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    N: tl.constexpr,  # columns of the output
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t): tile t of the output. Longer than other kernels by its signature."""
    wait_for_producers(PDL)
    tile_n, tile_m = tile_indices(num_tiles_m, tl.cdiv(N, TILE_N))
    expert, pair = tile_pairs(counts_ptr, pairs_ptr, tile_m, num_rows, NUM_EXPERTS, PADDED_EXPERTS, TILE_M)
    is_row = pair >= 0
    if tl.max(pair, axis=0) < 0:
        return

    dtype = x_ptr.dtype.element_ty
    column = tile_n * TILE_N + tl.arange(0, TILE_N)
    is_column = column < N
    # The row of a gated weight's gate, with its up 8 rows behind; of another weight, the column's.
    packed_row = column // 8 * 16 + column % 8 if IS_GATED else column
    packed_row += expert.to(tl.int32) * (2 * N if IS_GATED else N)
    x_ptrs = x_ptr + (pair // NUM_ACTIVE if IS_GATED else pair).to(tl.int64)[:, None] * K
    total = packed_sums(
        x_ptrs,
        is_row,
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        offsets_ptr,
        row_scales_ptr,
        packed_row,
        is_column,
        0,
        K,
        K,
        GROUP_SIZE,
        CODES,
        ZERO_POINT,
        TILE_N,
        TILE_M,
    )
    if IS_GATED:
        up = packed_sums(
            x_ptrs,
            is_row,
            codes_ptr,
            scales_ptr,
            zeros_ptr,
            offsets_ptr,
            row_scales_ptr,
            packed_row + 8,
            is_column,
            0,
            K,
            K,
            GROUP_SIZE,
            CODES,
            ZERO_POINT,
            TILE_N,
            TILE_M,
        )
        start_dependents(PDL)
        gate = total.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * N + column[:, None]
        total = activated * up.to(dtype).to(tl.float32)
    else:
        start_dependents(PDL)
        share = tl.load(shares_ptr + pair, mask=is_row, other=0.0)
        row = ((pair % NUM_ACTIVE).to(tl.int64) * num_rows + pair // NUM_ACTIVE)[None, :]
        out_ptrs = out_ptr + row * N + column[:, None]
        total = total.to(dtype).to(tl.float32) * share[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def twin_expert_multiply(x: Tensor, weight: PackedWeight, rows: ExpertRows, out: Tensor) -> None:
    """`packed_gated_expert_multiply` or `packed_expert_multiply`, whose checked arguments it takes."""
    num_columns = out.shape[-1]
    num_tiles_m = TILES.num_row_tiles(rows)
    _twin_expert_multiply[(num_tiles_m * cdiv(num_columns, TILES.tile_n),)](
        x_ptr=x,
        codes_ptr=weight.codes,
        scales_ptr=weight.scales,
        zeros_ptr=weight.zeros,
        offsets_ptr=weight.offsets,
        row_scales_ptr=weight.row_scales,
        counts_ptr=rows.counts,
        pairs_ptr=rows.pairs,
        shares_ptr=rows.shares,
        out_ptr=out,
        num_tiles_m=num_tiles_m,
        num_rows=rows.num_rows,
        NUM_EXPERTS=rows.num_experts,
        PADDED_EXPERTS=next_power_of_2(rows.num_experts),
        NUM_ACTIVE=rows.num_active,
        N=num_columns,
        K=weight.inner,
        GROUP_SIZE=weight.group_size,
        CODES=weight.code_type,
        ZERO_POINT=weight.zero_point,
        IS_GATED=weight.is_gated,
        TILE_N=TILES.tile_n,
        TILE_M=TILES.tile_m,
        PDL=uses_pdl(),
        num_warps=TILES.num_warps,
        **launch_options(),
    )


FILES = (
    *("quantised/tile_sums.cu", "quantised/epilogue.cu"),
    *("experts/expert_rows.cu", "experts/packed_products.cu"),
)
GATED_ACCESS = KernelAccess(frozenset(), frozenset({"out"}), False)
DOWN_ACCESS = KernelAccess(frozenset({"codes", "scales", "shifts", "counts"}), frozenset({"out"}), False)

RESERVED_BYTES = 1024
"""Shared memory that each CTA takes besides its own."""
MAX_STAGES = 12
ROWS = ((4, 8), (12, 16))
"""Pairs (most pairs of an expert on average, rows of a tile): most experts have one tile."""
MANY_ROWS, MANY_OFFSET_ROWS = 32, 16
"""Rows of a tile beyond ROWS, and with offsets, whose sums of x take registers too."""
MAX_PANELS = 2
"""Panels of a CTA."""
FEW_ROWS, FEW_CTAS, MANY_CTAS = 8, 2, 3
"""CTAs of a multiprocessor, with up to FEW_ROWS rows of a tile and with more: one multiplies while another
one stores."""


class PackedExperts(Struct, frozen=True):
    """A quantised matrix of each expert.

    weight: the rows of all experts, one after the other; of a gated weight arranged expert by expert.
    num_experts: how many there are. Each has whole panels.
    """

    weight: PackedWeight
    num_experts: int

    @property
    def num_columns(self) -> int:
        """Rows of an expert's weight."""
        return self.weight.num_columns // self.num_experts


class PairTiles(Struct, frozen=True):
    """Work of a CTA of packed_products.cu. No result depends on it.

    num_panels: panels of 64 weight rows, each with a warpgroup. num_rows: rows of x, 8, 16, 32 or 64.
    num_stages: steps in shared memory. num_ctas: CTAs of a multiprocessor.
    """

    num_panels: int
    num_rows: int
    num_stages: int
    num_ctas: int

    @property
    def num_threads(self) -> int:
        """Threads of the warpgroups, and of the warps that copy."""
        return 128 * self.num_panels + 64

    def stage_bytes(self, weight: PackedWeight) -> int:
        """Bytes of shared memory of a step: of x and of the weight, and two barriers."""
        return Tiles(self.num_panels, self.num_rows, 1).stage_bytes(weight) + 2 * BARRIER_BYTES

    def shared_bytes(self, weight: PackedWeight) -> int:
        """Bytes of shared memory of a CTA."""
        return self.num_stages * self.stage_bytes(weight)

    @property
    def most_bytes(self) -> int:
        """Bytes of shared memory that a CTA may have, for a multiprocessor to hold `num_ctas`."""
        return (MAX_SHARED_BYTES + RESERVED_BYTES) // self.num_ctas - RESERVED_BYTES

    def fits(self, weight: PackedWeight) -> bool:
        """Whether a multiprocessor holds `num_ctas` CTAs."""
        return self.shared_bytes(weight) <= self.most_bytes

    def num_row_tiles(self, rows: ExpertRows) -> int:
        """The most tiles of rows that there can be, whatever the experts of the rows are."""
        num_pairs = rows.num_rows * rows.num_active
        num_used = min(rows.num_experts, num_pairs)
        return num_used + (num_pairs - num_used) // self.num_rows


def choose_pair_tiles(experts: PackedExperts, rows: ExpertRows) -> PairTiles:
    """Return the tiles for a product of rows with experts, with as many stages as fit."""
    average = rows.num_rows * rows.num_active / rows.num_experts
    most_rows = MANY_ROWS if experts.weight.offsets is None else MANY_OFFSET_ROWS
    num_rows = next((size for most, size in ROWS if average <= most), most_rows)
    num_ctas = FEW_CTAS if num_rows <= FEW_ROWS else MANY_CTAS
    tiles = PairTiles(min(MAX_PANELS, experts.num_columns // PANEL), num_rows, 1, num_ctas)
    num_stages = min(tiles.most_bytes // tiles.stage_bytes(experts.weight), MAX_STAGES)
    return replace(tiles, num_stages=num_stages)


def stack_experts(parts: Sequence[PackedWeight]) -> PackedExperts | None:
    """Return the weights of experts as one; None if they differ in format or shape, or an expert's last panel
    is not whole. parts: one for each expert, of one slice."""
    first = parts[0]
    formats = {
        (
            *(part.code_type, part.num_columns, part.inner, part.group_size, part.is_gated, part.num_slices),
            *(
                None if tensor is None else tensor.dtype
                for tensor in (part.scales, part.zeros, part.offsets, part.row_scales)
            ),
        )
        for part in parts
    }
    if len(formats) > 1 or first.num_slices > 1 or first.num_columns % PANEL:
        return None

    def stacked(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    stacked_weight = replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=stacked("scales"),
        zeros=stacked("zeros"),
        offsets=stacked("offsets"),
        row_scales=stacked("row_scales"),
        num_columns=first.num_columns * len(parts),
    )
    return PackedExperts(stacked_weight, len(parts))


def packed_gated_expert_multiply(
    x: Tensor, experts: PackedExperts, rows: ExpertRows, out: Tensor, tiles: PairTiles | None = None
) -> None:
    """The activation of the gate and up projections of each pair's expert, in out [R * K', N / 2].

    x [R, inner], out of its type, gated experts of N rows, and `rows` with K' experts for each row, after
    `list_rows`. Rows of `out` whose row is padding are not written. tiles: None: those of
    `choose_pair_tiles`. Raises ValueError for another shape, type or layout.
    """
    num_pairs = rows.num_rows * rows.num_active
    check_tensor("x", x, (rows.num_rows, experts.weight.inner), x.dtype)
    check_tensor("out", out, (num_pairs, experts.num_columns // 2), x.dtype)
    check_expert_rows(rows)
    _check_experts(experts, rows, is_gated=True)
    if not has_programs(experts.weight, x.dtype):
        twin_expert_multiply(x, experts.weight, rows, out)
        return

    _launch(x, experts, rows, out, tiles, is_gated=True)
    note_kernel("gate and up of quantised experts", GATED_ACCESS, {"out": out})


def packed_expert_multiply(
    x: Tensor, experts: PackedExperts, rows: ExpertRows, out: Tensor, tiles: PairTiles | None = None
) -> None:
    """Each pair's share of its expert's product, as partial sums out [K', R, N] float32.

    x [R * K', inner]. The other arguments are those of `packed_gated_expert_multiply`, for experts that are
    not gated. A product is rounded to x's type before it is weighted. Raises ValueError likewise.
    """
    num_pairs = rows.num_rows * rows.num_active
    check_tensor("x", x, (num_pairs, experts.weight.inner), x.dtype)
    check_tensor("out", out, (rows.num_active, rows.num_rows, experts.num_columns), torch.float32)
    check_expert_rows(rows)
    _check_experts(experts, rows, is_gated=False)
    weight = experts.weight
    if not has_programs(weight, x.dtype):
        twin_expert_multiply(x, weight, rows, out)
        return

    _launch(x, experts, rows, out, tiles, is_gated=False)
    arguments = {"codes": weight.codes, "scales": weight.scales, "shifts": weight.shifts}
    note_kernel("down of quantised experts", DOWN_ACCESS, {**arguments, "counts": rows.counts, "out": out})


def _check_experts(experts: PackedExperts, rows: ExpertRows, *, is_gated: bool) -> None:
    if experts.num_experts != rows.num_experts:
        raise ValueError(f"experts: {experts.num_experts}: expected {rows.num_experts}, those of the rows")

    if experts.weight.is_gated != is_gated:
        raise ValueError(f"experts: is_gated={not is_gated}: expected {is_gated}")


def _launch(
    x: Tensor,
    experts: PackedExperts,
    rows: ExpertRows,
    out: Tensor,
    tiles: PairTiles | None,
    *,
    is_gated: bool,
) -> None:
    if tiles is None:
        tiles = choose_pair_tiles(experts, rows)
    weight, shared_bytes = experts.weight, tiles.shared_bytes(experts.weight)
    kernel = kernel_of(experts, rows, tiles, is_gated=is_gated)
    num_tasks = tiles.num_row_tiles(rows) * cdiv(experts.num_columns // PANEL, tiles.num_panels)
    launch_kernel(
        compile_kernel(kernel, x.device.index or 0, shared_bytes),
        (min(num_tasks, tiles.num_ctas * gpu_limits().num_multiprocessors),),
        tiles.num_threads,
        shared_bytes,
        weight.codes,
        weight.scales,
        weight.shifts,
        weight.row_scales,
        Boxes(x, 1, UNIT),
        rows.counts,
        rows.pairs,
        rows.shares,
        out,
        rows.num_rows,
        experts.num_columns,
        weight.inner,
    )


def kernel_of(experts: PackedExperts, rows: ExpertRows, tiles: PairTiles, *, is_gated: bool) -> CudaKernel:
    """The kernel for the format of experts."""
    sizes = tiles.num_panels, tiles.num_rows // 8, tiles.num_stages, experts.num_experts, rows.num_active
    return program(
        experts.weight,
        FILES,
        "packed_product",
        "MULTIPLY_PAIRS",
        ", ".join(map(str, (str(is_gated).lower(), *sizes))),
        THREADS=tiles.num_threads,
        CTAS=tiles.num_ctas,
    )
