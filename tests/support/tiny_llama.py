"""Configs of models small enough for Triton's interpreter."""

from __future__ import annotations

from typing import Any

__all__ = ["tiny_hybrid", "tiny_llama"]


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


def tiny_hybrid(**changes: Any) -> dict[str, Any]:
    """Contents of a config.json of Qwen3.5 with a recurrent layer and one of attention, with `changes`."""
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    }
    return config | changes
