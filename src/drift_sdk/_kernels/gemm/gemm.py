"""Matrix products whose bits do not depend on the number of rows: one reduction tree per weight.

The inner dimension is cut into slices at fixed places; each is summed by the tensor cores in ascending order,
and the slices' sums are added in order. The weights stand on the M side of the MMA, so the instruction is the
same for one row and for hundreds. Tiles, stages, warps and whether slices are spread over CTAs are free.

Bytes: the weight once, rows * (K + N * slices) beside it; flops: 2 * rows * N * K. Up to about 150 rows of
bfloat16 an H200 is bound by the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.launching import (
    launch_options,
    prefetch,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

__all__ = ["GemmConfig", "gated_multiply", "gated_multiply_reference", "multiply", "multiply_reference"]

SLICE_ALIGNMENT = 64
"""Slices begin at multiples of this many columns."""


class GemmConfig(Struct, frozen=True):
    """How a product is cut up. `num_slices` is part of the result's bits, the rest is not.

    num_slices: of the inner dimension. is_spread: a CTA for each slice, else one CTA sums them all.
    tile_n, tile_m, tile_k: of the weight's rows, of the rows, and of the inner dimension.
    is_library: the vendor's library is faster still, see cublas_gemm.py; it does not sum slices up.
    """

    num_slices: int = 1
    is_spread: bool = True
    tile_n: int = 64
    tile_m: int = 16
    tile_k: int = 128
    num_stages: int = 3
    num_warps: int = 4
    is_library: bool = False

    def __post_init__(self) -> None:
        if self.is_library and self.num_partials < self.num_slices:
            raise ValueError(f"{self}: expected slices that are spread, for the library")

    def slice_size(self, inner: int) -> int:
        return -(-inner // (self.num_slices * SLICE_ALIGNMENT)) * SLICE_ALIGNMENT

    @property
    def num_partials(self) -> int:
        """How many sums `multiply` leaves to be added in order."""
        return self.num_slices if self.is_spread else 1


@triton.jit
def _tile(NUM_N: tl.constexpr, TILE_M: tl.constexpr, M, GROUP: tl.constexpr):
    """Which tiles of the weight and of the rows a program has: neighbours share the weights of a group."""
    num_m = tl.cdiv(M, TILE_M)
    pid = tl.program_id(0)
    first = pid // (GROUP * num_m) * GROUP
    size = tl.minimum(NUM_N - first, GROUP)
    within = pid % (GROUP * num_m)
    return first + within % size, within // size


@triton.jit
def _prefetch_tile(
    w, columns, first, N: tl.constexpr, K: tl.constexpr, TILE_K: tl.constexpr, PDL: tl.constexpr
):
    """Weights of the first tile of a slice: they do not change, so there is nothing to wait for. More than
    that gains nothing."""
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, max(TILE_K // LINE, 1)) * LINE
    place = columns[:, None] * K + (first + line)[None, :]
    prefetch(w + tl.minimum(place, N * K - 1), PDL)


@triton.jit
def _slice_product(
    x, w, rows, columns, is_row, is_column, first, end,
    K: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sum over inner indices first ... end - 1: [TILE_N, TILE_M] fp32."""
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    inner = tl.arange(0, TILE_K)
    for k in tl.range(first, end, TILE_K, num_stages=STAGES):
        if EVEN:
            weight = tl.load(w + columns[:, None] * K + (k + inner)[None, :], eviction_policy="evict_first")
            row = tl.load(x + rows[:, None] * K + (k + inner)[None, :], mask=is_row[:, None], other=0.0)
        else:
            is_inner = (k + inner) < end
            weight = tl.load(
                w + columns[:, None] * K + (k + inner)[None, :],
                mask=is_column[:, None] & is_inner[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            row = tl.load(
                x + rows[:, None] * K + (k + inner)[None, :],
                mask=is_row[:, None] & is_inner[None, :],
                other=0.0,
            )
        total = tl.dot(weight, row.T, total, input_precision="ieee")

    return total


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x, w, out, M,
    N: tl.constexpr, K: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SPREAD: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = N % TILE_N == 0 and K % SLICE == 0 and SLICE % TILE_K == 0
    tile_n, tile_m = _tile(tl.cdiv(N, TILE_N), TILE_M, M, 8)
    columns = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    _prefetch_tile(w, columns, tl.program_id(1) * SLICE, N, K, TILE_K, PDL)
    wait_for_producers(PDL)
    rows = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = rows < M, columns < N
    if SPREAD:
        first = tl.program_id(1) * SLICE
        total = _slice_product(
            x, w, rows, columns, is_row, is_column, first, tl.minimum(first + SLICE, K),
            K, TILE_N, TILE_M, TILE_K, STAGES, EVEN,
        )  # fmt: skip
        out += tl.program_id(1).to(tl.int64) * M * N
    else:
        total = tl.zeros((TILE_N, TILE_M), tl.float32)
        for index in tl.static_range(SLICES):
            part = _slice_product(
                x, w, rows, columns, is_row, is_column, index * SLICE, min(index * SLICE + SLICE, K),
                K, TILE_N, TILE_M, TILE_K, STAGES, EVEN,
            )  # fmt: skip
            total = part if index == 0 else total + part

    start_dependents(PDL)
    place = out + rows[None, :] * N + columns[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["M"])
def _gated_multiply(
    x, w, out, M,
    N: tl.constexpr, K: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns n and N + n of the weight meet in one program, and silu(first) * second is stored."""
    EVEN: tl.constexpr = N % TILE_N == 0 and K % TILE_K == 0
    tile_n, tile_m = _tile(tl.cdiv(N, TILE_N), TILE_M, M, 8)
    columns = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    _prefetch_tile(w, columns, 0, 2 * N, K, TILE_K, PDL)
    _prefetch_tile(w, N + columns, 0, 2 * N, K, TILE_K, PDL)
    wait_for_producers(PDL)
    rows = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    is_row, is_column = rows < M, columns < N
    inner = tl.arange(0, TILE_K)
    gate = tl.zeros((TILE_N, TILE_M), tl.float32)
    up = tl.zeros((TILE_N, TILE_M), tl.float32)
    place = w + columns[:, None] * K
    for k in tl.range(0, K, TILE_K, num_stages=STAGES):
        where = (k + inner)[None, :]
        if EVEN:
            row = tl.load(x + rows[:, None] * K + where, mask=is_row[:, None], other=0.0)
            gate_weight = tl.load(place + where, eviction_policy="evict_first")
            up_weight = tl.load(place + N * K + where, eviction_policy="evict_first")
        else:
            row = tl.load(x + rows[:, None] * K + where, mask=is_row[:, None] & (where < K), other=0.0)
            is_weight = is_column[:, None] & (where < K)
            gate_weight = tl.load(place + where, mask=is_weight, other=0.0, eviction_policy="evict_first")
            up_weight = tl.load(
                place + N * K + where, mask=is_weight, other=0.0, eviction_policy="evict_first"
            )
        gate = tl.dot(gate_weight, row.T, gate, input_precision="ieee")
        up = tl.dot(up_weight, row.T, up, input_precision="ieee")

    start_dependents(PDL)
    # As in the model: both products, the activation and the result are each rounded to the storage type.
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    place_out = out + rows[None, :] * N + columns[:, None]
    tl.store(place_out, (activated * up).to(dtype), mask=is_row[None, :] & is_column[:, None])


def multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> None:
    """Rows x [M, K] times weight [N, K] transposed, in out [config.num_partials, M, N] float32.

    The result is the sum of out over its first dimension, added in order.
    """
    (num_rows, inner), num_columns = x.shape, weight.shape[0]
    _check("x", x, (num_rows, inner), weight.dtype)
    _check("weight", weight, (num_columns, inner), x.dtype)
    _check("out", out, (config.num_partials, num_rows, num_columns), torch.float32)
    num_tiles = triton.cdiv(num_columns, config.tile_n) * triton.cdiv(num_rows, config.tile_m)
    _multiply[(num_tiles, config.num_partials)](
        x, weight, out, num_rows, num_columns, inner, config.slice_size(inner), config.num_slices,
        config.is_spread, config.tile_n, config.tile_m, config.tile_k, config.num_stages, uses_pdl(),
        num_warps=config.num_warps, **launch_options(),
    )  # fmt: skip


def gated_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> None:
    """silu(x G^T) * (x U^T) in out [M, N], for x [M, K] and weight [2 N, K], G above U, all of one dtype.

    The inner dimension is one slice.
    """
    (num_rows, inner), num_columns = x.shape, weight.shape[0] // 2
    _check("x", x, (num_rows, inner), weight.dtype)
    _check("weight", weight, (2 * num_columns, inner), x.dtype)
    _check("out", out, (num_rows, num_columns), x.dtype)
    num_tiles = triton.cdiv(num_columns, config.tile_n) * triton.cdiv(num_rows, config.tile_m)
    _gated_multiply[(num_tiles,)](
        x, weight, out, num_rows, num_columns, inner,
        config.tile_n, config.tile_m, config.tile_k, config.num_stages, uses_pdl(),
        num_warps=config.num_warps, **launch_options(),
    )  # fmt: skip


def multiply_reference(x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
    """What the partial sums of `multiply` add up to: [M, N] float32."""
    size = config.slice_size(x.shape[1])
    total = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for first in range(0, x.shape[1], size):
        part = slice(first, first + size)
        total = total + x[:, part].to(torch.float32) @ weight[:, part].to(torch.float32).T

    return total


def gated_multiply_reference(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T): [M, N] in x's dtype, every intermediate rounded to it."""
    gate, up = (x.to(torch.float32) @ weight.to(torch.float32).T).to(x.dtype).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: {tensor.dtype} of shape {list(tensor.shape)}, strides {list(tensor.stride())}: "
            f"expected contiguous {dtype} of shape {list(shape)}"
        )
