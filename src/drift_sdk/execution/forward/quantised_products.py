"""Products with quantised weights, in buffers that all steps share."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.layers.gates import Activation
from drift_sdk._kernels.quantised.dequantise import dequantise
from drift_sdk._kernels.quantised.quantised_gemm import quantised_gated_multiply, quantised_multiply
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.execution.forward.step_buffers import take_gate_up, take_partials

__all__ = ["expand", "multiply_gated", "multiply_quantised"]


def multiply_quantised(workspace: Workspace, x: Tensor, weight: KernelWeight) -> Tensor:
    """Partial sums [num_slices, R, N] of x [R, K] times weight [N, K] transposed, valid until the next
    product. A row has the same bits whatever R is."""
    packed = weight.packed
    sums = take_partials(workspace, packed.num_slices, x.shape[0], packed.num_columns)
    quantised_multiply(x, packed, sums)
    return sums


def multiply_gated(
    workspace: Workspace,
    x: Tensor,
    weight: KernelWeight,
    out: Tensor,
    activation: Activation,
    bias: Tensor | None,
) -> None:
    """Fill out [R, N] with the gated activation of x [R, K] times weight [2 N, K] transposed, plus bias
    [2 N]. A row has the same bits whatever R is."""
    gate_up = take_gate_up(workspace, x.shape[0], weight.packed.num_columns, x.dtype)
    quantised_gated_multiply(x, weight.packed, out, gate_up, activation, bias)


def expand(workspace: Workspace, weight: KernelWeight, dtype: torch.dtype) -> Tensor:
    """The numbers [N, K] of a weight, each rounded to `dtype`, valid until the next weight is expanded."""
    out = workspace.take("expanded_weight", weight.shape, dtype)
    dequantise(weight.packed, out)
    return out
