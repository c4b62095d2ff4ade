"""The MLP in plain torch: weights and forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drift_sdk.models.allocation import Allocation
from drift_sdk.models.linear import linear
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import Mlp, MlpNames

__all__ = ["MlpWeights", "allocate_mlp", "apply_mlp"]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Gate and up projections are one matrix. Matrices may be quantised.

    gate_up: [2 * intermediate, hidden]. down: [hidden, intermediate]. Biases: [rows of their matrix].
    """

    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None


def allocate_mlp(spec: Mlp, names: MlpNames, layer: str, hidden: int, allocation: Allocation) -> MlpWeights:
    """layer: prefix of the layer's tensors."""
    prefix, size = f"{layer}.{names.module}", spec.intermediate_size
    rows = {names.gate: size, names.up: size} if names.fused is None else {names.fused: 2 * size}
    biases = {f"{prefix}.{name}.bias": size for name, size in rows.items()}
    down = f"{prefix}.{names.down}"
    return MlpWeights(
        gate_up=allocation.projection(
            {f"{prefix}.{name}.weight": size for name, size in rows.items()}, hidden
        ),
        gate_up_bias=allocation.stacked(biases) if spec.has_bias else None,
        down=allocation.matrix(f"{down}.weight", hidden, size),
        down_bias=allocation.tensor(f"{down}.bias", hidden) if spec.has_bias else None,
    )


def apply_mlp(x: torch.Tensor, weights: MlpWeights, spec: Mlp) -> torch.Tensor:
    """The output [N, hidden] for x [N, hidden]."""
    gate, up = linear(x, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    gate = F.silu(gate) if spec.activation == "silu" else F.gelu(gate, approximate="tanh")
    return linear(gate.mul_(up), weights.down, weights.down_bias)
