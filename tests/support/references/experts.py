"""References of the kernels of `drift_sdk._kernels.experts`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.experts.gated_expert_gemm import ClampedActivation


def expert_multiply_reference(
    x: Tensor, matrix: Tensor, bias: Tensor | None, experts: Tensor, shares: Tensor
) -> Tensor:
    """Return what `expert_multiply` writes: [K', R, N] float32; NaN for rows of padding.

    matrix: [E, N, K], not quantised. experts, shares: [R, K'].
    """
    product = expert_products(x, matrix, bias, experts).to(torch.float32) * shares.view(-1, 1)
    return product.view(*experts.shape, -1).transpose(0, 1)


def expert_products(x: Tensor, matrix: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Return the product of each pair's row of x [R * K', K] with its expert's matrix, plus its bias."""
    shape = (x.shape[0], matrix.shape[1])
    product = torch.full(shape, torch.nan, dtype=torch.float32, device=x.device)
    for pair, expert in enumerate(experts.flatten().tolist()):
        if expert >= 0:
            product[pair] = matrix[expert].to(torch.float32) @ x[pair].to(torch.float32)
            if bias is not None:
                product[pair] += bias[expert].to(torch.float32)

    return product.to(x.dtype)


def gated_expert_multiply_reference(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    activation: ClampedActivation | None,
) -> Tensor:
    """Return what `gated_expert_multiply` writes: [R * K', N] in x's type; NaN for rows of padding.

    matrix: [E, 2 N, K], not quantised. experts: [R, K'].
    """
    product = expert_products(x.repeat_interleave(experts.shape[1], dim=0), matrix, bias, experts)
    if activation is None:
        gate, up = product.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    limit = activation.limit
    gate, up = product[:, 0::2].float().clamp(max=limit), product[:, 1::2].float().clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(activation.alpha * gate))).to(x.dtype)


def choose_experts_reference(
    logits: Tensor,
    bias: Tensor | None,
    row_slot: Tensor,
    num_active: int,
    *,
    is_normalised: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return (experts [R, K] int32, shares [R, K] fp32) as `choose_experts` writes them.

    Shares of padding rows are zero.
    """
    total = logits[0]
    for part in logits[1:]:
        total = total + part

    if bias is not None:
        total = total + bias.to(torch.float32)

    total = total.to(dtype).to(torch.float32)
    known = total.nan_to_num(nan=torch.finfo(torch.float32).min)
    order = known.sort(dim=1, descending=True, stable=True).indices[:, :num_active]
    shares = total.gather(1, order).softmax(dim=1) if is_normalised else total.softmax(dim=1).gather(1, order)
    is_padding = (row_slot < 0)[:, None]
    return order.to(torch.int32).masked_fill(is_padding, -1), shares.masked_fill(is_padding, 0.0)


def list_rows_reference(experts: Tensor, num_experts: int) -> list[list[int]]:
    """Return the pairs of each expert, from the experts [R, K] of the rows."""
    named = experts.flatten().tolist()
    return [[pair for pair, name in enumerate(named) if name == expert] for expert in range(num_experts)]
