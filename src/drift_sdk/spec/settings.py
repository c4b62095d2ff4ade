"""Settings of a config.json, checked, and the parts of a description that most families read alike from them.

These parts are rotations, kinds of attention of the layers, mixtures of experts, norms and MLPs.

Settings are named as in the configuration classes of transformers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    QueryScaling,
    Router,
)
from drift_sdk.spec.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

# Far beyond any model, but small enough that all tensors can be listed and sizes multiplied.
MAX_SIZE = 2**24
MAX_CONTEXT = 2**31 - 1
MIN_CONTEXT = 2  # one token of a prompt and one generated token
MULTIPLIERS = (1e-6, 1e6)


class Settings(Mapping[str, Any]):
    """The settings of a config.json.

    max_model_len: length of the longest sequence that will be computed, in tokens; None: the model's context.
    """

    def __init__(self, values: Mapping[str, Any], max_model_len: int | None = None) -> None:
        self._values = values
        self.max_model_len = max_model_len

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, changes: Mapping[str, Any]) -> Settings:
        """The settings with `changes`."""
        return Settings({**self._values, **changes}, self.max_model_len)


def read_int(
    config: Mapping[str, Any], name: str, default: int | None = None, *, ge: int = 1, le: int = MAX_SIZE
) -> int:
    """The integer `name`, `default` if it is missing or null. Raises ModelLoadError outside `ge` to `le`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not ge <= value <= le:
        raise ModelLoadError(f"config: {name}={short_repr(value)}: expected an integer from {ge} to {le}")

    return value


def read_bool(config: Mapping[str, Any], name: str) -> bool:
    """The boolean `name`, False if it is missing or null. Raises ModelLoadError for other values."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"config: {name}={short_repr(value)}: expected true or false")

    return bool(value)


def read_number(
    config: Mapping[str, Any],
    name: str,
    default: float | None = None,
    *,
    ge: float,
    le: float,
    place: str = "",
) -> float:
    """The number `name`, `default` if it is missing or null. Raises ModelLoadError outside `ge` to `le`.

    place: the part of the config that has the setting, for messages.
    """
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not ge <= value <= le:
        found, expected = f"{name}={short_repr(value)}{place}", f"from {ge:g} to {le:g}"
        raise ModelLoadError(f"config: {found}: expected a number {expected}")

    return float(value)


def read_multiplier(config: Mapping[str, Any], name: str, default: float | None = 1.0) -> float:
    """The factor `name`, as `read_number` reads it."""
    return read_number(config, name, default, ge=MULTIPLIERS[0], le=MULTIPLIERS[1])


DEFAULT_THETA = 10_000.0
# Allowed ranges. Beyond them, frequencies in float32 would be zero, infinite or NaN.
THETAS = (1.0, 1e30)
FACTORS = (1e-6, 1e30)
MAGNITUDES = (1e-3, 1e3)
IN_ROPE = " in the rope settings"
LONG_ROPE_TYPES = ("longrope", "su")  # "su": the first files of Phi-3
FIELDS = ("rope_parameters", "rope_scaling")
BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
"""Settings of `rope_parameters` that older files have outside `rope_scaling`."""
READ = (
    *("rope_type", "type", "factor", "factors", "original_max_position_embeddings", *BESIDE_SCALING),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"),
    *("attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("full_attention", "sliding_attention"),
    *("llama_4_scaling_beta", "max_position_embeddings", "mrope_section", "mrope_interleaved"),
)
"""Settings that some kind of rotation has. Those of sections (M-RoPE) have no effect on text, whose positions
are the same in all sections."""

log = logging.getLogger("drift_sdk")


def check_rope_fields(config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if `rope_parameters` and `rope_scaling` of a config.json contradict each other:
    transformers takes the second then, other readers the first.

    Logs a warning that names settings which no rotation has: they have no effect.
    """
    parameters, scaling = (config.get(name) for name in FIELDS)
    unread = sorted(_unread(parameters) | _unread(scaling))
    if unread:
        log.warning("the config has rope settings without effect: %s", short_repr(unread))

    if parameters in (None, {}) or scaling in (None, {}):
        return

    # In a file with a set for each kind of layer, `rope_scaling` holds the settings of full layers.
    is_nested = isinstance(parameters, Mapping) and isinstance(parameters.get("full_attention"), Mapping)
    if not _are_same(parameters["full_attention"] if is_nested else parameters, scaling):
        found = ", ".join(f"{name}={short_repr(config[name])}" for name in FIELDS)
        raise ModelLoadError(f"config: {found}: expected one of them, or the same settings in both")


def _unread(settings: object) -> set[str]:
    """Names of settings that no rotation has, also of those for each kind of layer."""
    if not isinstance(settings, Mapping):
        return set()

    tables = [settings, *(inner for inner in settings.values() if isinstance(inner, Mapping))]
    return {name for table in tables for name in table if name not in READ}


def _are_same(parameters: object, scaling: object) -> bool:
    if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
        return False

    rotations = [
        {name: value for name, value in settings.items() if value is not None and name != "type"}
        | {"rope_type": _first_given(settings, "rope_type", "type") or "default"}
        for settings in (parameters, scaling)
    ]
    for name in BESIDE_SCALING:
        if any(name not in rotation for rotation in rotations):
            rotations = [{key: rotation[key] for key in rotation if key != name} for rotation in rotations]
    return rotations[0] == rotations[1]


def read_rope(settings: Settings, head_dim: int, *, may_be_partial: bool = False) -> Rope:
    """The rotation that a config.json describes: in `rope_parameters`, or in `rope_theta` and `rope_scaling`
    in older files.

    may_be_partial: `partial_rotary_factor` is read; else only 1.0 is accepted.

    Raises ModelLoadError for a rope type that is not implemented, and for a setting that is missing or out of
    range.
    """
    table = rope_table(settings)
    is_proportional = _first_given(table, "rope_type", "type") == "proportional"
    rotary_dim = _rotary_dim(settings, table, head_dim, may_be_partial=may_be_partial or is_proportional)
    theta = DEFAULT_THETA
    for source in (table, settings):
        if source.get("rope_theta") is not None:
            theta = read_number(source, "rope_theta", ge=THETAS[0], le=THETAS[1], place=IN_ROPE)
            break

    if is_proportional:
        factor = read_number(table, "factor", 1.0, ge=FACTORS[0], le=FACTORS[1], place=IN_ROPE)
        proportional = ProportionalScaling(num_pairs=rotary_dim // 2, factor=factor)
        return Rope(theta=theta, rotary_dim=head_dim, scaling=proportional)

    if _first_given(table, "rope_type", "type") == "yarn":
        scaling: RopeScaling | None = _yarn_scaling(settings, table, rotary_dim, theta)
    else:
        scaling = _scaling(settings, table, rotary_dim, settings.max_model_len)
    return Rope(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def read_score_factor(settings: Settings) -> float:
    """The factor of latent attention's scale if the rotation is scaled: the square of the magnitude that
    `mscale_all_dim` gives; 1.0 without."""
    table = rope_table(settings)
    weight = read_number(table, "mscale_all_dim", 0.0, ge=0.0, le=MAGNITUDES[1], place=IN_ROPE)
    if _first_given(table, "rope_type", "type") in (None, "default") or not weight:
        return 1.0

    return _magnitude_of(weight, _factor(table, "factor")) ** 2


def read_query_scaling(settings: Settings) -> QueryScaling | None:
    """The scaling of queries by their positions, in `rope_parameters`; None without."""
    table = rope_table(settings)
    if table.get("llama_4_scaling_beta") is None:
        return None

    beta = read_number(table, "llama_4_scaling_beta", ge=0.0, le=MAGNITUDES[1], place=IN_ROPE)
    return QueryScaling(beta, _original_context(settings, table, ge=1)) if beta else None


def _rotary_dim(
    config: Mapping[str, Any], settings: Mapping[str, Any], head_dim: int, *, may_be_partial: bool
) -> int:
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share in (None, 1, 1.0):
        return head_dim

    found = f"partial_rotary_factor={short_repr(share)}"
    if not may_be_partial:
        raise ModelLoadError(f"config: {found}: only 1.0 is implemented for this architecture")

    rotary_dim = int(head_dim * share) if _is_number(share) and 0 < share <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        expected = f"a number up to 1 that leaves an even number of a head's {head_dim} elements"
        raise ModelLoadError(f"config: {found}: expected {expected}")

    return rotary_dim


def _scaling(
    config: Mapping[str, Any], settings: Mapping[str, Any], rotary_dim: int, max_model_len: int | None
) -> RopeScaling | None:
    rope_type = _first_given(settings, "rope_type", "type")
    if rope_type in (None, "default"):
        return None

    if rope_type == "dynamic":
        # It changes frequencies with the length of a sequence, but not up to the context of the config.
        _factor(settings, "factor")
        return None

    if rope_type == "linear":
        return LinearScaling(factor=_factor(settings, "factor"))

    if rope_type == "llama3":
        return _llama3_scaling(config, settings)

    if rope_type in LONG_ROPE_TYPES:
        return _long_rope_scaling(config, settings, rotary_dim // 2, max_model_len)

    if rope_type == "factors":
        return FrequencyFactors(factors=_factors(settings, "factors", rotary_dim // 2))

    known = "default, dynamic, linear, llama3, longrope, proportional or yarn"
    raise ModelLoadError(f"config: rope_type={short_repr(rope_type)}: expected {known}")


def rope_table(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's table of rope settings, empty if it has none."""
    given = [config.get(name) for name in FIELDS]
    settings: Any = next((settings for settings in given if settings not in (None, {})), {})
    if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
        raise ModelLoadError(
            f"config: rope settings {short_repr(settings)}: expected one flat set for all layers"
        )

    return settings


def _llama3_scaling(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Llama3Scaling:
    low, high = _factor(settings, "low_freq_factor"), _factor(settings, "high_freq_factor")
    if low >= high:
        raise ModelLoadError(f"config: low_freq_factor={low}: expected less than high_freq_factor={high}")

    return Llama3Scaling(
        factor=_factor(settings, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_context(config, settings, ge=1),
    )


def _long_rope_scaling(
    config: Mapping[str, Any], settings: Mapping[str, Any], num_factors: int, max_model_len: int | None
) -> LongRopeScaling:
    context = _original_context(config, settings, ge=2)
    whole = int(read_number(config, "max_position_embeddings", ge=2, le=MAX_CONTEXT))
    short, long = (_factors(settings, f"{name}_factor", num_factors) for name in ("short", "long"))
    factor = read_number(settings, "factor", whole / context, ge=FACTORS[0], le=FACTORS[1], place=IN_ROPE)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    return LongRopeScaling(
        factors=long if (max_model_len or whole) > context else short,
        magnitude=read_number(
            settings, "attention_factor", magnitude, ge=MAGNITUDES[0], le=MAGNITUDES[1], place=IN_ROPE
        ),
    )


def _yarn_scaling(
    config: Mapping[str, Any], settings: Mapping[str, Any], rotary_dim: int, theta: float
) -> YarnScaling:
    """YaRN's scaling. `first` is the pair that turns beta_fast times over the context of pretraining, `last`
    the pair that turns beta_slow times. Without `attention_factor`, the magnitude follows from the factor,
    times `attn_factor`, as in vLLM."""
    context = _original_context(config, settings, ge=2)
    whole = read_number(config, "max_position_embeddings", ge=2, le=MAX_CONTEXT)
    low, high = FACTORS
    ratio = whole / context if whole > context else None
    factor = read_number(settings, "factor", ratio, ge=low, le=high, place=IN_ROPE)
    fast, slow = (
        read_number(settings, name, default, ge=low, le=high, place=IN_ROPE)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if theta == 1.0:
        raise ModelLoadError("config: rope_theta=1.0: expected more than 1 for YaRN")

    def pair(num_turns: float) -> float:
        return rotary_dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(fast), pair(slow)
    if settings.get("truncate") is None or read_bool(settings, "truncate"):
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, float(rotary_dim - 1))
    if first > last:
        raise ModelLoadError(f"config: beta_fast={fast}: expected at least beta_slow={slow}{IN_ROPE}")

    return YarnScaling(
        factor=factor,
        first=first,
        last=last if last > first else first + 0.001,
        magnitude=read_number(
            settings,
            "attention_factor",
            _yarn_magnitude(settings, factor) * _magnitude(settings, "attn_factor"),
            ge=MAGNITUDES[0],
            le=MAGNITUDES[1],
            place=IN_ROPE,
        ),
        context=int(min(factor * context, MAX_CONTEXT)),
    )


def _yarn_magnitude(settings: Mapping[str, Any], factor: float) -> float:
    """The factor of cosines and sines, which follows from the context's factor."""
    weights = [
        read_number(settings, name, 0.0, ge=0.0, le=MAGNITUDES[1], place=IN_ROPE)
        for name in ("mscale", "mscale_all_dim")
    ]
    magnitudes = [_magnitude_of(weight, factor) for weight in (*weights, 1.0)]
    return magnitudes[0] / magnitudes[1] if all(weights) else magnitudes[2]


def _magnitude_of(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def _magnitude(settings: Mapping[str, Any], name: str) -> float:
    return read_number(settings, name, 1.0, ge=MAGNITUDES[0], le=MAGNITUDES[1], place=IN_ROPE)


def _original_context(config: Mapping[str, Any], settings: Mapping[str, Any], *, ge: int) -> int:
    """Tokens of context in pretraining."""
    name = "original_max_position_embeddings"
    given = (config.get(name), settings.get(name), config.get("max_position_embeddings"))
    context = next((value for value in given if value is not None), None)
    return int(read_number({name: context}, name, ge=ge, le=MAX_CONTEXT, place=IN_ROPE))


def _first_given(settings: Mapping[str, Any], *names: str) -> Any:
    return next((settings[name] for name in names if settings.get(name) is not None), None)


def _factor(settings: Mapping[str, Any], name: str) -> float:
    return read_number(settings, name, ge=FACTORS[0], le=FACTORS[1], place=IN_ROPE)


def _factors(settings: Mapping[str, Any], name: str, num_factors: int) -> tuple[float, ...]:
    """One factor for each pair of elements."""
    factors = settings.get(name)
    low, high = FACTORS
    if (
        not isinstance(factors, list)
        or len(factors) != num_factors
        or not all(_is_number(factor) and low <= factor <= high for factor in factors)
    ):
        found, expected = (
            f"rope {name} {short_repr(factors)}",
            f"{num_factors} numbers from {low:g} to {high:g}",
        )
        raise ModelLoadError(f"config: {found}: expected {expected}")

    return tuple(map(float, factors))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    """The model's context, in tokens. With YaRN it is the reach of the scaling, also if
    `max_position_embeddings` is less: model cards that add YaRN leave it unchanged."""
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
