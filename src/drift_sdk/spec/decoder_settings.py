"""Parts of a decoder's description that most families read alike from a config.json.

Settings are named as in the configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.quantised.scheme import METHODS, config_scheme, quantisation_settings
from drift_sdk.spec.layer_types import (
    LAYER_TYPES,
    read_context,
    read_layer_types,
    read_num_layers,
    read_window,
    with_windows,
)
from drift_sdk.spec.model import (
    Activation,
    Attention,
    Channel,
    LayerSpec,
    Mixer,
    Mlp,
    ModelSpec,
    Norm,
    NormKind,
)
from drift_sdk.spec.names import Names
from drift_sdk.spec.rope_settings import read_rope
from drift_sdk.spec.settings import MAX_SIZE, Settings, read_bool, read_int, read_number

__all__ = [
    "MAX_EPS",
    "attention_layers",
    "check_quantisation",
    "read_activation",
    "read_attention",
    "read_decoder",
    "read_mlp",
    "read_norm",
]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
"""Functions by transformers' names for them, of which several mean the same one."""
MAX_EPS = 1.0


def read_norm(config: Mapping[str, Any], kind: NormKind = "rounded") -> Norm:
    return Norm(read_number(config, "rms_norm_eps", 1e-6, ge=0.0, le=MAX_EPS), kind)


def read_attention(
    settings: Settings,
    *,
    has_bias: bool | None = None,
    has_output_bias: bool | None = None,
    head_norm: Norm | None = None,
    may_be_partial: bool = False,
) -> Attention:
    """Attention to all keys, with the rotation of the config.

    has_bias, has_output_bias: None: `attention_bias` says it. may_be_partial: a part of each head may be
    rotated.
    """
    num_heads, hidden_size = read_int(settings, "num_attention_heads"), read_int(settings, "hidden_size")
    num_kv_heads = read_int(settings, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"config: num_key_value_heads={num_kv_heads}: expected a divisor of {num_heads}")

    head_dim = read_int(settings, "head_dim", hidden_size // num_heads)
    if head_dim % 2 or num_heads * head_dim > MAX_SIZE:
        raise ModelLoadError(
            f"config: head_dim={head_dim}: expected an even number of at most {MAX_SIZE // num_heads}"
        )

    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=float(head_dim**-0.5),
        rope=read_rope(settings, head_dim, may_be_partial=may_be_partial),
        has_bias=read_bool(settings, "attention_bias") if has_bias is None else has_bias,
        has_output_bias=read_bool(settings, "attention_bias") if has_output_bias is None else has_output_bias,
        head_norm=head_norm,
    )


def attention_layers(settings: Settings, attention: Attention) -> list[Attention]:
    """The attention of each layer, with the window of the config in those that `layer_types` names, else in
    all."""
    window = read_window(settings)
    windowed = replace(attention, window=window)
    types = read_layer_types(settings, window)
    return [windowed if kind == LAYER_TYPES[1] else attention for kind in types]


def read_activation(config: Mapping[str, Any], name: str = "hidden_act") -> Activation:
    activation = config.get(name, "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        known = " or ".join(map(repr, ACTIVATIONS))
        raise ModelLoadError(f"config: {name}={short_repr(activation)}: expected {known}")

    return ACTIVATIONS[activation]


def read_mlp(settings: Settings, *, has_bias: bool = False, activation: str = "hidden_act") -> Mlp:
    """activation: the setting that names it."""
    return Mlp(
        intermediate_size=read_int(settings, "intermediate_size"),
        activation=read_activation(settings, activation),
        has_bias=has_bias,
    )


def read_decoder(
    settings: Settings,
    mixers: Sequence[Mixer],
    channels: Channel | Sequence[Channel],
    *,
    norm: Norm | None = None,
    post_norm: Norm | None = None,
    final_norm: Norm | None = None,
    multiplier: float = 1.0,
    embedding_multiplier: float = 1.0,
    has_rounded_multiplier: bool = False,
    embedding_norm: Norm | None = None,
    logits_divisor: float = 1.0,
    logits_cap: float | None = None,
    names: Names | None = None,
) -> ModelSpec:
    """A decoder of these mixers and channels, one of each for each layer, or one channel for all.

    norm: None: as `read_norm` says. final_norm: None: `norm`. Other arguments as in ModelSpec and LayerSpec.
    Raises ModelLoadError for another number of mixers than `num_hidden_layers`.
    """
    num_layers = read_num_layers(settings)
    if len(mixers) != num_layers:
        raise ModelLoadError(f"config: num_hidden_layers={num_layers}: the family describes {len(mixers)}")

    norm = norm or read_norm(settings)
    context = read_context(settings, mixers)
    each = [channels] * len(mixers) if isinstance(channels, Channel) else channels
    layers = [
        LayerSpec(mixer=mixer, channel=channel, norm=norm, post_norm=post_norm, multiplier=multiplier)
        for mixer, channel in zip(with_windows(mixers, context), each, strict=True)
    ]
    return ModelSpec(
        vocab_size=read_int(settings, "vocab_size"),
        hidden_size=read_int(settings, "hidden_size"),
        layers=tuple(layers),
        max_position_embeddings=context,
        final_norm=final_norm or norm,
        is_head_tied=read_bool(settings, "tie_word_embeddings"),
        embedding_multiplier=embedding_multiplier,
        has_rounded_multiplier=has_rounded_multiplier,
        embedding_norm=embedding_norm,
        logits_divisor=logits_divisor,
        logits_cap=logits_cap,
        names=names or Names(),
        quantisation=config_scheme(settings),
    )


def check_quantisation(config: Mapping[str, Any], *, has_mxfp4: bool) -> None:
    """Raise ModelLoadError naming the method if a family does not have quantised weights of it.

    has_mxfp4: its files have MXFP4 experts, beside which only blocks of GGUF are known; else MXFP4 is not
    known.
    """
    settings = quantisation_settings(config)
    method = settings.get("quant_method")
    is_known = method in ("mxfp4", "gguf") if has_mxfp4 else method != "mxfp4"
    if settings and not is_known:
        allowed = "'mxfp4'" if has_mxfp4 else f"one of {', '.join(map(repr, METHODS))}"
        found = f"quantization_config with quant_method={short_repr(method)}"
        raise ModelLoadError(f"config: {found}: expected {allowed} for this architecture")
