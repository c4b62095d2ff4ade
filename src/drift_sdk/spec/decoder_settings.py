"""Parts of a decoder's description that most families read alike from a config.json.

Kinds of attention of the layers, mixtures of experts, norms, MLPs. Settings are named as in the configuration
classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.quantised.scheme import METHODS, config_scheme, quantisation_settings
from drift_sdk.spec.model import (
    Activation,
    AnyAttention,
    Attention,
    Channel,
    ClampedGate,
    Experts,
    LayerSpec,
    Mixer,
    Mlp,
    ModelSpec,
    Names,
    Norm,
    NormKind,
    Router,
)
from drift_sdk.spec.rope import Rope, YarnScaling
from drift_sdk.spec.rope_settings import read_rope
from drift_sdk.spec.settings import (
    MAX_CONTEXT,
    MAX_SIZE,
    MIN_CONTEXT,
    Settings,
    read_bool,
    read_int,
    read_number,
)

MAX_LAYERS = 1024
LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")


def read_num_layers(config: Mapping[str, Any]) -> int:
    return read_int(config, "num_hidden_layers", le=MAX_LAYERS)


def read_window(config: Mapping[str, Any], *, is_switched: bool = False) -> int | None:
    """The window of windowed layers; None if it is not in use.

    is_switched: it takes effect only with `use_sliding_window`; else also if the config does not have that.
    """
    if config.get("sliding_window") is None:
        return None

    if not read_bool(config, "use_sliding_window") and (is_switched or "use_sliding_window" in config):
        return None

    return read_int(config, "sliding_window", le=MAX_CONTEXT)


def read_layer_types(
    config: Mapping[str, Any], window: int | None, is_windowed: Callable[[int], bool] | None = None
) -> list[LayerType]:
    """The kind of attention of each layer: `layer_types`, else is_windowed(index) says whether a layer has
    the window that is in use; None: all have it.

    Raises ModelLoadError for windowed layers without a window.
    """
    num_layers = read_num_layers(config)
    types: Any = config.get("layer_types")
    if types is None:
        has_window = (lambda _: True) if is_windowed is None else is_windowed
        types = [LAYER_TYPES[window is not None and has_window(index)] for index in range(num_layers)]

    is_known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
    if not is_known or len(types) != num_layers:
        expected = f"{num_layers} of {' and '.join(map(repr, LAYER_TYPES))}"
        raise ModelLoadError(f"config: layer_types={short_repr(types)}: expected {expected}")

    if window is None and "sliding_attention" in types:
        found = f"sliding_window={short_repr(config.get('sliding_window'))}"
        raise ModelLoadError(f"config: {found} is not in use: expected one for 'sliding_attention' layers")

    return list(types)


def read_context(config: Mapping[str, Any], mixers: Sequence[Mixer]) -> int:
    """The model's context, in tokens. With YaRN it is what the scaling reaches, also if
    `max_position_embeddings` is less: model cards that add YaRN leave it as it is."""
    context = read_int(config, "max_position_embeddings", ge=MIN_CONTEXT, le=MAX_CONTEXT)
    return max([context, *(_reach(mixer.rope) for mixer in mixers if isinstance(mixer, AnyAttention))])


def _reach(rope: Rope | None) -> int:
    """Tokens that a scaling of the rotation reaches, where it says so."""
    return rope.scaling.context if rope is not None and isinstance(rope.scaling, YarnScaling) else 0


def with_windows(mixers: Sequence[Mixer], context: int) -> list[Mixer]:
    """The mixers without windows that the model's context never fills: these have no effect."""
    return [
        replace(mixer, window=None)
        if isinstance(mixer, Attention) and mixer.window is not None and mixer.window >= context
        else mixer
        for mixer in mixers
    ]


MAX_EXPERTS = 1024
MAX_EXPERTS_OF_LAYERS = 2**16
"""Most experts of all layers: files have three tensors for each. Models of 2025 have up to 23,040."""


def read_experts(
    config: Mapping[str, Any],
    numbers: tuple[str, ...],
    size: str,
    router: Router,
    *,
    active: str = "num_experts_per_tok",
    has_bias: bool = False,
    clamped_gate: ClampedGate | None = None,
    shared: Mlp | None = None,
    has_shared_gate: bool = False,
) -> Experts:
    """The experts of a layer.

    numbers: settings of which the first that is given has the number of experts. size, active: the settings
    that have the width of each, and the number of those that compute a token.

    Raises ModelLoadError naming a setting that is missing or out of range.
    """
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"config: hidden_act={short_repr(activation)}: expected 'silu' for experts")

    most = min(MAX_EXPERTS, MAX_EXPERTS_OF_LAYERS // read_num_layers(config))
    number = next((name for name in numbers if config.get(name) is not None), numbers[-1])
    num_experts = read_int(config, number, le=most)
    return Experts(
        num_experts=num_experts,
        num_active=read_int(config, active, le=num_experts),
        intermediate_size=read_int(config, size),
        router=router,
        has_bias=has_bias,
        clamped_gate=clamped_gate,
        shared=shared,
        has_shared_gate=has_shared_gate,
    )


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
