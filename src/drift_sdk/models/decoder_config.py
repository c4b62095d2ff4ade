"""Shapes and options of a decoder, from a model's config.json.

Names and defaults of settings are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.models.experts_config import ExpertsConfig, experts_from_hf, mlp_layers
from drift_sdk.models.layer_kinds import layer_kinds_from_hf
from drift_sdk.models.rope import Rope
from drift_sdk.models.rope_config import check_rope_fields
from drift_sdk.models.settings import MAX_SIZE, read_bool, read_int, read_number
from drift_sdk.models.text_part import text_settings
from drift_sdk.quantised.scheme import METHODS, Scheme, config_scheme, quantisation_settings

__all__ = ["Activation", "DecoderConfig"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
BASES = {"gemma3_text": "Gemma3TextModel"}
"""Names of models without a head, where they differ from the architecture's with "Model" at the end."""
# Defaults of settings that files may lack, where they differ from those of the other families.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"max_window_layers": 28, "head_dim": 128},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
    },
    "smollm3": {"rope_theta": 2_000_000.0, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "granite": {"attention_multiplier": 1.0},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
}
NULLABLE = ("sliding_window",)  # null is a value of its own, not the default

FUSED_PROJECTIONS = "has_fused_projections"
"""A setting that loading adds for files with query, key and value projections as one tensor."""

Activation = Literal["silu", "gelu_tanh"]
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
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
MULTIPLIERS = (1e-6, 1e6)
MAX_EPS = 1.0


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """Shapes and options of a decoder.

    intermediate_size:        width of the MLP.
    max_position_embeddings:  the model's context, in tokens: that of the config, or more with YaRN.
    has_qk_norm:              queries and keys are normalised per head before the rotation.
    is_head_tied:             the output head is the embedding.
    windows:                  for each layer, the number of keys that a row sees at most, its own included;
                              None: all keys before it.
    ropes:                    the rotations of queries and keys that layers use.
    layer_ropes:              for each layer, the index of its rotation in `ropes`; None: no rotation.
    attention_scale:          products of queries and keys are multiplied by it.
    activation:               function of the MLP's gate.
    has_offset_norms:         all norms multiply by 1 + weight, in float32, before rounding to the model's
                              dtype; else by the weight, after rounding.
    has_post_norms:           the outputs of attention and MLP are normalised before they are added to the
                              residual stream.
    embedding_multiplier:     embeddings are multiplied by it.
    has_rounded_multiplier:   embedding_multiplier is rounded to the model's dtype before.
    residual_multiplier:      the outputs of attention and MLP are multiplied by it before they are added.
    logits_divisor:           logits are divided by it.
    has_wide_norms:           all norms multiply by the weight in float32, before rounding.
    has_sinks:                each head has a logit that takes part in the softmax of attention and has no
                              value.
    experts:                  the mixture of experts that layers have in place of an MLP; None: all have MLPs.
    mlp_layers:               with experts, the layers that have an MLP all the same.
    has_fused_projections:    files have query, key and value projections as one tensor, and gate and up
                              projections as another.
    quantisation:             how files store quantised weights; None: they have none, or MXFP4 experts alone.
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
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_head_tied: bool
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int | None, ...]
    attention_scale: float
    activation: Activation = "silu"
    has_offset_norms: bool = False
    has_post_norms: bool = False
    embedding_multiplier: float = 1.0
    has_rounded_multiplier: bool = False
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    has_fused_projections: bool = False
    has_wide_norms: bool = False
    has_sinks: bool = False
    experts: ExpertsConfig | None = None
    mlp_layers: tuple[int, ...] = ()
    quantisation: Scheme | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, max_model_len: int | None = None) -> DecoderConfig:
        """From the contents of a config.json.

        max_model_len: length of the longest sequence that will be computed, in tokens; None: the model's
        context. It decides between the two sets of factors of a LongRoPE.

        Raises ModelLoadError naming a setting that is missing, out of range or not implemented.
        """
        config = text_settings(config)
        family = _family(config)
        given = {name: value for name, value in config.items() if value is not None or name in NULLABLE}
        check_rope_fields(given)
        config = DEFAULTS.get(family, {}) | given
        _check_options(config)
        quantisation = _quantisation(config, family)
        hidden_size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        num_kv_heads, head_dim = _heads(config, hidden_size, num_heads)
        kinds = layer_kinds_from_hf(config, family, head_dim, max_model_len)
        has_attention_bias = family != "qwen2" and read_bool(config, "attention_bias")
        is_gemma, is_gpt_oss = family == "gemma3_text", family == "gpt_oss"
        return cls(
            vocab_size=read_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_int(config, "intermediate_size"),
            num_layers=len(kinds.windows),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=kinds.context,
            rms_norm_eps=read_number(config, "rms_norm_eps", 1e-6, ge=0.0, le=MAX_EPS),
            has_qkv_bias=has_attention_bias or family == "qwen2",
            has_output_bias=has_attention_bias,
            has_mlp_bias=family in ("llama", "smollm3", "granite") and read_bool(config, "mlp_bias"),
            has_qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
            is_head_tied=read_bool(config, "tie_word_embeddings"),
            windows=kinds.windows,
            ropes=kinds.ropes,
            layer_ropes=kinds.layer_ropes,
            attention_scale=_attention_scale(config, family, head_dim),
            activation=_activation(config, family),
            has_offset_norms=is_gemma,
            has_post_norms=is_gemma,
            has_rounded_multiplier=is_gemma,
            has_fused_projections=family == "phi3" or (is_gpt_oss and read_bool(config, FUSED_PROJECTIONS)),
            has_wide_norms=is_gpt_oss,
            has_sinks=is_gpt_oss,
            quantisation=quantisation,
            experts=experts_from_hf(config, family, len(kinds.windows)),
            mlp_layers=mlp_layers(config, family, len(kinds.windows)),
            **_multipliers(config, family, hidden_size),
        )

    def layer_experts(self, index: int) -> ExpertsConfig | None:
        """The experts of layer `index`; None if it has an MLP."""
        return None if index in self.mlp_layers else self.experts

    @property
    def mlp_size(self) -> int:
        """The width of the layers' MLPs; 0 if all layers have experts in their place."""
        return self.intermediate_size if self.experts is None or self.mlp_layers else 0

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that are rotated, the same in all layers that rotate."""
        return self.ropes[0].rotary_dim if self.ropes else self.head_dim


def _family(config: Mapping[str, Any]) -> str:
    """The key in ARCHITECTURES of the model's architecture; without `architectures`, `model_type` decides."""
    known = ", ".join(ARCHITECTURES.values())
    architectures = config.get("architectures") or [ARCHITECTURES.get(str(config.get("model_type")))]
    for family, architecture in ARCHITECTURES.items():
        # A model that was saved without its head has another name; whether a head is missing, files tell.
        names = (architecture, BASES.get(family, architecture.replace("ForCausalLM", "Model")))
        if architectures in ([name] for name in names) and config.get("model_type", family) == family:
            return family

    found = ", ".join(f"{name}={short_repr(config.get(name))}" for name in ("architectures", "model_type"))
    raise ModelLoadError(f"config: {found}: expected one of {known}")


def _check_options(config: Mapping[str, Any]) -> None:
    for name in UNSUPPORTED:
        if config.get(name):
            raise ModelLoadError(f"config: {name}={short_repr(config[name])} is not implemented")


def _quantisation(config: Mapping[str, Any], family: str) -> Scheme | None:
    """The scheme of quantised weights other than MXFP4 experts, which only gpt-oss has; beside them, only
    blocks of GGUF are known."""
    settings = quantisation_settings(config)
    method = settings.get("quant_method")
    is_known = method in ("mxfp4", "gguf") if family == "gpt_oss" else method != "mxfp4"
    if settings and not is_known:
        allowed = "'mxfp4'" if family == "gpt_oss" else f"one of {', '.join(map(repr, METHODS))}"
        found = f"quantization_config with quant_method={short_repr(method)}"
        raise ModelLoadError(f"config: {found}: expected {allowed} for this architecture")

    return config_scheme(config)


def _heads(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> tuple[int, int]:
    """The number of KV heads, and the width of a head."""
    num_kv_heads = read_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"config: num_key_value_heads={num_kv_heads}: expected a divisor of {num_heads}")

    head_dim = read_int(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2 or num_heads * head_dim > MAX_SIZE:
        raise ModelLoadError(
            f"config: head_dim={head_dim}: expected an even number of at most {MAX_SIZE // num_heads}"
        )

    return num_kv_heads, head_dim


def _attention_scale(config: Mapping[str, Any], family: str, head_dim: int) -> float:
    if family == "granite":
        return _multiplier(config, "attention_multiplier")

    if family == "gemma3_text":
        return float(
            read_number(config, "query_pre_attn_scalar", ge=MULTIPLIERS[0], le=MULTIPLIERS[1]) ** -0.5
        )

    return float(head_dim**-0.5)


def _activation(config: Mapping[str, Any], family: str) -> Activation:
    name = "hidden_activation" if family == "gemma3_text" else "hidden_act"
    activation = config.get(name, "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        known = " or ".join(map(repr, ACTIVATIONS))
        raise ModelLoadError(f"config: {name}={short_repr(activation)}: expected {known}")

    return ACTIVATIONS[activation]


def _multipliers(config: Mapping[str, Any], family: str, hidden_size: int) -> dict[str, float]:
    """The fields of multipliers that differ from 1."""
    if family == "gemma3_text":
        return {"embedding_multiplier": hidden_size**0.5}

    if family == "granite":
        return {
            "embedding_multiplier": _multiplier(config, "embedding_multiplier"),
            "residual_multiplier": _multiplier(config, "residual_multiplier"),
            "logits_divisor": _multiplier(config, "logits_scaling"),
        }

    return {}


def _multiplier(config: Mapping[str, Any], name: str) -> float:
    return read_number(config, name, 1.0, ge=MULTIPLIERS[0], le=MULTIPLIERS[1])
