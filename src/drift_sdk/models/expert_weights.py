"""The weights of experts: their layout in memory, and the stored tensors that fill it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drift_sdk.loading.mxfp4 import BLOCK_BYTES, BLOCK_SIZE
from drift_sdk.models.experts import ExpertMatrices, ExpertWeights, QuantisedMatrices
from drift_sdk.models.experts_config import ExpertsConfig, ExpertStorage
from drift_sdk.quantised.stacking import stack_rows
from drift_sdk.quantised.weight import Matrix, QuantisedWeight

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
    read: Callable[[str], QuantisedWeight | None],
) -> ExpertWeights:
    """Weights that are not initialised; `places` takes, for each stored tensor, the part that it fills.

    layer: the prefix of the layer's tensors. empty(shape, dtype) allocates a tensor; None: of the model's
    dtype. read(name): a projection of an expert, if it is to remain quantised.
    """
    module, router, _ = MODULES[config.storage]
    prefix = f"{layer}.{module}"

    def whole(name: str, *shape: int) -> torch.Tensor:
        places[f"{prefix}.{name}"] = empty(shape, None)
        return places[f"{prefix}.{name}"]

    num_experts, size = config.num_experts, config.intermediate_size
    has_bias = config.has_bias
    gate_up, down = _allocate_matrices(config, hidden_size, prefix, places, empty, read)
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
    read: Callable[[str], QuantisedWeight | None],
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

    names = [
        [f"{prefix}.experts.{expert}.{name}.weight" for name in (gate, up, down)]
        for expert in range(num_experts)
    ]
    found = {} if config.storage == "transposed" else {name: read(name) for each in names for name in each}
    if any(weight is not None for weight in found.values()):

        def part(name: str, *shape: int) -> Matrix:
            weight = found[name]
            if weight is not None:
                return weight

            places[name] = empty(shape, None)
            return places[name]

        shapes = (size, hidden_size), (size, hidden_size), (hidden_size, size)
        matrices = [[part(name, *shape) for name, shape in zip(each, shapes, strict=True)] for each in names]
        return tuple(stack_rows(each[:2]) for each in matrices), tuple(each[2] for each in matrices)

    gate_up_matrices, down_matrices = empty(gate_up_shape, None), empty(down_shape, None)
    if config.storage == "transposed":
        places[f"{prefix}.experts.{gate}"] = gate_up_matrices.transpose(1, 2)
        places[f"{prefix}.experts.{down}"] = down_matrices.transpose(1, 2)
        return gate_up_matrices, down_matrices

    for expert, each in enumerate(names):
        parts = gate_up_matrices[expert, :size], gate_up_matrices[expert, size:], down_matrices[expert]
        places.update(zip(each, parts, strict=True))

    return gate_up_matrices, down_matrices
