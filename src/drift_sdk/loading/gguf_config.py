"""The settings that a config.json of a model would have, from the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.gguf_architectures import ARCHITECTURES, MIXTRAL, GGUFArchitecture
from drift_sdk.loading.gguf_ends import gguf_eos_token_ids
from drift_sdk.loading.gguf_header import GGUFHeader, is_block_matrix

__all__ = ["ROPE_FACTORS", "find_architecture", "read_gguf_config"]

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are settings: factors of the frequencies of rotation."""
LONG_ROPE = [("longrope", name) for name in ROPE_FACTORS[1:]]
# Metadata that changes the arithmetic. Each architecture reads some of it.
ARITHMETIC_KEYS = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
    "use_parallel_residual",
)
NEUTRAL = {"rope.scaling.attn_factor": 1.0}
"""Of that metadata, what changes nothing; else 0, "" and what is missing."""
REQUIRED = ("attention.layer_norm_rms_epsilon",)
"""Metadata that every file has, and whose absence would not be found elsewhere. Architectures have others."""
# llama.cpp's loader knows the largest Gemma 3, whose scale is that of another width of heads, by its layers.
GEMMA3_27B_LAYERS = 62
GEMMA3_LOCAL_THETA = 10_000.0
MIN_SCALE = 1e-6
"""The least scale of attention."""
GPT_OSS_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
"""What files of gpt-oss do not say of their rotation."""
SMOLLM3_PERIOD = 4  # every fourth layer has no rotation: files do not say so, and neither do they differ


def find_architecture(metadata: Mapping[str, Any], location: str) -> GGUFArchitecture:
    """The architecture of a file. Raises ModelLoadError for one that is not implemented."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"{location}: architecture {short_repr(name)}, expected one of {known}")

    return MIXTRAL if name == "llama" and metadata.get("llama.expert_count") else ARCHITECTURES[name]


def read_gguf_config(
    header: GGUFHeader, location: str, read_vector: Callable[[str], list[float]]
) -> dict[str, Any]:
    """The settings of a file's model.

    location:     the file, for messages.
    read_vector:  returns the numbers of a tensor of the file, by name.

    Raises ModelLoadError naming the file for metadata that is not implemented, or not of the right type.
    Sizes are checked where the settings are read.
    """
    return _ConfigReader(header, location, read_vector).config()


class _ConfigReader:
    def __init__(self, header: GGUFHeader, location: str, read_vector: Callable[[str], list[float]]) -> None:
        self._header = header
        self._location = location
        self._read_vector = read_vector
        self._architecture = find_architecture(header.metadata, location)
        self._prefix = f"{header.metadata['general.architecture']}."
        self._settings = {
            key.removeprefix(self._prefix): value
            for key, value in header.metadata.items()
            if key.startswith(self._prefix)
        }

    def config(self) -> dict[str, Any]:
        settings, tensors = self._settings, self._header.tensors
        for key in ARITHMETIC_KEYS:
            is_neutral = not settings.get(key) or settings[key] == NEUTRAL.get(key)
            if not is_neutral and key not in self._architecture.keys:
                found = f"{self._prefix}{key}={short_repr(settings[key])}"
                raise ModelLoadError(f"{self._location}: {found} is not implemented")

        head_dim, rotary_dim = self._head_dims()
        num_heads = settings.get("attention.head_count")
        embedding = tensors.get("token_embd.weight")
        config = {
            "architectures": [self._architecture.architecture],
            "model_type": self._architecture.model_type,
            "vocab_size": None if embedding is None else embedding.shape[0],
            "hidden_size": settings.get("embedding_length"),
            "intermediate_size": settings.get("feed_forward_length"),
            "num_hidden_layers": settings.get("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": settings.get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": settings.get("context_length"),
            "rms_norm_eps": settings.get("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope_parameters(rotary_dim),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": settings.get("attention.sliding_window") or None,
            "bos_token_id": self._header.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": gguf_eos_token_ids(self._header.metadata, self._location),
        }
        if any(is_block_matrix(tensor) for tensor in tensors.values()):
            config["quantization_config"] = {"quant_method": "gguf"}
        for key in (*REQUIRED, *self._architecture.required):
            if key not in settings:
                raise ModelLoadError(f"{self._location}: {self._prefix}{key} is missing")

        return config | self._own_settings(config)

    def _own_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Settings of one family."""
        settings = self._settings
        match self._architecture.model_type:
            case "qwen3_moe":
                return {
                    "num_experts": settings.get("expert_count"),
                    "num_experts_per_tok": settings.get("expert_used_count"),
                    "moe_intermediate_size": settings.get("expert_feed_forward_length"),
                    "intermediate_size": settings.get("expert_feed_forward_length"),  # no layer has an MLP
                    "decoder_sparse_step": 1,
                    "norm_topk_prob": True,  # not in files: llama.cpp does it for this architecture
                }
            case "mixtral":
                return {
                    "num_local_experts": settings.get("expert_count"),
                    "num_experts_per_tok": settings.get("expert_used_count"),
                }
            case "gpt_oss":
                return {
                    "intermediate_size": settings.get("expert_feed_forward_length"),
                    "num_local_experts": settings.get("expert_count"),
                    "num_experts_per_tok": settings.get("expert_used_count"),
                    "quantization_config": config.get("quantization_config", {"quant_method": "mxfp4"}),
                }
            case "phi3":
                return self._phi3_settings(config)
            case "gemma3_text":
                return self._gemma3_settings(config)
            case "smollm3":
                return {"no_rope_layer_interval": SMOLLM3_PERIOD}
            case "granite":
                return {
                    "attention_multiplier": settings.get("attention.scale") or _scale(config["head_dim"]),
                    "embedding_multiplier": settings.get("embedding_scale") or None,
                    "residual_multiplier": settings.get("residual_scale") or None,
                    "logits_scaling": settings.get("logit_scale") or None,
                }
            case _:
                return {}

    def _phi3_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of a head that is rotated, and LongRoPE."""
        head_dim, rotary_dim = self._head_dims()
        rope = config["rope_parameters"]
        if rotary_dim != head_dim:
            # Half an element more, so that truncation cannot lose one.
            rope = rope | {"partial_rotary_factor": (rotary_dim + 0.5) / head_dim}

        return {
            "original_max_position_embeddings": self._settings.get("rope.scaling.original_context_length"),
            "rope_parameters": rope,
        }

    def _gemma3_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Rotations of both kinds of layers, their pattern, and the scale of attention."""
        settings, rope = self._settings, config["rope_parameters"]
        head_dim, scale = config["head_dim"], settings.get("attention.scale") or None
        if scale is not None and not (isinstance(scale, float) and MIN_SCALE <= scale <= 1 / MIN_SCALE):
            found = f"{self._prefix}attention.scale={short_repr(scale)}"
            raise ModelLoadError(f"{self._location}: {found}, expected {MIN_SCALE} to {1 / MIN_SCALE:g}")

        if settings.get("block_count") == GEMMA3_27B_LAYERS:
            head_dim = _quotient(config["hidden_size"], config["num_attention_heads"])

        pattern = settings.get("attention.sliding_window_pattern")
        # Models without windows have neither a window nor a pattern.
        kinds: dict[str, Any] = {"sliding_window_pattern": pattern if config["sliding_window"] else 1}
        if isinstance(pattern, list):
            kinds = {"layer_types": [("full_attention", "sliding_attention")[bool(flag)] for flag in pattern]}

        return kinds | {
            "query_pre_attn_scalar": head_dim if scale is None else scale**-2,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_theta": settings.get("rope.freq_base_swa", GEMMA3_LOCAL_THETA)},
            },
        }

    def _head_dims(self) -> tuple[Any, Any]:
        """The width of a head, and how much of it is rotated."""
        settings = self._settings
        head_dim = settings.get("attention.key_length")
        if head_dim is None:
            head_dim = _quotient(settings.get("embedding_length"), settings.get("attention.head_count"))

        rotary_dim = settings.get("rope.dimension_count", head_dim)
        is_partial = self._architecture.model_type == "phi3" and _is_below(rotary_dim, head_dim)
        others = {"attention.value_length": settings.get("attention.value_length", head_dim)}
        if not is_partial:
            others["rope.dimension_count"] = rotary_dim

        for key, value in others.items():
            if value != head_dim:
                found = f"{self._prefix}{key}={short_repr(value)}, expected {short_repr(head_dim)}"
                raise ModelLoadError(f"{self._location}: {found}")

        return head_dim, rotary_dim

    def _rope_parameters(self, rotary_dim: object) -> dict[str, Any]:
        settings = self._settings
        rope_type = settings.get("rope.scaling.type", "none")
        factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear"))
        if "rope.scaling.type" not in settings and factor not in (None, 0.0, 1.0):
            rope_type = "linear"
        parameters = {"rope_theta": settings.get("rope.freq_base", 10_000.0)}
        if rope_type == "yarn" and self._architecture.model_type == "gpt_oss":
            context = settings.get("rope.scaling.original_context_length")
            return parameters | GPT_OSS_YARN | {"factor": factor, "original_max_position_embeddings": context}

        if rope_type == "yarn":  # llama.cpp has other defaults and one more factor than transformers
            raise ModelLoadError(f"{self._location}: rope_type='yarn' is not implemented for GGUF files")

        freqs, short, long = (self._factors(name, rope_type, rotary_dim) for name in ROPE_FACTORS)
        if freqs is not None:
            return parameters | {"rope_type": "factors", "factors": freqs}

        if short is not None or long is not None:
            magnitude = settings.get("rope.scaling.attn_factor")
            sets = {"short_factor": short, "long_factor": long, "attention_factor": magnitude}
            return parameters | sets | {"rope_type": "longrope"}

        return parameters | {"rope_type": "default" if rope_type == "none" else rope_type, "factor": factor}

    def _factors(self, name: str, rope_type: object, rotary_dim: object) -> list[float] | None:
        """The numbers of a tensor of factors; None if the file has none."""
        tensor = self._header.tensors.get(name)
        if tensor is None:
            return None

        if rope_type != "none" and (rope_type, name) not in LONG_ROPE:
            found = f"{name} beside rope scaling {short_repr(rope_type)}"
            raise ModelLoadError(f"{self._location}: {found}, expected one")

        if not isinstance(rotary_dim, int) or tensor.shape != (rotary_dim // 2,):
            raise ModelLoadError(
                f"{self._location}: tensor {name} has shape {list(tensor.shape)}, expected one factor for "
                f"each two of a head's {short_repr(rotary_dim)} elements"
            )

        return self._read_vector(name)


def _quotient(size: object, count: object) -> int | None:
    """The size of each of `count` parts; None if either is no positive integer."""
    return size // count if isinstance(size, int) and isinstance(count, int) and count > 0 else None


def _is_below(value: object, limit: object) -> bool:
    return isinstance(value, int) and isinstance(limit, int) and 0 < value < limit


def _scale(head_dim: object) -> float | None:
    return float(head_dim**-0.5) if isinstance(head_dim, int) and head_dim > 0 else None
