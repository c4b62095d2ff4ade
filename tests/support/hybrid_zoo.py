"""Small random models with recurrent layers, made by transformers and saved as folders."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["HYBRIDS", "make_hybrid_model"]

VOCAB_SIZE = 160


def _shape(rng: random.Random) -> dict[str, Any]:
    num_heads, num_kv_heads = rng.choice(((4, 2), (4, 1), (6, 2)))
    num_key_heads, num_value_heads = rng.choice(((2, 2), (2, 4), (1, 3)))
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_heads * rng.choice((8, 12)),
        "intermediate_size": rng.randint(20, 80),
        "num_hidden_layers": rng.choice((4, 5, 8)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": rng.choice((16, 32)),
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": rng.choice((8, 16)),
        "linear_value_head_dim": rng.choice((8, 12)),
        "linear_conv_kernel_dim": rng.choice((2, 4)),
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "attention_bias": rng.random() < 0.3,
        "tie_word_embeddings": rng.random() < 0.3,
    }


def _experts(rng: random.Random) -> dict[str, Any]:
    return {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": rng.choice((8, 12)),
        "shared_expert_intermediate_size": rng.choice((8, 12)),
    }


def _qwen3_5(rng: random.Random, **sizes: int) -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_shape(rng) | sizes))


def _qwen3_5_vision(rng: random.Random, **sizes: int) -> Any:
    """A model that reads images too."""
    text = _shape(rng) | sizes
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe(rng: random.Random, **sizes: int) -> Any:
    config = transformers.Qwen3_5MoeTextConfig(**_shape(rng) | _experts(rng) | sizes)
    return transformers.Qwen3_5MoeForCausalLM(config)


def _qwen3_next(rng: random.Random, **sizes: int) -> Any:
    more = {"norm_topk_prob": rng.random() < 0.7, "mlp_only_layers": rng.choice(([], [1]))}
    config = transformers.Qwen3NextConfig(**_shape(rng) | _experts(rng) | more | sizes)
    return transformers.Qwen3NextForCausalLM(config)


HYBRIDS: dict[str, Callable[..., Any]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_5_vision": _qwen3_5_vision,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
}


def make_hybrid_model(family: str, seed: int, folder: Path, **sizes: int) -> Any:
    """Build a model, save it to `folder` and return it, in float32 and eval mode. The same family and seed
    give the same model. sizes: fields of its config."""
    with torch.random.fork_rng(devices=[]):
        model = HYBRIDS[family](random.Random(f"{family}{seed}"), **sizes).eval()
    _randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def _randomise(model: Any, generator: torch.Generator) -> None:
    """Draw values so large that greedy answers vary, and decays from short to long."""
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if name.endswith("norm.weight"):
            mean = 1.0 if "Gated" in type(module).__name__ else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
        elif name.endswith("A_log"):
            parameter.uniform_(-3.0, 1.0, generator=generator)
        elif name.endswith("dt_bias"):
            parameter.normal_(0.0, 1.0, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.3, generator=generator)
        elif "embed_tokens" in name or "lm_head" in name or "conv1d" in name:
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5, generator=generator)
