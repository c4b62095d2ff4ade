"""The product with a model's output projection."""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.gemm.fastest_gemm import fastest_multiply
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.soft_cap import soft_cap
from drift_sdk._kernels.quantised.quantised_gemm import quantised_multiply
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.quantised.weight import Matrix, dense

__all__ = ["multiply_head"]


def multiply_head(
    normed: Tensor, head: Matrix, logits: Tensor, tuned: TunedTable, cap: float | None = None
) -> None:
    """Fill logits [R, V] fp32 with normed [R, H] times head [V, H] transposed.

    normed: the normalised residual stream after the last layer. cap: as `ModelSpec.logits_cap`.
    """
    _multiply(normed, head, logits, tuned)
    if cap is not None:
        soft_cap(logits, cap)


def _multiply(normed: Tensor, head: Matrix, logits: Tensor, tuned: TunedTable) -> None:
    if isinstance(head, KernelWeight):
        quantised_multiply(normed, head.packed, logits[None])
        return

    weight = dense(head)
    gemm = tuned.gemm(weight.shape[0], weight.shape[1], is_whole=True)
    if not fastest_multiply(normed, weight, logits[None], gemm.config(normed.shape[0])):
        tuned.refuse(weight.shape[0], weight.shape[1])
