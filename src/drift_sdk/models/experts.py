"""Mixture of experts: routing of rows to experts, and the experts' MLPs, in plain torch.

Qwen3-MoE, Mixtral and gpt-oss differ in what `ExpertsConfig` names. A row's output is summed in float32 over
its experts in the order of their logits, largest first, so it does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drift_sdk.loading.mxfp4 import dequantise
from drift_sdk.models.experts_config import ClampedGate, ExpertsConfig
from drift_sdk.models.linear import linear
from drift_sdk.quantised.weight import Matrix, QuantisedWeight

__all__ = [
    "ExpertMatrices",
    "ExpertWeights",
    "QuantisedMatrices",
    "apply_experts",
    "choose_experts",
    "gated",
]


@dataclass(frozen=True, slots=True)
class QuantisedMatrices:
    """A matrix of each expert in MXFP4, see loading/mxfp4.py.

    blocks: [num_experts, out, in / 32, 16] uint8. scales: [num_experts, out, in / 32] uint8.
    """

    blocks: torch.Tensor
    scales: torch.Tensor


ExpertMatrices = torch.Tensor | QuantisedMatrices | tuple[Matrix, ...] | QuantisedWeight
"""A matrix of each expert: [num_experts, out, in], the same in MXFP4, or one by one, quantised otherwise; or
the rows of all experts as one quantised weight, which kernels take."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer and their router.

    router:        [num_experts, hidden].
    gate_up:       [num_experts, 2 * intermediate, hidden].
    down:          [num_experts, hidden, intermediate].
    Biases:        [num_experts], and [num_experts, rows of their matrix].
    """

    router: torch.Tensor
    router_bias: torch.Tensor | None
    gate_up: ExpertMatrices
    gate_up_bias: torch.Tensor | None
    down: ExpertMatrices
    down_bias: torch.Tensor | None


def apply_experts(x: torch.Tensor, weights: ExpertWeights, config: ExpertsConfig) -> torch.Tensor:
    """The output [N, hidden] of the experts that the router chooses for each row of x [N, hidden]."""
    logits = linear(x, weights.router, weights.router_bias)
    experts, shares = choose_experts(logits, config.num_active, is_normalised=config.is_normalised)
    outputs = torch.empty((*experts.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in experts.unique().tolist():
        rows, ranks = (experts == expert).nonzero(as_tuple=True)
        gate_up = _multiply(x[rows], weights.gate_up, weights.gate_up_bias, expert)
        activated = gated(gate_up, config.clamped_gate)
        outputs[rows, ranks] = _multiply(activated, weights.down, weights.down_bias, expert)

    weighted = outputs.to(torch.float32) * shares[:, :, None]
    total = weighted[:, 0]
    for rank in range(1, config.num_active):
        total = total + weighted[:, rank]

    return total.to(x.dtype)


def choose_experts(
    logits: torch.Tensor, num_active: int, *, is_normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row and their weights, [N, num_active] int64 and float32, largest logit first.

    logits: [N, num_experts]. Of equal logits, that of the lower expert comes first.
    is_normalised: as in ExpertsConfig.
    """
    wide = logits.to(torch.float32)
    # A stable sort, because topk may put equal logits in any order.
    ranked, order = wide.sort(dim=-1, descending=True, stable=True)
    experts = order[:, :num_active]
    if is_normalised:
        return experts, ranked[:, :num_active].softmax(dim=-1)

    return experts, wide.softmax(dim=-1).gather(1, experts)


def gated(gate_up: torch.Tensor, clamped_gate: ClampedGate | None) -> torch.Tensor:
    """The activation [N, intermediate] of gate and up projections [N, 2 * intermediate]."""
    if clamped_gate is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    limit = clamped_gate.limit
    wide = gate_up.to(torch.float32)
    gate, up = wide[:, 0::2].clamp(max=limit), wide[:, 1::2].clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(clamped_gate.alpha * gate))).to(gate_up.dtype)


def _multiply(
    x: torch.Tensor, matrices: ExpertMatrices, biases: torch.Tensor | None, expert: int
) -> torch.Tensor:
    """The product [M, out] of x [M, in] with one expert's transposed matrix, plus its bias."""
    if isinstance(matrices, QuantisedMatrices):
        matrix: Matrix = dequantise(matrices.blocks[expert], matrices.scales[expert], x.dtype)
    elif isinstance(matrices, QuantisedWeight):
        raise NotImplementedError("experts that are one weight are multiplied by kernels")
    else:
        matrix = matrices[expert]

    return linear(x, matrix, None if biases is None else biases[expert])
