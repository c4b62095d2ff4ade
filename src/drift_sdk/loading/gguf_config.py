"""The settings that a config.json of a model would have, from the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.gguf_ends import gguf_eos_token_ids
from drift_sdk.loading.gguf_file import GGUFHeader, is_block_matrix
from drift_sdk.spec.family import Family, GGUFArchitecture, GGUFSettings

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
    "attention.temperature_scale",
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


def read_gguf_config(
    header: GGUFHeader,
    family: Family,
    architecture: GGUFArchitecture,
    location: str,
    read_vector: Callable[[str], list[float]],
) -> dict[str, Any]:
    """The settings of a file's model.

    family, architecture: of the file.
    location:     the file, for messages.
    read_vector:  returns the numbers of a tensor of the file, by name.

    Raises ModelLoadError naming the file for metadata that is not implemented, or not of the right type.
    Sizes are checked where the settings are read.
    """
    return _ConfigReader(header, family, architecture, location, read_vector).config()


class _ConfigReader:
    def __init__(
        self,
        header: GGUFHeader,
        family: Family,
        architecture: GGUFArchitecture,
        location: str,
        read_vector: Callable[[str], list[float]],
    ) -> None:
        self._header, self._family, self._architecture = header, family, architecture
        self._location = location
        self._read_vector = read_vector
        self._prefix = f"{architecture.name}."
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
            "architectures": [self._family.architectures[0]],
            "model_type": self._family.model_type,
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

        if self._architecture.settings is None:
            return config

        own = GGUFSettings(
            values=settings,
            config=config,
            rotary_dim=rotary_dim,
            place=f"{self._location}: {self._prefix}",
            tensors=tensors.keys(),
        )
        return config | self._architecture.settings(own)

    def _head_dims(self) -> tuple[Any, Any]:
        """The width of a head, and how much of it is rotated."""
        settings = self._settings
        head_dim = settings.get("attention.key_length")
        if head_dim is None:
            head_dim = _quotient(settings.get("embedding_length"), settings.get("attention.head_count"))

        rotary_dim = settings.get("rope.dimension_count", head_dim)
        is_partial = self._architecture.is_partial and _is_below(rotary_dim, head_dim)
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
        if rope_type == "yarn" and self._architecture.yarn is not None:
            context = settings.get("rope.scaling.original_context_length")
            known = {"factor": factor, "original_max_position_embeddings": context}
            return parameters | dict(self._architecture.yarn) | known

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
