"""Experts in CUDA C++: routing, and products of MXFP4 weights.

Routing in one launch of CUDA C++: the router's product, and what routing.py does with it.

It is for routers of the kind "softmax", and of the kind "sigmoid" without groups, whose logits are not
rounded. For a decode pass of up to LISTED_ROWS rows, three launches become
one; for more rows, `list_rows` follows. The CTAs of a cluster have 16 experts each, and write their logits to
each other's shared memory: they wait for each other, but not for a launch. There are no atomic operations,
and lists have a fixed order.

Order of summation: warps take chunks by turns as in the products below. It is the same for any number of
rows, and another than that of gemm.py.

Bytes: the router once for each 16 rows. Dependent launch: the router's weights, which never change, are
loaded before the kernel waits; it permits its dependents right after.

Products of MXFP4 experts in CUDA C++: those of expert_gemm.py.

Triton's kernels convert MXFP4 slowly, because layouts of their tiles change on the way to the MMA. Here the
16 bytes that a lane loads are its own fragments (expert_products.cu), and conversion costs two instructions
an element. Weights in bfloat16 need no conversion; Triton's kernels read them faster.

Order of summation: a program's eight warps take chunks of 128 inner indices by turns, sum them by tensor
cores in ascending order, and their sums are added in ascending order. It is the same for any number of rows
and any tiles, and another than that of Triton's kernels. Weights are converted exactly; scales above
MAX_SCALE are left to Triton's kernels.

A variant with the same bits has a warp that copies the weights ahead: below.

Grid: as many CTAs as the GPU holds at once. Each goes through tiles of the weight, for up to 32 pairs of an
expert, and loads the next weights while it computes.

Bytes: as expert_gemm.py. An expert with more rows than a tile is read several times, mostly from the L2
cache.

Dependent launch: the product of gate and up projections waits first, as its rows are listed right before.
The down projection loads its first weights before it waits. Both permit dependents after their last weights.

The same products from a ring of stages in shared memory, on compute capability 9.0.

A warp of each CTA copies tiles of the weight, 16 rows each, to shared memory by bulk copies, several items
ahead and across experts (ring_products.cu). So many bytes are under way that memory does not wait for the
warps that multiply. These do the same as those of expert_products.cu in the same order, and have the rows of
x in registers, which they seldom change.

Order of summation and bits: those of the products above.

Grid: as many CTAs as the GPU holds at once. Each has tiles that follow each other, of one expert or a few.

Bytes: those of the experts that rows have. An expert with more than 8 rows has several tiles of pairs, which
read a band of 16 tiles of the weight one after the other: the first one from memory, the others from the L2
cache.

Dependent launch: as above. The down projection copies its first items before it waits.

The same products for many rows of an expert (wide_products.cu).

A CTA has 256 rows of the weight, 32 of each warp, and 64 pairs. A weight is converted once for all of these
instead of once for 16, and the rows of x, which all warps read from shared memory, are loaded once. What the
eight warps above sum, each warp sums one part after the other, and adds the parts.

Order of summation and bits: those of the products above.

Grid: as many CTAs as the GPU holds at once. The items of an expert follow each other.

Bytes: from memory as above; from the L2 cache a quarter of what tiles of 16 pairs read for a multiplication.
Instructions, as compiled for compute capability 9.0: five for each MMA, half as many as with those tiles.
Dependent launch: it waits first, and permits its dependents at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.experts.expert_gemm import (
    ClampedActivation,
    ExpertMatrix,
    check_expert_rows,
    check_matrix,
)
from drift_sdk._kernels.experts.routing import ExpertRows, check_rows, list_rows
from drift_sdk._kernels.launch.arguments import check_range, check_tensor, check_tensors
from drift_sdk._kernels.launch.launch_order import KernelAccess, note_kernel
from drift_sdk.spec.model import Router

if TYPE_CHECKING:
    from drift_sdk._kernels.launch.cuda_programs import CudaKernel

MAX_PAIRS = 16
"""The most pairs of an expert, on average, for which the ring is used. The weight of an expert with more than
8 pairs is converted for each 8 anew, which takes three quarters of the time of reading it from memory. Up to
2 pairs this has been measured; from there on it follows from a count of instructions, by which the tiles
without a ring take longer."""
FEW_ROWS = 4
"""Up to so many rows, three stages are faster than four: a CTA has few items."""

CAPABILITY = (9, 0)
"""The compute capability that the ring is made for."""
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of a multiprocessor, and what each CTA takes of it besides its own."""
MAX_INNER = 3072
"""The most inner indices for which registers hold a row of x: three chunks of each warp."""
RING_ROW_TILE, PAIR_TILE = 16, 8
RING_WARPS, LANES = 8, 32
COPY_ALIGNMENT = 16


def most_row_tiles(rows: ExpertRows, num_pairs: int) -> int:
    """The most tiles of `num_pairs` pairs, each of one expert, whatever the experts of the rows are."""
    every = rows.num_rows * rows.num_active
    num_used = min(rows.num_experts, every)
    return num_used + (every - num_used) // num_pairs


class RingTiles(Struct, frozen=True):
    """Stages and CTAs of a product. No result depends on them.

    num_stages: tiles of the weight in the shared memory of a CTA. num_ctas: CTAs of a multiprocessor.
    """

    num_stages: int = 4
    num_ctas: int = 2

    @property
    def num_threads(self) -> int:
        """Threads of the warps that multiply, and of the one that copies."""
        return (RING_WARPS + 1) * LANES

    def shared_bytes(self, inner: int) -> int:
        """Bytes of a CTA's shared memory: for each stage codes, scales, sums, an item and two barriers."""
        sums, item, barriers = RING_WARPS * LANES * 16, 48, 16
        stage = RING_ROW_TILE * inner // 2 + RING_ROW_TILE * inner // 32 + sums + item + barriers
        return self.num_stages * stage + 16

    def fits(self, inner: int) -> bool:
        """Whether a multiprocessor holds `num_ctas` CTAs."""
        return self.num_ctas * (self.shared_bytes(inner) + RESERVED_BYTES) <= MULTIPROCESSOR_BYTES

    def num_items(self, rows: ExpertRows, num_weight_rows: int) -> int:
        """The most tiles of pairs times tiles of the weight, whatever the experts of the rows are."""
        return most_row_tiles(rows, PAIR_TILE) * (num_weight_rows // RING_ROW_TILE)


def ring_tiles(rows: ExpertRows, matrix: ExpertMatrix) -> RingTiles | None:
    """Return the tiles for a product of rows with a matrix; None if another kernel computes it."""
    if rows.num_rows * rows.num_active > MAX_PAIRS * rows.num_experts:
        return None

    tiles = RingTiles(num_stages=3 if rows.num_rows <= FEW_ROWS else 4)
    return tiles if has_ring(matrix, tiles) else None


def has_ring(matrix: ExpertMatrix, tiles: RingTiles) -> bool:
    """Whether a product with a matrix, for which there is a product without a ring, can be computed from a
    ring: whole tiles, copies of a multiple of 16 bytes from addresses that are one, and rows that fit."""
    tensors = [tensor for tensor in (matrix.values, matrix.scales) if tensor is not None]
    is_whole = matrix.values.shape[1] % RING_ROW_TILE == 0 and matrix.inner <= MAX_INNER
    if not is_whole or any(tensor.data_ptr() % COPY_ALIGNMENT for tensor in tensors):
        return False

    is_hopper = torch.cuda.get_device_capability(matrix.values.device) == CAPABILITY
    return is_hopper and tiles.fits(matrix.inner)


MAX_SCALE = 128
"""The largest scale of MXFP4 weights: 2 ** (scale - 1) is a bfloat16, which a number is multiplied by."""

WAITING_ACCESS = KernelAccess(frozenset(), frozenset({"out"}), False)
"""A kernel that waits first: every product of gate and up, and those of wide_products.cu."""
DOWN_ACCESS = KernelAccess(frozenset({"values", "scales", "counts", "pairs"}), frozenset({"out"}), False)

MAX_EXPERTS = 1024
NUM_THREADS, NUM_WARPS = 256, 8
CHUNK = 128
"""Inner indices of a chunk."""
FEW_ROWS_PER_EXPERT = 5
"""Up to so many rows of an expert on average, few experts have more than the 8 of the smallest tile."""
SOME_ROWS_PER_EXPERT = 16
"""Up to so many rows of an expert on average, chunks that are loaded ahead save time. With 64 rows, the
registers of one chunk instead of four make the products of gpt-oss-120b 6% faster on an H200."""

FILES = ("launch/types.cu", "launch/dependent_launch.cu", "experts/common.cu")
"""What the programs of experts begin with."""
PRODUCT_FILES = ("experts/expert_rows.cu", "experts/mxfp4.cu", "experts/expert_arguments.cu")
"""What the programs of products have after these."""
ROW_TILE = 16
"""Rows of a tile of the weight."""


class CudaTiles(Struct, frozen=True):
    """Tiles of a product. No result depends on them.

    weight_tiles: tiles of 16 rows of the weight that a CTA has. row_tiles: tiles of 8 pairs, up to 4.
    num_ctas: CTAs of a multiprocessor, which bounds their registers. max_depth: the most chunks that a warp
    loads ahead.
    """

    weight_tiles: int = 2
    row_tiles: int = 1
    num_ctas: int = 2
    max_depth: int = 1

    @property
    def num_threads(self) -> int:
        return NUM_THREADS

    def shared_bytes(self, inner: int) -> int:
        """Bytes of dynamic shared memory: none."""
        return 0

    def depth(self, inner: int) -> int:
        """Chunks that a warp loads ahead: a divisor of those that it has."""
        num_chunks = -(-inner // (NUM_WARPS * CHUNK))
        return next(depth for depth in range(self.max_depth, 0, -1) if num_chunks % depth == 0)

    def num_items(self, rows: ExpertRows, num_weight_rows: int) -> int:
        """The most tiles of rows times tiles of the weight, whatever the experts of the rows are."""
        num_row_tiles = most_row_tiles(rows, 8 * self.row_tiles)
        return num_row_tiles * -(-num_weight_rows // (self.weight_tiles * ROW_TILE))


WIDE_ROWS, WIDE_PAIRS = 256, 64
"""Rows of the weight, and pairs, of a CTA of wide_products.cu."""
WIDE_WARP_ROWS = 32
MANY_ROWS_PER_EXPERT = 32
"""From so many rows of an expert on average, wide_products.cu computes the product. By their instructions,
its tiles of 64 pairs take as long as two of 16 pairs."""


class WideTiles(Struct, frozen=True):
    """Tiles of a product for many rows of an expert: 256 rows of the weight for 64 pairs.

    num_ctas: CTAs of a multiprocessor, whose registers hold one.
    """

    num_ctas: int = 1

    @property
    def num_threads(self) -> int:
        return NUM_THREADS

    def shared_bytes(self, inner: int) -> int:
        """Bytes of dynamic shared memory: none."""
        return 0

    def num_items(self, rows: ExpertRows, num_weight_rows: int) -> int:
        """The most tiles of pairs times tiles of the weight, whatever the experts of the rows are."""
        return most_row_tiles(rows, WIDE_PAIRS) * -(-num_weight_rows // WIDE_ROWS)


AnyTiles = CudaTiles | RingTiles | WideTiles


def has_wide_product(matrix: ExpertMatrix) -> bool:
    """Whether wide_products.cu multiplies by a matrix that `has_cuda_product` takes: one with at least the
    rows of a warp, gate and up in pairs."""
    num_rows = matrix.values.shape[1]
    return num_rows >= WIDE_WARP_ROWS and num_rows % 2 == 0


def cuda_tiles(rows: ExpertRows, matrix: ExpertMatrix) -> AnyTiles:
    """Return the tiles for a product of rows with a matrix."""
    ring = ring_tiles(rows, matrix)
    if ring is not None:
        return ring

    rows_per_expert = rows.num_rows * rows.num_active / rows.num_experts
    if rows_per_expert >= MANY_ROWS_PER_EXPERT and has_wide_product(matrix):
        return WideTiles()

    if rows_per_expert <= FEW_ROWS_PER_EXPERT:
        return CudaTiles()

    depth = 4 if rows_per_expert <= SOME_ROWS_PER_EXPERT else 1
    return CudaTiles(weight_tiles=4, row_tiles=2, num_ctas=1, max_depth=depth)


def has_cuda_product(matrix: ExpertMatrix, dtype: torch.dtype, max_scale: int) -> bool:
    """Whether this module computes products with a matrix. max_scale: the largest of the matrix's scales."""
    is_mxfp4 = matrix.scales is not None and max_scale <= MAX_SCALE
    if not is_mxfp4 or matrix.values.device.type != "cuda" or dtype != torch.bfloat16:
        return False

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.launch.cuda_programs import has_compiler

    is_known = matrix.values.shape[0] <= MAX_EXPERTS
    return is_known and torch.cuda.get_device_capability(matrix.values.device) >= (8, 0) and has_compiler()


def cuda_gated_expert_multiply(
    x: Tensor,
    matrix: ExpertMatrix,
    rows: ExpertRows,
    out: Tensor,
    activation: ClampedActivation,
    tiles: AnyTiles | None = None,
) -> None:
    """`gated_expert_multiply` where `has_cuda_product`. tiles: None: those of `cuda_tiles`."""
    num_pairs, num_columns = out.shape
    check_tensor("out", out, (rows.num_rows * rows.num_active, num_columns), torch.bfloat16)
    check_tensor("x", x, (rows.num_rows, matrix.inner), torch.bfloat16)
    check_matrix(matrix, (rows.num_experts, 2 * num_columns, matrix.inner), x.dtype)
    check_expert_rows(rows)
    _launch(x, matrix, rows, out, num_columns, activation, tiles or cuda_tiles(rows, matrix))
    note_kernel("gate and up of experts", WAITING_ACCESS, {"out": out})


def cuda_expert_multiply(
    x: Tensor,
    matrix: ExpertMatrix,
    rows: ExpertRows,
    out: Tensor,
    tiles: AnyTiles | None = None,
) -> None:
    """`expert_multiply` where `has_cuda_product`. tiles: None: those of `cuda_tiles`."""
    num_columns = out.shape[2]
    check_tensor("out", out, (rows.num_active, rows.num_rows, num_columns), torch.float32)
    check_tensor("x", x, (rows.num_rows * rows.num_active, matrix.inner), torch.bfloat16)
    check_matrix(matrix, (rows.num_experts, num_columns, matrix.inner), x.dtype)
    check_expert_rows(rows)
    tiles = tiles or cuda_tiles(rows, matrix)
    _launch(x, matrix, rows, out, num_columns, None, tiles)
    weights = {"values": matrix.values, "scales": matrix.scales}
    lists = {"counts": rows.counts, "pairs": rows.pairs}
    access = WAITING_ACCESS if isinstance(tiles, WideTiles) else DOWN_ACCESS
    note_kernel("down of experts", access, {**weights, **lists, "out": out})


def _launch(
    x: Tensor,
    matrix: ExpertMatrix,
    rows: ExpertRows,
    out: Tensor,
    num_columns: int,
    activation: ClampedActivation | None,
    tiles: AnyTiles,
) -> None:
    """Launch a kernel of products. More arguments than others: it is what two kernels take."""
    from drift_sdk._kernels.launch.cuda_programs import compile_kernel, launch_kernel

    sizes = num_columns, matrix.inner, rows.num_experts, rows.num_active
    kernel = kernel_of(tiles, sizes, is_gated=activation is not None)
    shared_bytes = tiles.shared_bytes(matrix.inner)
    num_ctas = tiles.num_ctas * torch.cuda.get_device_properties(x.device).multi_processor_count
    launch_kernel(
        compile_kernel(kernel, x.device.index or 0, shared_bytes),
        (min(num_ctas, tiles.num_items(rows, matrix.values.shape[1])),),
        tiles.num_threads,
        shared_bytes,
        x,
        matrix.values,
        matrix.scales,
        matrix.bias,
        rows.counts,
        rows.pairs,
        rows.shares,
        out,
        0.0 if activation is None else activation.alpha,
        0.0 if activation is None else activation.limit,
        rows.num_rows,
    )


def kernel_of(tiles: AnyTiles, sizes: tuple[int, int, int, int], *, is_gated: bool) -> CudaKernel:
    """The kernel for tiles. sizes: columns of the output, inner dimension, experts, experts of a row."""
    from drift_sdk._kernels.launch.cuda_programs import CudaKernel

    first = str(is_gated).lower(), *map(str, sizes)
    if isinstance(tiles, RingTiles):
        files: tuple[str, ...] = "launch/hopper.cu", *PRODUCT_FILES, "experts/ring_products.cu"
        product = f"multiply_experts_by_ring<{', '.join(first)}, {tiles.num_stages}>"
    elif isinstance(tiles, WideTiles):
        files = *PRODUCT_FILES, "experts/wide_products.cu"
        product = f"multiply_many<{', '.join(first)}>"
    else:
        files = *PRODUCT_FILES, "experts/expert_products.cu"
        last = f"{tiles.weight_tiles}, {tiles.row_tiles}, {tiles.depth(sizes[1])}"
        product = f"multiply_experts<{', '.join(first)}, {last}>"
    return CudaKernel((*FILES, *files), "product", (("PRODUCT", product), ("CTAS", str(tiles.num_ctas))))


LISTED_ROWS = 16
"""The most rows that one cluster chooses for, and lists."""

CTA_EXPERTS, MAX_CTAS, MAX_ACTIVE = 16, 8, 16
COLUMN_ALIGNMENT = 8


def has_cuda_route(weight: Tensor, num_active: int, router: Router) -> bool:
    """Whether `cuda_route` routes with a router's weight [E, K]."""
    num_experts, inner = weight.shape
    if (
        router.kind == "wide"
        or router.num_groups > 1
        or weight.device.type != "cuda"
        or weight.dtype != torch.bfloat16
        or inner % COLUMN_ALIGNMENT
    ):
        return False

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.launch.cuda_programs import has_compiler

    is_known = num_experts % CTA_EXPERTS == 0 and num_experts <= CTA_EXPERTS * MAX_CTAS
    if not is_known or num_active > MAX_ACTIVE:
        return False

    return torch.cuda.get_device_capability(weight.device) >= (9, 0) and has_compiler()


def cuda_route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_slot: Tensor,
    rows: ExpertRows,
    router: Router,
    correction: Tensor | None = None,
    num_joined: int = 0,
) -> None:
    """Fill `rows`, where `has_cuda_route`: `multiply`, `choose_experts` and `list_rows` in this order.

    x [R, K] and weight [E, K], bfloat16. bias: [E] bfloat16, for a router of the kind "softmax". correction:
    [E] float32, for one of the kind "sigmoid". A joined expert has no gate. Other arguments as of
    `choose_experts`. Raises ValueError for another shape, type or layout.
    """
    check_range("num_joined", num_joined, 0, 1)
    num_rows, num_experts = rows.num_rows, rows.num_experts - num_joined
    num_active, inner = rows.num_active - num_joined, weight.shape[1]
    check_tensor("x", x, (num_rows, inner), torch.bfloat16)
    check_tensor("weight", weight, (num_experts, inner), torch.bfloat16)
    is_sigmoid = router.kind == "sigmoid"
    if (bias if is_sigmoid else correction) is not None:
        raise ValueError(f"router={router.kind!r}: expected no {'bias' if is_sigmoid else 'correction'}")

    check_tensors((num_experts,), torch.bfloat16, bias=bias)
    check_tensors((num_experts,), torch.float32, correction=correction)
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_rows(rows)
    from drift_sdk._kernels.launch.cuda_programs import CudaKernel, compile_kernel, launch_kernel

    row_tiles = 1 if num_rows <= LISTED_ROWS // 2 else 2
    has_lists = num_rows <= LISTED_ROWS
    flags = ", ".join(str(flag).lower() for flag in (is_sigmoid, router.is_normalised, has_lists))
    template = f"{inner}, {num_experts}, {num_active}, {num_joined}, {row_tiles}, {flags}"
    macros = (("ROUTE", f"route_rows<{template}>"),)
    kernel = CudaKernel((*FILES, "experts/route_rows.cu"), "route", macros)
    launch_kernel(
        compile_kernel(kernel, x.device.index or 0, 0),
        (-(-num_rows // (8 * row_tiles)),),
        NUM_THREADS,
        0,
        x,
        weight,
        bias,
        correction,
        row_slot,
        rows.experts,
        rows.shares,
        rows.pairs,
        rows.counts,
        router.scale,
        num_rows,
        cluster=num_experts // CTA_EXPERTS,
    )
    names = ("experts", "shares", "pairs", "counts") if has_lists else ("experts", "shares")
    access = KernelAccess(frozenset({"weight", "bias"}), frozenset(names), False)
    written = {name: getattr(rows, name) for name in names}
    note_kernel("routing", access, {"weight": weight, "bias": bias, **written})
    if not has_lists:
        list_rows(rows)
