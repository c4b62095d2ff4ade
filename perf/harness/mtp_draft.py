"""Drafts that are made for one measured model: a layer of its own files that predicts one more token (MTP),
and the assistant of a Gemma 4 model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from drift_sdk.models.allocation import quantised_bytes
from drift_sdk.models.assistant import AssistantConfig, assistant_shapes
from drift_sdk.models.draft_head import mtp_shapes
from drift_sdk.spec.model import Attention, Experts, LayerSpec
from perf.harness.shapes import EXPERTS, Model

__all__ = ["ASSISTANT", "MTP", "Assistant", "MtpDraft", "assistant_settings"]

MTP: Final = "mtp"
ASSISTANT: Final = "assistant"


class MtpDraft(Struct, frozen=True, kw_only=True):
    """The MTP layer of a model.

    weights: `Speculation.draft_weights` for it; None: the layer is kept as files store it.

    Raises ValueError for a model without such a layer.
    """

    model: Model
    weights: Literal["fp8", "int4"] | None = None

    def __post_init__(self) -> None:
        if self.model.spec.mtp is None:
            raise ValueError(f"model={self.model.name!r}: expected one with an MTP layer")

    @property
    def path(self) -> str:
        """`Speculation.draft` for it."""
        return MTP

    def round_bytes(self, num_drafts: float, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a round must read in addition to the target's: the layer, the target's head and the
        layer's KV for each drafted token. Of experts those that a row of each sequence has are read."""
        spec = self.model.spec
        shapes = mtp_shapes(spec)
        weights = sum(
            self._tensor_bytes(name, shape, itemsize) for name, shape in shapes.items() if EXPERTS not in name
        )
        channel = self._layer.channel
        if isinstance(channel, Experts):
            size, hidden = channel.intermediate_size, spec.hidden_size
            matrices = (size, hidden), (size, hidden), (hidden, size)
            expert = sum(self._matrix_bytes(*shape, itemsize) for shape in matrices)
            weights += self.model.spread_experts(batch) * expert
        head = itemsize * spec.vocab_size * spec.hidden_size
        assert self._layer.kv is not None
        kv = itemsize * batch * mean_context * self._layer.kv.size
        return num_drafts * (weights + head + kv)

    @property
    def _layer(self) -> LayerSpec:
        layer = self.model.spec.mtp
        assert layer is not None
        return layer

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], itemsize: int) -> float:
        """Bytes of a tensor, of which matrices are quantised if the weights of draft or model say so, but for
        those of the heads of latent attention."""
        latent = self.model.spec.names.latent
        if len(shape) != 2 or name.endswith(f"{latent.module}.{latent.up}.weight"):
            return itemsize * math.prod(shape)

        return self._matrix_bytes(shape[0], shape[1], itemsize)

    def _matrix_bytes(self, rows: int, columns: int, itemsize: int) -> float:
        if self.weights is not None:
            return quantised_bytes(rows, columns, self.weights)

        # A model whose weights are quantised when they are loaded does not have its layer so.
        is_stored = self.model.weights == "stored"
        return self.model.matrix_bytes(rows, columns, itemsize) if is_stored else itemsize * rows * columns


class Assistant(Struct, frozen=True, kw_only=True):
    """The assistant of a Gemma 4 model, with random weights.

    weights: `Speculation.draft_weights` for it. target: the model's layers, whose keys and values it reads.
    """

    path: Path
    config: AssistantConfig
    target: tuple[LayerSpec, ...]
    weights: Literal["fp8", "int4"] | None = None

    @classmethod
    def prepare(cls, model: Model, weights: Literal["fp8", "int4"] | None = None) -> Assistant:
        """A new one, in a folder beside the model's. Raises ValueError for a model with real weights, and
        ModelLoadError for one that has no assistants."""
        if model.load != "random":
            raise ValueError(
                f"model={model.name!r}: expected one with random weights, or a path as the draft"
            )

        settings = assistant_settings(json.loads((model.path / "config.json").read_text()))
        path = model.path.with_name(f"{model.path.name}-{ASSISTANT}")
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(settings, indent=1))
        config = AssistantConfig.from_hf(settings, model.spec)
        return cls(path=path, config=config, target=model.spec.layers, weights=weights)

    def round_bytes(self, num_drafts: float, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a round must read in addition to the target's: all weights and the keys and values that
        each layer sees, for each drafted token."""
        weights = kv = 0.0
        for name, shape in assistant_shapes(self.config).items():
            is_projection = name.startswith("model.layers.") and len(shape) == 2
            if self.weights is not None and is_projection:
                weights += quantised_bytes(shape[0], shape[1], self.weights)
            else:
                weights += itemsize * math.prod(shape)
        for layer in self.config.shape.layers:
            assert isinstance(layer.mixer, Attention) and layer.mixer.kv_of is not None
            source = self.target[layer.mixer.kv_of].kv
            assert source is not None
            window = layer.mixer.window
            kv += (mean_context if window is None else min(mean_context, window)) * source.size
        return num_drafts * (weights + itemsize * batch * kv)


LARGE = {"hidden_size": 1024, "intermediate_size": 8192}
SMALL = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 2048, "centroid_intermediate_top_k": 32}
OWN = ("architectures", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp")
EXPERT_SETTINGS = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")


def assistant_settings(target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of an assistant of published size, given the target's. Targets with inputs of layers,
    which are small, have small assistants with clusters of tokens."""
    is_small = bool(target.get("hidden_size_per_layer_input"))
    left_out = (*OWN, *EXPERT_SETTINGS, "layer_types", "num_kv_shared_layers")
    layers = {name: value for name, value in target.items() if name not in left_out}
    layers |= (SMALL if is_small else LARGE) | {"num_hidden_layers": 4, "hidden_size_per_layer_input": 0}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "tie_word_embeddings": True,
        "text_config": layers,
        **(CLUSTERS if is_small else {}),
    }
