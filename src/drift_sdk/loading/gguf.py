"""Models in GGUF files: their configuration, and dequantised weights under Hugging Face names.

Format and names of metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names of tensors:
those that llama.cpp's convert_hf_to_gguf.py writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.gguf_parts import GGUFParts

__all__ = ["GGUFFile"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Metadata that changes the arithmetic in a way that a config.json of these architectures cannot express.
UNSUPPORTED_KEYS = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "use_parallel_residual",
)
# Bytes passed as one row to gguf's quants module. It processes 16 rows at a time: long rows make few calls on
# much data.
ROW_BYTES = 1 << 16


class GGUFFile:
    """The TensorSource of a .gguf file, or of all parts of a split one.

    files:     the file, or the parts in order.
    metadata:  the file's key/value metadata, as plain Python values.
    config:    the settings that a config.json of the model would have.

    Opening reads only the header; `get` dequantises a tensor to float32. Raises ModelLoadError naming the
    file if it is not whole, or holds a model that is not implemented.
    """

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._parts = GGUFParts(path)
        self._header = self._parts.header
        self.files = self._parts.files
        self.metadata = self._header.metadata
        self.config = self._read_config()
        self._stored_names: dict[str, str] = {}
        for stored in self._header.tensors:
            other = self._stored_names.setdefault(_hf_name(stored), stored)
            if other != stored:
                raise ModelLoadError(f"{path}: tensors {other} and {stored} are the same, expected one")

        self._stored_names.pop(ROPE_FACTORS, None)

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header.tensors[self._stored_names[name]].shape

    def file(self, name: str) -> str:
        return self._parts.file(self._header.tensors[self._stored_names[name]])

    def get(self, name: str) -> torch.Tensor:
        """A tensor dequantised to float32, with its rows in the order of Hugging Face."""
        array = self._dequantise(self._stored_names[name])
        if self.config["model_type"] == "llama" and ".self_attn.q_proj." in name:
            array = _unpermute(array, self.config["num_attention_heads"])
        elif self.config["model_type"] == "llama" and ".self_attn.k_proj." in name:
            array = _unpermute(array, self.config["num_key_value_heads"])

        return torch.from_numpy(array)

    def _dequantise(self, stored_name: str) -> npt.NDArray[np.float32]:
        """A tensor of the file, by the file's own name."""
        tensor = self._header.tensors[stored_name]
        raw = self._parts.raw(tensor)
        _, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
        row_bytes = ROW_BYTES // block_bytes * block_bytes
        num_whole = raw.size // row_bytes * row_bytes
        parts = [part for part in (raw[:num_whole].reshape(-1, row_bytes), raw[num_whole:]) if part.size]
        try:
            return np.concatenate([_to_float32(part, tensor.quantization) for part in parts]).reshape(
                tensor.shape
            )
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self._parts.file(tensor)}: tensor {stored_name} is stored as {tensor.quantization.name}, "
                "which cannot be dequantised"
            ) from error

    def _read_config(self) -> dict[str, Any]:
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            found = short_repr(architecture)
            raise ModelLoadError(f"{self.location}: architecture {found}, expected one of {known}")

        prefix = f"{architecture}."
        settings = {k.removeprefix(prefix): v for k, v in self.metadata.items() if k.startswith(prefix)}
        for key in UNSUPPORTED_KEYS:
            if settings.get(key):
                found = short_repr(settings[key])
                raise ModelLoadError(f"{self.location}: {prefix}{key}={found} is not implemented")

        hidden_size, num_heads = settings.get("embedding_length"), settings.get("attention.head_count")
        head_dim = settings.get("attention.key_length")
        if head_dim is None and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads:
            head_dim = hidden_size // num_heads

        for key in ("attention.value_length", "rope.dimension_count"):
            if settings.get(key, head_dim) != head_dim:
                found = f"{prefix}{key}={short_repr(settings[key])}, expected {short_repr(head_dim)}"
                raise ModelLoadError(f"{self.location}: {found}")

        tensors = self._header.tensors
        embedding = tensors.get("token_embd.weight")
        return {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "vocab_size": None if embedding is None else embedding.shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": settings.get("feed_forward_length"),
            "num_hidden_layers": settings.get("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": settings.get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": settings.get("context_length"),
            "rms_norm_eps": settings.get("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope_parameters(settings, head_dim),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
        }

    def _rope_parameters(self, settings: dict[str, Any], head_dim: object) -> dict[str, Any]:
        rope_type = settings.get("rope.scaling.type", "none")
        factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear"))
        if "rope.scaling.type" not in settings and factor not in (None, 0.0, 1.0):
            rope_type = "linear"

        parameters = {"rope_theta": settings.get("rope.freq_base", 10_000.0)}
        if ROPE_FACTORS not in self._header.tensors:
            return parameters | {
                "rope_type": "default" if rope_type == "none" else rope_type,
                "factor": factor,
            }

        if rope_type != "none":
            raise ModelLoadError(
                f"{self.location}: {ROPE_FACTORS} beside rope scaling {short_repr(rope_type)}, expected one"
            )

        shape = self._header.tensors[ROPE_FACTORS].shape
        if not isinstance(head_dim, int) or shape != (head_dim // 2,):
            raise ModelLoadError(
                f"{self.location}: tensor {ROPE_FACTORS} has shape {list(shape)}, expected one factor for "
                f"each two of a head's {short_repr(head_dim)} elements"
            )

        return parameters | {"rope_type": "factors", "factors": self._dequantise(ROPE_FACTORS).tolist()}

    def _eos_token_ids(self) -> list[int]:
        """The ids of the end of text, of turn and of message, each of which ends a completion."""
        ids: list[int] = []
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")):
            token_id = self.metadata.get(key, 0)
            if type(token_id) is not int:
                raise ModelLoadError(f"{self.location}: {key}={short_repr(token_id)}: expected a token id")

            if key in self.metadata and token_id not in ids:
                ids.append(token_id)

        return ids


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its name in the file if these architectures have no such tensor."""
    if match := re.fullmatch(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)", name):
        layer, module, suffix = match.groups()
        return f"model.layers.{layer}.{LAYER_MODULES[module]}.{suffix}" if module in LAYER_MODULES else name

    module, _, suffix = name.rpartition(".")
    return f"{MODULES[module]}.{suffix}" if module in MODULES else name


def _unpermute(array: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the permutation of a query or key projection's rows [num_heads * head_dim, ...].

    llama.cpp rotates pairs of neighbouring elements, so its files interleave the two halves of each head.
    """
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _to_float32(raw: npt.NDArray[np.uint8], quantization: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):  # numbers that are not finite are rejected later, with the tensor's name
        array: npt.NDArray[np.float32] = quants.dequantize(raw, quantization)
    return array.reshape(-1)
