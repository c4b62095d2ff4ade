"""Shapes and options of a mixture of experts, from a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.mxfp4 import BLOCK_SIZE
from drift_sdk.models.settings import read_bool, read_int, read_number

__all__ = [
    "EXPERT_FAMILIES",
    "ClampedGate",
    "ExpertStorage",
    "ExpertsConfig",
    "experts_from_hf",
    "mlp_layers",
]

EXPERT_FAMILIES = ("gpt_oss", "mixtral", "qwen3_moe")
MAX_EXPERTS = 1024
MAX_EXPERTS_OF_LAYERS = 2**16
"""Most experts of all layers: files have three tensors for each. Models of 2025 have up to 23,040."""
GATE_NUMBERS = (1e-3, 1e6)

ExpertStorage = Literal["qwen3_moe", "mixtral", "transposed", "mxfp4"]
"""Form of the experts' projections in files: one tensor for each expert and projection, by the names of
Qwen3-MoE or Mixtral; or those of gpt-oss, one tensor for all experts, as numbers [in, out] or as MXFP4."""


class ClampedGate(Struct, frozen=True, kw_only=True):
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and
    -limit <= up <= limit.

    Rows of gate and up projections alternate: row 2 i is the gate, row 2 i + 1 up.
    """

    alpha: float
    limit: float


class ExpertsConfig(Struct, frozen=True, kw_only=True):
    """Shapes and options of the experts of a layer.

    num_active:         experts that compute a row.
    intermediate_size:  width of an expert's MLP.
    is_normalised:      the weights of a row's experts add up to 1; otherwise those of all experts do.
    has_bias:           the router and the experts' projections have biases.
    clamped_gate:       None: silu(gate) * up, with all rows of the gate before those of up.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    is_normalised: bool
    has_bias: bool
    clamped_gate: ClampedGate | None
    storage: ExpertStorage

    @property
    def is_quantised(self) -> bool:
        """Whether the experts' projections remain MXFP4 in memory."""
        return self.storage == "mxfp4"


def experts_from_hf(config: Mapping[str, Any], family: str, num_layers: int) -> ExpertsConfig | None:
    """The experts of each layer of a config.json; None for a family without experts. `family` is the
    model_type.

    Raises ModelLoadError naming a setting that is missing or out of range.
    """
    if family not in EXPERT_FAMILIES:
        return None

    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"config: hidden_act={short_repr(activation)}: expected 'silu' for experts")

    # transformers writes the number under either name.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    num_experts = read_int(config, name, le=min(MAX_EXPERTS, MAX_EXPERTS_OF_LAYERS // num_layers))
    is_gpt_oss = family == "gpt_oss"
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_active=read_int(config, "num_experts_per_tok", le=num_experts),
        intermediate_size=read_int(
            config, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
        ),
        is_normalised=family != "qwen3_moe" or read_bool(config, "norm_topk_prob"),
        has_bias=is_gpt_oss,
        clamped_gate=_clamped_gate(config) if is_gpt_oss else None,
        storage=_storage(config, family),
    )
    if experts.is_quantised:
        for name in ("hidden_size", "intermediate_size"):
            if read_int(config, name) % BLOCK_SIZE:
                raise ModelLoadError(
                    f"config: {name}={config[name]}: expected a multiple of {BLOCK_SIZE} for MXFP4 experts"
                )

    return experts


def mlp_layers(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int, ...]:
    """The layers of a model with experts that have an MLP in their place: for Qwen3-MoE those that
    `mlp_only_layers` names, and those that `decoder_sparse_step` leaves out."""
    if family != "qwen3_moe":
        return ()

    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int and layer >= 0 for layer in named):
        raise ModelLoadError(f"config: mlp_only_layers={short_repr(named)}: expected numbers of layers")

    step = read_int(config, "decoder_sparse_step")
    dense = frozenset(named)
    return tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step)


def _clamped_gate(config: Mapping[str, Any]) -> ClampedGate:
    low, high = GATE_NUMBERS
    return ClampedGate(
        alpha=read_number(config, "swiglu_alpha", ge=low, le=high),
        limit=read_number(config, "swiglu_limit", ge=low, le=high),
    )


def _storage(config: Mapping[str, Any], family: str) -> ExpertStorage:
    if family == "qwen3_moe":
        return "qwen3_moe"

    if family == "mixtral":
        return "mixtral"

    return "mxfp4" if config.get("quantization_config") else "transposed"
