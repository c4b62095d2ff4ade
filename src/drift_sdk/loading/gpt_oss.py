"""The original files of gpt-oss, as OpenAI publishes them: settings and tensors under Hugging Face's names.

Names and settings: https://github.com/openai/gpt-oss, gpt_oss/torch/model.py and weights.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.safetensors import SafetensorsFolder

__all__ = ["OriginalTensors", "hf_settings", "is_original"]

RENAMED_SETTINGS = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
ROPE_SETTINGS = {
    "rope_scaling_factor": "factor",
    "rope_ntk_beta": "beta_fast",
    "rope_ntk_alpha": "beta_slow",
    "initial_context_length": "original_max_position_embeddings",
}
MARKS = ("experts_per_token", "initial_context_length", "rope_ntk_alpha")
"""Settings that no config.json of Hugging Face has together."""

VOCAB_SIZE = 201_088
ENDS = [200_002, 199_999, 200_012]
"""The ids of "<|return|>", "<|endoftext|>" and "<|call|>" in the vocabulary of all gpt-oss models."""

MODULES = {"embedding": "model.embed_tokens", "norm": "model.norm", "unembedding": "lm_head"}
LAYER_MODULES = {
    "attn.norm": "input_layernorm",
    "attn.qkv": "self_attn.qkv_proj",
    "attn.out": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.router",
}
LAYER_TENSORS = {
    "attn.sinks": "self_attn.sinks",
    "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
    "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
    "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}


def is_original(settings: Mapping[str, Any]) -> bool:
    """Whether the contents of a config.json are those of an original gpt-oss."""
    return "model_type" not in settings and all(name in settings for name in MARKS)


def hf_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that Hugging Face's config.json of the same model has.

    Original files do not state the context, which is that of all gpt-oss models, nor the tokens that end an
    answer, which follow from their vocabulary.
    """
    ropes = {name: settings[old] for old, name in ROPE_SETTINGS.items() if settings.get(old) is not None}
    kept = {
        RENAMED_SETTINGS.get(name, name): value
        for name, value in settings.items()
        if name not in ROPE_SETTINGS
    }
    if kept.get("vocab_size") == VOCAB_SIZE:
        kept.setdefault("eos_token_id", ENDS)
    return kept | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "rope_scaling": {"rope_type": "yarn", "truncate": False, **ropes},
        "quantization_config": {"quant_method": "mxfp4"},
        "has_fused_projections": True,
    }


class OriginalTensors:
    """The TensorSource of a folder with the original files of gpt-oss."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self.location = folder.location
        self.num_readers = folder.num_readers
        self._folder = folder
        self._stored_names: dict[str, str] = {}
        for stored in folder.names():
            other = self._stored_names.setdefault(_hf_name(stored), stored)
            if other != stored:
                raise ModelLoadError(
                    f"{folder.location}: tensors {other} and {stored} are the same, expected one"
                )

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._folder.shape(self._stored_names[name])

    def file(self, name: str) -> str:
        return self._folder.file(self._stored_names[name])

    def get(self, name: str) -> torch.Tensor:
        return self._folder.get(self._stored_names[name])

    def read_into(self, name: str, place: torch.Tensor) -> None:
        self._folder.read_into(self._stored_names[name], place)


def _hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; its name in the file if gpt-oss has no such tensor."""
    if match := re.fullmatch(r"block\.([0-9]+)\.(.+)", name):
        prefix, rest = f"model.layers.{match[1]}", match[2]
        if rest in LAYER_TENSORS:
            return f"{prefix}.{LAYER_TENSORS[rest]}"

        module, _, suffix = rest.rpartition(".")
        return f"{prefix}.{LAYER_MODULES[module]}.{_suffix(suffix)}" if module in LAYER_MODULES else name

    module, _, suffix = name.rpartition(".")
    return f"{MODULES[module]}.{_suffix(suffix)}" if module in MODULES else name


def _suffix(name: str) -> str:
    """The name of a parameter of a module. The weights of norms are called scale."""
    return "weight" if name == "scale" else name
