"""References of the kernels of `drift_sdk._kernels.experts`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.experts.expert_gemm import ClampedActivation
from drift_sdk.spec.model import Activation, Router
from references.layers import activate_reference

LOWEST = torch.finfo(torch.float32).min


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
    activation: ClampedActivation | Activation = "silu",
) -> Tensor:
    """Return what `gated_expert_multiply` writes: [R * K', N] in x's type; NaN for rows of padding.

    matrix: [E, 2 N, K], not quantised. experts: [R, K'].
    """
    product = expert_products(x.repeat_interleave(experts.shape[1], dim=0), matrix, bias, experts)
    if not isinstance(activation, ClampedActivation):
        gate, up = product.chunk(2, dim=1)
        return activate_reference(gate, activation) * up

    limit = activation.limit
    gate, up = product[:, 0::2].float().clamp(max=limit), product[:, 1::2].float().clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(activation.alpha * gate))).to(x.dtype)


def choose_experts_reference(
    logits: Tensor,
    bias: Tensor | None,
    row_slot: Tensor,
    num_active: int,
    router: Router,
    *,
    dtype: torch.dtype,
    correction_bias: Tensor | None = None,
    factors: Tensor | None = None,
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
    scores = values = total.sigmoid() if router.kind == "sigmoid" else total
    if correction_bias is not None:
        scores = values + correction_bias

    known = scores.nan_to_num(nan=LOWEST, posinf=torch.inf, neginf=LOWEST)
    if router.num_groups > 1:
        known = without_closed_groups(known, router)

    order = known.sort(dim=1, descending=True, stable=True).indices[:, :num_active]
    chosen = values.gather(1, order)
    if router.kind == "sigmoid":
        norm = chosen.sum(dim=1, keepdim=True) + 1e-20 if router.is_normalised else 1.0
        shares = chosen / norm * router.scale
    else:
        shares = chosen.softmax(dim=1) if router.is_normalised else total.softmax(dim=1).gather(1, order)

    if factors is not None:
        shares = shares * factors.to(torch.float32)[order]
    is_padding = (row_slot < 0)[:, None]
    return order.to(torch.int32).masked_fill(is_padding, -1), shares.masked_fill(is_padding, 0.0)


def without_closed_groups(scores: Tensor, router: Router) -> Tensor:
    """Return scores [R, E] with -inf for the experts of all but the groups that take part."""
    groups = scores.view(scores.shape[0], router.num_groups, -1)
    sums = groups.topk(2, dim=2).values.sum(dim=2).clamp(min=LOWEST)
    order = sums.sort(dim=1, descending=True, stable=True).indices
    is_closed = torch.ones_like(sums, dtype=torch.bool)
    is_closed.scatter_(1, order[:, : router.num_active_groups], False)
    return groups.masked_fill(is_closed[:, :, None], -torch.inf).flatten(1)


def list_rows_reference(experts: Tensor, num_experts: int) -> list[list[int]]:
    """Return the pairs of each expert, from the experts [R, K] of the rows."""
    named = experts.flatten().tolist()
    return [[pair for pair, name in enumerate(named) if name == expert] for expert in range(num_experts)]
