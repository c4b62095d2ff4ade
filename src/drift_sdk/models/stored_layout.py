"""The form in which files store experts, which their tensors tell."""

from __future__ import annotations

from msgspec.structs import replace

from drift_sdk.loading.tensors import TensorSource
from drift_sdk.spec.model import ExpertLayout, ExpertNames, Experts, ModelSpec

__all__ = ["stored_layout", "with_stored_layout"]


def with_stored_layout(spec: ModelSpec, tensors: TensorSource) -> ModelSpec:
    """The spec, with the layout of experts that files have."""
    found = [index for index, layer in enumerate(spec.layers) if isinstance(layer.channel, Experts)]
    if not found or spec.names.experts.layout == "mxfp4":
        return spec

    names, experts = spec.names.experts, spec.layers[found[0]].channel
    assert isinstance(experts, Experts)
    names = stored_layout(names, experts, spec.names.layer.format(found[0]), spec.hidden_size, tensors)
    return replace(spec, names=replace(spec.names, experts=names))


def stored_layout(
    names: ExpertNames, experts: Experts, layer: str, hidden: int, tensors: TensorSource
) -> ExpertNames:
    """The names, with the layout of experts that a layer has in files. Tools write one tensor for each matrix
    of an expert, or one for all experts, whichever a family's published files have.

    layer: prefix of the layer's tensors.
    """
    prefix = f"{layer}.{names.module}.{names.experts}"
    stacked, layout = f"{prefix}.{names.gate_up}", names.layout
    if stacked in tensors.names():
        # Where inner and outer dimension are equal, the family decides.
        shapes: dict[tuple[int, ...], ExpertLayout] = {
            (experts.num_experts, 2 * experts.intermediate_size, hidden): "stacked",
            (experts.num_experts, hidden, 2 * experts.intermediate_size): "transposed",
        }
        shape = tensors.shape(stacked)
        layout = shapes.get(shape, layout) if len(shapes) == 2 or layout == "each" else layout
    elif f"{prefix}.0.{names.gate}.weight" in tensors.names():
        layout = "each"
    return replace(names, layout=layout)
