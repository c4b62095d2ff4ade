"""References of the kernels of `drift_sdk._kernels.gemm`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.gemm.gemm import GemmConfig
from drift_sdk.spec.model import Activation
from references.layers import activate_reference


def multiply_reference(x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
    """Return what the partial sums of `multiply` add up to: [M, N] float32."""
    size = config.slice_size(x.shape[1])
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for first in range(0, x.shape[1], size):
        part = slice(first, first + size)
        total = total + x[:, part].to(torch.float32) @ weight[:, part].to(torch.float32).T

    return total


def gated_multiply_reference(x: Tensor, weight: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(x G^T) * (x U^T): [M, N] in x's type, every intermediate rounded to it."""
    gate, up = (x.to(torch.float32) @ weight.to(torch.float32).T).to(x.dtype).chunk(2, dim=1)
    return activate_reference(gate, activation) * up
