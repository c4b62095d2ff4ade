"""Routing in one launch of CUDA C++: the router's product, and what routing.py does with it.

It is for routers of the kind "softmax". For a decode pass of up to LISTED_ROWS rows, three launches become
one; for more rows, `list_rows` follows. The CTAs of a cluster have 16 experts each, and write their logits to
each other's shared memory: they wait for each other, but not for a launch. There are no atomic operations,
and lists have a fixed order.

Order of summation: warps take chunks by turns as in cuda_products.py. It is the same for any number of
rows, and another than that of gemm.py.

Bytes: the router once for each 16 rows. Dependent launch: the router's weights, which never change, are
loaded before the kernel waits; it permits its dependents right after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.kernel_access import KernelAccess
from drift_sdk._kernels.common.launch_order import note_kernel
from drift_sdk._kernels.experts.cuda_products import FILES, NUM_THREADS
from drift_sdk._kernels.experts.routing import ExpertRows, check_rows, list_rows
from drift_sdk.spec.model import Router

__all__ = ["LISTED_ROWS", "cuda_route", "has_cuda_route"]

LISTED_ROWS = 16
"""The most rows that one cluster chooses for, and lists."""

CTA_EXPERTS, MAX_CTAS, MAX_ACTIVE = 16, 8, 16
COLUMN_ALIGNMENT = 8


def has_cuda_route(weight: Tensor, num_active: int, router: Router) -> bool:
    """Whether `cuda_route` routes with a router's weight [E, K]: never for sigmoids."""
    num_experts, inner = weight.shape
    if (
        router.kind != "softmax"
        or weight.device.type != "cuda"
        or weight.dtype != torch.bfloat16
        or inner % COLUMN_ALIGNMENT
    ):
        return False

    # Imported here: cuda.core is installed where there is a GPU.
    from drift_sdk._kernels.common.cuda_programs import has_compiler

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
    *,
    is_normalised: bool,
) -> None:
    """Fill `rows`, where `has_cuda_route`: `multiply`, `choose_experts` and `list_rows` in this order.

    x [R, K] and weight [E, K], bfloat16. The other arguments are those of `choose_experts`. Raises ValueError
    for another shape, type or layout.
    """
    num_rows, num_experts, num_active = rows.num_rows, rows.num_experts, rows.num_active
    inner = weight.shape[1]
    check_tensor("x", x, (num_rows, inner), torch.bfloat16)
    check_tensor("weight", weight, (num_experts, inner), torch.bfloat16)
    check_tensors((num_experts,), torch.bfloat16, bias=bias)
    check_tensor("row_slot", row_slot, (num_rows,), torch.int32)
    check_rows(rows)
    from drift_sdk._kernels.common.cuda_programs import CudaKernel, compile_kernel, launch_kernel

    row_tiles = 1 if num_rows <= LISTED_ROWS // 2 else 2
    has_lists = num_rows <= LISTED_ROWS
    flags = ", ".join(str(flag).lower() for flag in (is_normalised, has_lists))
    template = f"{inner}, {num_experts}, {num_active}, {row_tiles}, {flags}"
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
        row_slot,
        rows.experts,
        rows.shares,
        rows.pairs,
        rows.counts,
        num_rows,
        cluster=num_experts // CTA_EXPERTS,
    )
    names = ("experts", "shares", "pairs", "counts") if has_lists else ("experts", "shares")
    access = KernelAccess(frozenset({"weight", "bias"}), frozenset(names), False)
    written = {name: getattr(rows, name) for name in names}
    note_kernel("routing", access, {"weight": weight, "bias": bias, **written})
    if not has_lists:
        list_rows(rows)
