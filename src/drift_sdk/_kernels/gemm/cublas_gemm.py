"""Products by whichever is the faster of two that give the same bits: the one tree, or the vendor's library.

From about 200 rows on cuBLAS is faster. Its kernels sum a slice in ascending order by the same instructions,
as long as it does not cut the inner dimension itself. Whether that is so depends on its version, its settings
and the shape, so it is looked at once for every shape, on random numbers, before the library is used for it.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from drift_sdk._kernels.common.launch_order import note_library_kernel
from drift_sdk._kernels.gemm.gemm import GemmConfig, gated_multiply, multiply
from drift_sdk._kernels.layers.swiglu import swiglu

__all__ = ["fastest_gated_multiply", "fastest_multiply", "library_gated_multiply", "library_multiply"]

log = logging.getLogger("drift_sdk")

LibraryState = tuple[object, ...]
Case = tuple[int, torch.Size, torch.dtype, torch.device, GemmConfig, LibraryState]

# Verdicts of this process, each on one state of the library.
_has_same_bits: dict[Case, bool] = {}

WORKSPACE_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
)


def fastest_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> bool:
    """`multiply`, by the library where `config` says so and the bits are the same. False if they are not."""
    if not _is_for_library(x, config):
        multiply(x, weight, out, config)
        return True

    is_exact = _is_exact(x, weight, out, config)
    if is_exact:
        library_multiply(x, weight, out, config)
    else:
        multiply(x, weight, out, config)
    return is_exact


def fastest_gated_multiply(
    x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, gate_up: Tensor | None
) -> bool:
    """`gated_multiply`, likewise. gate_up [M, 2 N] like out: given where `config` names the library."""
    if gate_up is None or not _is_for_library(x, config):
        gated_multiply(x, weight, out, config)
        return True

    is_exact = _is_exact(x, weight, out, config, gate_up)
    if is_exact:
        library_gated_multiply(x, weight, out, gate_up)
    else:
        gated_multiply(x, weight, out, config)
    return is_exact


def library_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> None:
    """Partial sums out [config.num_slices, M, N] fp32, one product each."""
    size = config.slice_size(x.shape[1])
    for index in range(config.num_slices):
        part = slice(index * size, (index + 1) * size)
        torch.mm(x[:, part], weight[:, part].T, out_dtype=torch.float32, out=out[index])
        note_library_kernel(out[index])


def library_state() -> LibraryState:
    """What the library's choice of a kernel depends on beside the product: torch's settings of it and the
    size of its workspace, all of which the host may change between two engines."""
    cuda = torch.backends.cuda
    # Of torch 2.13; before, the environment alone sets them.
    sizes = [getattr(cuda, name, None) for name in ("cublas_workspace_size", "cublaslt_workspace_size")]
    return (
        cuda.preferred_blas_library(),
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        *(size() for size in sizes if size is not None and cuda.is_built()),
        *map(os.environ.get, WORKSPACE_VARIABLES),
    )


def library_gated_multiply(x: Tensor, weight: Tensor, out: Tensor, gate_up: Tensor) -> None:
    torch.mm(x, weight.T, out=gate_up)
    note_library_kernel(gate_up)
    swiglu(gate_up, out)


def _is_for_library(x: Tensor, config: GemmConfig) -> bool:
    """In fp32 the library takes instructions of its own."""
    return config.is_library and x.device.type == "cuda" and x.dtype != torch.float32


def _is_exact(
    x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig, gate_up: Tensor | None = None
) -> bool:
    """Whether both give the same bits. Runs them the first time, and leaves `out` with neither's result."""
    case = x.shape[0], weight.shape, x.dtype, x.device, config, library_state()
    if case not in _has_same_bits:
        generator = torch.Generator(x.device).manual_seed(0)
        rows = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        expected = torch.empty_like(out)
        if gate_up is None:
            multiply(rows, weight, expected, config)
            library_multiply(rows, weight, out, config)
        else:
            gated_multiply(rows, weight, expected, config)
            library_gated_multiply(rows, weight, out, gate_up)
        _has_same_bits[case] = torch.equal(out, expected)
        if not _has_same_bits[case]:
            shape = "x".join(map(str, weight.shape))
            log.warning(
                "%d rows by %s: the library's bits are not the kernel's, which is slower", case[0], shape
            )

    return _has_same_bits[case]
