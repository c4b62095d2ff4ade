"""The weights of experts: their layout in memory, and the stored tensors that fill it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drift_sdk.loading.mxfp4 import BLOCK_BYTES, BLOCK_SIZE
from drift_sdk.models.experts import ExpertMatrices, ExpertWeights, QuantisedMatrices
from drift_sdk.models.experts_config import ExpertsConfig, ExpertStorage

__all__ = ["allocate_experts"]

# The module of a layer's experts, their router, and the projections of each expert: gate, up and down.
MODULES: dict[ExpertStorage, tuple[str, str, tuple[str, str, str]]] = {
    "qwen3_moe": ("mlp", "gate", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", "gate", ("w1", "w3", "w2")),
    "transposed": ("mlp", "router", ("gate_up_proj", "gate_up_proj", "down_proj")),
    "mxfp4": ("mlp", "router", ("gate_up_proj", "gate_up_proj", "down_proj")),
}


def allocate_experts(
    config: ExpertsConfig,
    hidden_size: int,
    layer: str,
    places: dict[str, torch.Tensor],
    empty: Callable[[tuple[int, ...], torch.dtype | None], torch.Tensor],
) -> ExpertWeights:
    """Weights that are not initialised; `places` takes, for each stored tensor, the part that it fills.

    layer: the prefix of the layer's tensors. empty(shape, dtype) allocates a tensor; None: of the model's
    dtype.
    """
    module, router, _ = MODULES[config.storage]
    prefix = f"{layer}.{module}"

    def whole(name: str, *shape: int) -> torch.Tensor:
        places[f"{prefix}.{name}"] = empty(shape, None)
        return places[f"{prefix}.{name}"]

    num_experts, size = config.num_experts, config.intermediate_size
    has_bias = config.has_bias
    gate_up, down = _allocate_matrices(config, hidden_size, prefix, places, empty)
    return ExpertWeights(
        router=whole(f"{router}.weight", num_experts, hidden_size),
        router_bias=whole(f"{router}.bias", num_experts) if has_bias else None,
        gate_up=gate_up,
        gate_up_bias=whole("experts.gate_up_proj_bias", num_experts, 2 * size) if has_bias else None,
        down=down,
        down_bias=whole("experts.down_proj_bias", num_experts, hidden_size) if has_bias else None,
    )


def _allocate_matrices(
    config: ExpertsConfig,
    hidden_size: int,
    prefix: str,
    places: dict[str, torch.Tensor],
    empty: Callable[[tuple[int, ...], torch.dtype | None], torch.Tensor],
) -> tuple[ExpertMatrices, ExpertMatrices]:
    """The gate and up, and the down projections."""
    num_experts, size = config.num_experts, config.intermediate_size
    gate, up, down = MODULES[config.storage][2]
    gate_up_shape, down_shape = (num_experts, 2 * size, hidden_size), (num_experts, hidden_size, size)
    if config.storage == "mxfp4":

        def quantised(name: str, rows: int, columns: int) -> QuantisedMatrices:
            shape = num_experts, rows, columns // BLOCK_SIZE
            blocks = places[f"{prefix}.experts.{name}_blocks"] = empty((*shape, BLOCK_BYTES), torch.uint8)
            scales = places[f"{prefix}.experts.{name}_scales"] = empty(shape, torch.uint8)
            return QuantisedMatrices(blocks, scales)

        return quantised(gate, *gate_up_shape[1:]), quantised(down, *down_shape[1:])

    gate_up_matrices, down_matrices = empty(gate_up_shape, None), empty(down_shape, None)
    if config.storage == "transposed":
        places[f"{prefix}.experts.{gate}"] = gate_up_matrices.transpose(1, 2)
        places[f"{prefix}.experts.{down}"] = down_matrices.transpose(1, 2)
        return gate_up_matrices, down_matrices

    for expert in range(num_experts):
        parts = {gate: gate_up_matrices[expert, :size], up: gate_up_matrices[expert, size:]}
        parts[down] = down_matrices[expert]
        places.update({f"{prefix}.experts.{expert}.{name}.weight": part for name, part in parts.items()})

    return gate_up_matrices, down_matrices
