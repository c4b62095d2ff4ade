"""Shapes and options of a decoder, from a model's config.json.

Names and defaults of settings are those of transformers' LlamaConfig, Qwen2Config and Qwen3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.models.rope import MAX_CONTEXT, RopeScaling, rope_from_hf

__all__ = ["DecoderConfig"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Far beyond any model, but small enough that all tensors can be listed and sizes multiplied.
MAX_SIZE = 2**24
MAX_LAYERS = 1024
MIN_CONTEXT = 2  # one token of a prompt and one generated token
MAX_EPS = 1.0


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """Shapes and options of a Llama, Qwen2 or Qwen3 decoder.

    intermediate_size:        width of the MLP.
    max_position_embeddings:  the model's context, in tokens.
    has_qk_norm:              queries and keys are normalised per head before the rotation (Qwen3).
    is_head_tied:             the output head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_head_tied: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From the contents of a config.json.

        Raises ModelLoadError naming a setting that is missing, out of range or not implemented.
        """
        family = _family(config)
        _check_options(config)
        hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
        num_kv_heads = _int(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config: num_key_value_heads={num_kv_heads}: expected a divisor of {num_heads}"
            )

        # transformers' Qwen3Config has a head_dim of 128 by default, for any hidden size.
        head_dim = _int(config, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
        if head_dim % 2 or num_heads * head_dim > MAX_SIZE:
            raise ModelLoadError(
                f"config: head_dim={head_dim}: expected an even number of at most {MAX_SIZE // num_heads}"
            )

        has_attention_bias = family != "qwen2" and _bool(config, "attention_bias")
        rope_theta, rope_scaling = rope_from_hf(config, head_dim)
        return cls(
            vocab_size=_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            num_layers=_num_layers(config),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_int(config, "max_position_embeddings", ge=MIN_CONTEXT, le=MAX_CONTEXT),
            rms_norm_eps=_eps(config),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            has_qkv_bias=has_attention_bias or family == "qwen2",
            has_output_bias=has_attention_bias,
            has_mlp_bias=family == "llama" and _bool(config, "mlp_bias"),
            has_qk_norm=family == "qwen3",
            is_head_tied=_bool(config, "tie_word_embeddings"),
        )


def _family(config: Mapping[str, Any]) -> str:
    """The key in ARCHITECTURES of the model's architecture; without `architectures`, `model_type` decides."""
    known = ", ".join(ARCHITECTURES.values())
    architectures = config.get("architectures") or [ARCHITECTURES.get(str(config.get("model_type")))]
    for family, architecture in ARCHITECTURES.items():
        if architectures == [architecture] and config.get("model_type", family) == family:
            return family

    found = ", ".join(f"{name}={short_repr(config.get(name))}" for name in ("architectures", "model_type"))
    raise ModelLoadError(f"config: {found}: expected one of {known}")


def _check_options(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"config: hidden_act={short_repr(activation)}: only 'silu' is implemented")

    if _has_sliding_window(config):
        window, kinds = short_repr(config.get("sliding_window")), short_repr(config.get("layer_types"))
        raise ModelLoadError(
            f"config: sliding_window={window} in use, or layer_types other than 'full_attention' among "
            f"{kinds}: only full attention is implemented"
        )

    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        found = f"quantization_config with quant_method={short_repr(method)}"
        raise ModelLoadError(f"config: {found} is not implemented")


def _has_sliding_window(config: Mapping[str, Any]) -> bool:
    """Whether any layer uses attention other than full attention."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        is_list = isinstance(layer_types, list) and layer_types
        return not (is_list and all(kind == "full_attention" for kind in layer_types))

    if "use_sliding_window" not in config:
        return config.get("sliding_window") is not None

    # Qwen files name a window even if the switch or the number of windowed layers leaves it unused.
    first_windowed = config.get("max_window_layers", 0)
    is_unused = isinstance(first_windowed, int) and first_windowed >= _num_layers(config)
    return bool(config["use_sliding_window"] and config.get("sliding_window") and not is_unused)


def _num_layers(config: Mapping[str, Any]) -> int:
    return _int(config, "num_hidden_layers", le=MAX_LAYERS)


def _int(
    config: Mapping[str, Any], name: str, default: int | None = None, *, ge: int = 1, le: int = MAX_SIZE
) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not ge <= value <= le:
        raise ModelLoadError(f"config: {name}={short_repr(value)}: expected an integer from {ge} to {le}")

    return value


def _bool(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"config: {name}={short_repr(value)}: expected true or false")

    return bool(value)


def _eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps")
    value = 1e-6 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_EPS:
        raise ModelLoadError(
            f"config: rms_norm_eps={short_repr(value)}: expected a number from 0 to {MAX_EPS}"
        )

    return float(value)
