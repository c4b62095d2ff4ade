"""The config of a model small enough for Triton's interpreter."""

from __future__ import annotations

from typing import Any

__all__ = ["tiny_llama"]


def tiny_llama(**changes: Any) -> dict[str, Any]:
    """Contents of a config.json with one layer and two heads, with `changes`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    return config | changes
