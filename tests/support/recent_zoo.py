"""Small random models of the families of 2025 and 2026, some of them the text part of a model that reads
images, made by transformers and saved as folders."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

__all__ = ["RECENT", "make_recent_model"]

VOCAB_SIZE = 160
WINDOW = 11


def _shape(rng: random.Random) -> dict[str, Any]:
    num_heads, num_kv_heads = rng.choice(((4, 2), (4, 1), (6, 2), (3, 3)))
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_heads * rng.choice((8, 12, 16)),
        "intermediate_size": rng.randint(20, 80),
        "num_hidden_layers": rng.randint(3, 5),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": rng.choice((8, 16, 24)),
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _ministral3_fields(rng: random.Random) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "rope_theta": rng.choice((500.0, 10_000.0)),
        "factor": rng.choice((4.0, 16.0)),
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": rng.choice((0.1, 0.6)),
    }
    window = {"sliding_window": rng.choice((None, WINDOW))}
    return _shape(rng) | window | {"rope_parameters": rope, "tie_word_embeddings": rng.random() < 0.5}


def _ministral3(rng: random.Random) -> Any:
    return transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**_ministral3_fields(rng)))


def _mistral3(rng: random.Random) -> Any:
    text = _ministral3_fields(rng) | {"model_type": rng.choice(("ministral3", "mistral"))}
    if text["model_type"] == "mistral":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _sections(text: dict[str, Any]) -> dict[str, Any]:
    """The rotation of Qwen3-VL, with sections of positions."""
    half = text["head_dim"] // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 5_000.0}
    return {"rope_parameters": rope | {"mrope_section": sections, "mrope_interleaved": True}}


def _vision(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }


def _qwen3_vl(rng: random.Random) -> Any:
    text = _shape(rng) | {"attention_bias": rng.random() < 0.3}
    config = transformers.Qwen3VLConfig(
        text_config=text | _sections(text),
        vision_config=_vision(text),
        tie_word_embeddings=rng.random() < 0.5,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_moe(rng: random.Random) -> Any:
    text = _shape(rng) | {
        "num_experts": rng.choice((4, 6)),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": rng.choice((8, 12, 20)),
        "mlp_only_layers": rng.choice(([], [1])),
        "decoder_sparse_step": rng.choice((1, 2)),
        "tie_word_embeddings": False,
    }
    config = transformers.Qwen3VLMoeConfig(
        text_config=text | _sections(text), vision_config=_vision(text), tie_word_embeddings=False
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def _glm4_moe(rng: random.Random) -> Any:
    num_groups, num_active_groups = rng.choice(((1, 1), (2, 1), (4, 2)))
    fields = _shape(rng) | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": rng.choice((8, 12, 20)),
        "n_group": num_groups,
        "topk_group": num_active_groups,
        "first_k_dense_replace": rng.randint(0, 2),
        "n_shared_experts": rng.choice((1, 2)),
        "routed_scaling_factor": rng.choice((1.0, 1.8)),
        "norm_topk_prob": rng.random() < 0.7,
        "use_qk_norm": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.6,
        "tie_word_embeddings": rng.random() < 0.3,
        "partial_rotary_factor": 0.5,
    }
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**fields))


def _muse_glimmer(rng: random.Random) -> Any:
    text = _shape(rng) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_window": rng.randint(3, 20),
        "attention_bias": rng.random() < 0.4,
        "qk_scale_factor": rng.choice((1.0, 3.87)),
        "output_multiplier": rng.choice((0.2, 0.7)),
        "final_logit_softcapping": rng.choice((2.0, 20.0)),
        "post_norm_eps": rng.choice((1e-8, 1e-2)),
        "tie_word_embeddings": False,
    }
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.MuseGlimmerConfig(
        text_config=text,
        vision_config=vision,
        out_hidden_size=64,
        projector_hidden_size=16,
        tie_word_embeddings=False,
    )
    return transformers.MuseGlimmerForConditionalGeneration(config)


RECENT: dict[str, Callable[[random.Random], Any]] = {
    "ministral3": _ministral3,
    "mistral3": _mistral3,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "glm4_moe": _glm4_moe,
    "muse_glimmer": _muse_glimmer,
}


def make_recent_model(family: str, seed: int, folder: Path) -> Any:
    """Build a model, save it to `folder` and return it, in float32 and eval mode. The same family and seed
    give the same model."""
    with torch.random.fork_rng(devices=[]):
        model = RECENT[family](random.Random(f"{family} {seed}")).eval()
    generator = torch.Generator().manual_seed(seed)
    _randomise(model, generator)
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":  # published files have experts [in, out]
        file = folder / "model.safetensors"
        tensors = load_file(file)
        save_file(
            {
                name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
                for name, tensor in tensors.items()
            },
            file,
        )
    return model


@torch.no_grad()
def _randomise(model: Any, generator: torch.Generator) -> None:
    """Draw values so large that greedy answers vary, see model_zoo."""
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if name.endswith("norm.weight"):
            is_centered = "Centered" in type(module).__name__
            parameter.normal_(0.0 if is_centered else 1.0, 0.2, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.3, generator=generator)
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            inner = parameter.shape[-1] if parameter.dim() > 1 else 400
            parameter.normal_(0.0, 2.0 * inner**-0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=generator)
