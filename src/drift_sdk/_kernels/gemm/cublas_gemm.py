"""Products by the fastest of three implementations that give the same bits: gemm.py, few_rows_gemm.py, or the
vendor's library.

From about 200 rows on, cuBLAS is faster. Its kernels sum a slice in ascending order by the same instructions,
as long as it does not cut the inner dimension itself. Whether it does depends on its version, its settings
and the shape. So before the library is used for a shape, both implementations multiply random numbers of
several magnitudes once, and their bits are compared.

The products of the library are launched by torch and written to the same partial sums: all slices by one
launch, as a batch, which occupies the GPU better than one after the other; or slice by slice, where the bits
of the batch differ or the slices are not equal. Such a launch waits for everything before it, and lets
nothing start before it ends: `note_library_kernel` tells the check of launch order.
"""

from __future__ import annotations

import logging
import os
from typing import Literal

import torch
from torch import Tensor

from drift_sdk._kernels.common.launch_order import note_library_kernel
from drift_sdk._kernels.common.parallel_compile import is_recording
from drift_sdk._kernels.gemm.few_rows_gemm import few_rows_multiply, has_few_rows_product
from drift_sdk._kernels.gemm.gemm import GemmConfig, gated_multiply, multiply
from drift_sdk._kernels.layers.activation import Activation
from drift_sdk._kernels.layers.glu import glu

__all__ = [
    "fastest_gated_multiply",
    "fastest_multiply",
    "library_gated_multiply",
    "library_multiply",
    "library_product",
    "library_way",
]

log = logging.getLogger("drift_sdk")

LibraryState = tuple[object, ...]
Case = tuple[int, torch.Size, torch.dtype, torch.device, GemmConfig, LibraryState]
"""Number of rows, the weight's shape, type, device, configuration, and `library_state`."""

Way = Literal["batch", "slices"]
"""A way in which the library multiplies: all slices by one launch, or one after the other."""

_ways: dict[Case, Way | None] = {}
"""Results of the comparisons in this process, each for one state of the library: the first way that has the
kernel's bits; None: neither has."""

MAGNITUDES = 6
"""Exponents of the largest and smallest numbers that are multiplied to compare bits. With weights of usual
sizes, products of gates remain in the range of float16."""

MAX_BATCH_ROWS = 2048
"""Most rows for which all slices are one batch: with more, one slice occupies the GPU by itself."""

WORKSPACE_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
)


def fastest_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> bool:
    """`multiply`, by few_rows_gemm.py where it computes the product, and by the library where `config` names
    it and its bits are the same.

    x [M, K], weight [N, K], out [config.num_partials, M, N] float32. Returns False where `config` names the
    library and its bits differ, so that the kernel ran instead, which is slower.
    """
    if has_few_rows_product(x, weight, config):
        few_rows_multiply(x, weight, out, config)
        return True

    if not _is_for_library(x, config) or is_recording():
        multiply(x, weight, out, config)
        return True

    way = library_way(x, weight, out, config)
    if way is None:
        multiply(x, weight, out, config)
    else:
        library_multiply(x, weight, out, config, way)
    return way is not None


def fastest_gated_multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: GemmConfig,
    gate_up: Tensor | None,
    activation: Activation = "silu",
) -> bool:
    """`gated_multiply`, by the library where `config` names it and its bits are the same.

    x [M, K], weight [2 N, K], out [M, N]. gate_up [M, 2 N], of out's type, takes the library's product; it
    is given where `config` names the library, and without it the kernel runs. Returns False where `config`
    names the library and its bits differ, so that the kernel ran instead, which is slower.
    """
    if gate_up is None or not _is_for_library(x, config) or is_recording():
        gated_multiply(x, weight, out, config, activation)
        if gate_up is not None and is_recording():
            glu(gate_up, out, activation)
        return True

    # The gate follows the product in both; which one it is does not matter to the comparison.
    is_exact = library_way(x, weight, out, config, gate_up) is not None
    if is_exact:
        library_gated_multiply(x, weight, out, gate_up, activation)
    else:
        gated_multiply(x, weight, out, config, activation)
    return is_exact


def library_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, way: Way) -> None:
    """Partial sums out [config.num_slices, M, N] float32 of x [M, K] and weight [N, K]: one product each.

    way: "batch" only for slices of equal size.
    """
    size = config.slice_size(x.shape[1])
    if way == "batch":
        rows = x.unflatten(1, (config.num_slices, size)).transpose(0, 1)
        columns = weight.unflatten(1, (config.num_slices, size)).permute(1, 2, 0)
        torch.bmm(rows, columns, out_dtype=torch.float32, out=out)
        note_library_kernel(out)
        return

    for slice_index in range(config.num_slices):
        inner = slice(slice_index * size, (slice_index + 1) * size)
        torch.mm(x[:, inner], weight[:, inner].T, out_dtype=torch.float32, out=out[slice_index])
        note_library_kernel(out[slice_index])


def library_gated_multiply(
    x: Tensor, weight: Tensor, out: Tensor, gate_up: Tensor, activation: Activation = "silu"
) -> None:
    """gate_up [M, 2 N] = x [M, K] times weight [2 N, K] transposed; out [M, N] = activation(gate) * up."""
    library_product(x, weight.T, None, gate_up)
    glu(gate_up, out, activation)


def library_product(x: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = x [M, K] times columns [K, N], a transposed weight, plus bias [N]; summed as the library
    chooses."""
    if bias is None:
        torch.mm(x, columns, out=out)
    else:
        torch.addmm(bias, x, columns, out=out)
    note_library_kernel(out)


def library_state() -> LibraryState:
    """Return what the library's choice of a kernel depends on beside the product.

    These are torch's settings of the library and the sizes of its workspaces. The host may change all of
    them between two engines.
    """
    cuda = torch.backends.cuda
    # These exist from torch 2.13 on. In earlier versions only the environment sets the sizes.
    sizes = [getattr(cuda, name, None) for name in ("cublas_workspace_size", "cublaslt_workspace_size")]
    return (
        cuda.preferred_blas_library(),
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        *(size() for size in sizes if size is not None and cuda.is_built()),
        *map(os.environ.get, WORKSPACE_VARIABLES),
    )


def _is_for_library(x: Tensor, config: GemmConfig) -> bool:
    """Whether the library may be used at all. In float32 it uses other instructions than the kernel."""
    return config.is_library and x.device.type == "cuda" and x.dtype != torch.float32


def library_way(
    x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, gate_up: Tensor | None = None
) -> Way | None:
    """The first way in which the library has the kernel's bits; None if it has other bits in all of them. The
    first call for a case runs all, and warns once.

    The arguments are those of the product, which is gated if gate_up is given. The contents of `out` (and of
    gate_up) are undefined afterwards.
    """
    case = x.shape[0], weight.shape, x.dtype, x.device, config, library_state()
    if case not in _ways:
        random = _random_rows(x)
        expected = torch.empty_like(out)
        if gate_up is None:
            multiply(random, weight, expected, config)
        else:
            gated_multiply(random, weight, expected, config)
        _ways[case] = None
        for way in _possible_ways(x.shape[0], x.shape[1], config):
            if gate_up is None:
                library_multiply(random, weight, out, config, way)
            else:
                library_gated_multiply(random, weight, out, gate_up)
            if torch.equal(out, expected):
                _ways[case] = way
                break
        else:
            shape = "x".join(map(str, weight.shape))
            log.warning(
                "%d rows by %s: the library's bits differ: using the kernel, which is slower", case[0], shape
            )

    return _ways[case]


def _possible_ways(num_rows: int, inner: int, config: GemmConfig) -> tuple[Way, ...]:
    """The ways for so many rows, the faster one first."""
    is_equal = config.num_slices * config.slice_size(inner) == inner
    is_batch = config.num_slices > 1 and is_equal and num_rows <= MAX_BATCH_ROWS
    return ("batch", "slices") if is_batch else ("slices",)


def _random_rows(x: Tensor) -> Tensor:
    """Random numbers of x's shape [M, K] and type: in even rows of one magnitude, in odd rows of magnitudes
    from 2^-MAGNITUDES to 2^MAGNITUDES side by side, whose sums depend most on their order."""
    generator = torch.Generator(x.device).manual_seed(0)
    rows = torch.randn(x.shape, generator=generator, dtype=torch.float32, device=x.device)
    exponents = torch.randint(
        -MAGNITUDES, MAGNITUDES + 1, rows[1::2].shape, generator=generator, device=x.device
    )
    rows[1::2] *= torch.exp2(exponents.to(torch.float32))
    return rows.to(x.dtype)
