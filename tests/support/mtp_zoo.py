"""Random models with recurrent layers or latent attention that have a layer that predicts one more token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_zoo import draw_model
from hybrid_zoo import make_hybrid_model
from model_zoo import save_tokenizer
from recent_zoo import make_recent_model
from safetensors.torch import load_file, save_file

__all__ = ["LATENT_FAMILIES", "add_mtp", "make_mtp_model", "make_often_right"]

LATENT_FAMILIES = ("glm4_moe_lite", "deepseek_v3")
BEHIND = ("glm4_moe", *LATENT_FAMILIES)
"""Families that have the layer behind the others."""


def make_mtp_model(family: str, seed: int, folder: Path, *, is_stacked: bool = False, **sizes: Any) -> None:
    """Save a model of a family with recurrent layers, or of BEHIND, and the layer."""
    if family in LATENT_FAMILIES:
        draw_model(family, seed, **sizes).save_pretrained(folder)
        save_tokenizer(folder, 160)
    elif family == "glm4_moe":
        make_recent_model(family, seed, folder)
    else:
        make_hybrid_model(family, seed, folder, **sizes)
    add_mtp(folder, seed, is_stacked=is_stacked)


def add_mtp(folder: Path, seed: int = 0, *, is_stacked: bool = False) -> None:
    """Add the layer to a model of one of the families with recurrent layers, or of BEHIND. To the latter with
    an embedding and a head like the model's own.

    is_stacked: experts have a tensor for all of them, as the model's other layers have; otherwise one each.
    """
    config = json.loads((folder / "config.json").read_text())
    settings = config.get("text_config", config)
    is_behind = settings["model_type"] in BEHIND
    if settings["model_type"] != "qwen3_next":  # whose published files do not say it
        settings["num_nextn_predict_layers" if is_behind else "mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    shapes = (_shapes_behind if is_behind else _shapes)(settings, is_stacked)
    drawn = {name: _draw(name, shape, generator) for name, shape in shapes.items()}
    stored = load_file(file)
    if is_behind:
        prefix, embedding = _prefix_behind(settings), stored["model.embed_tokens.weight"]
        drawn |= {name: 1 + tensor for name, tensor in drawn.items() if name.endswith("norm.weight")}
        drawn[f"{prefix}embed_tokens.weight"] = embedding.clone()
        drawn[f"{prefix}shared_head.head.weight"] = stored.get("lm_head.weight", embedding).clone()
    save_file(stored | drawn, file, {"format": "pt"})


def make_often_right(folder: Path) -> None:
    """Change the weights of a model with the layer so that its drafts are often right, and often wrong.

    The next token depends mostly on the one before, because layers add little to the residual stream, and the
    layer that drafts hands on the embedding.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensor.mul_(0.05)
    joint = next(name for name in tensors if name.endswith(("mtp.fc.weight", ".eh_proj.weight")))
    prefix, is_behind = joint.removesuffix("fc.weight"), joint.endswith(".eh_proj.weight")
    norm, embedding_norm = f"{prefix}norm.weight", f"{prefix}pre_fc_norm_embedding.weight"
    if is_behind:
        prefix = joint.removesuffix("eh_proj.weight")
        norm, embedding_norm = f"{prefix}shared_head.norm.weight", f"{prefix}enorm.weight"
    identity = torch.eye(tensors[joint].shape[0])
    tensors[joint].mul_(0.1)[:, : len(identity)] += identity
    final_norm = next(name for name in tensors if name.endswith("model.norm.weight"))
    tensors[norm] = tensors[final_norm].clone()
    tensors[embedding_norm].fill_(1.0 if is_behind else 0.0)
    save_file(tensors, file, {"format": "pt"})


def _shapes(settings: dict[str, Any], is_stacked: bool) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = settings["hidden_size"], settings["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_norm.weight": (head_dim,),
        "layers.0.self_attn.k_norm.weight": (head_dim,),
    }
    shapes |= _attention_shapes("layers.0.self_attn", settings, has_gate=True, has_output_bias=True)
    mlp, num_experts = "layers.0.mlp", settings.get("num_experts")
    if num_experts is None:
        shapes |= _mlp(mlp, settings["intermediate_size"], hidden)
    else:
        size = settings["moe_intermediate_size"]
        shapes[f"{mlp}.gate.weight"] = (num_experts, hidden)
        shapes[f"{mlp}.shared_expert_gate.weight"] = (1, hidden)
        shapes |= _mlp(f"{mlp}.shared_expert", settings["shared_expert_intermediate_size"], hidden)
        if is_stacked:
            shapes[f"{mlp}.experts.gate_up_proj"] = (num_experts, 2 * size, hidden)
            shapes[f"{mlp}.experts.down_proj"] = (num_experts, hidden, size)
        for expert in range(0 if is_stacked else num_experts):
            shapes |= _mlp(f"{mlp}.experts.{expert}", size, hidden)
    return {f"mtp.{name}": shape for name, shape in shapes.items()}


def _attention_shapes(
    prefix: str, settings: dict[str, Any], *, has_gate: bool, has_output_bias: bool
) -> dict[str, tuple[int, ...]]:
    """Matrices and biases of attention. has_gate: with those of queries."""
    hidden, head_dim = settings["hidden_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * head_dim, settings["num_key_value_heads"] * head_dim
    projections = {
        "q": ((1 + has_gate) * queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in projections.items():
        shapes[f"{prefix}.{name}_proj.weight"] = shape
        if settings.get("attention_bias") and (name != "o" or has_output_bias):
            shapes[f"{prefix}.{name}_proj.bias"] = shape[:1]
    return shapes


def _prefix_behind(settings: dict[str, Any]) -> str:
    return f"model.layers.{settings['num_hidden_layers']}."


def _shapes_behind(settings: dict[str, Any], is_stacked: bool) -> dict[str, tuple[int, ...]]:
    hidden = settings["hidden_size"]
    num_experts, size = settings["n_routed_experts"], settings["moe_intermediate_size"]
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    if settings["model_type"] in LATENT_FAMILIES:
        shapes |= _latent_shapes(settings)
    else:
        shapes |= _attention_shapes("self_attn", settings, has_gate=False, has_output_bias=False)
        if settings["use_qk_norm"]:
            shapes |= {f"self_attn.{name}_norm.weight": (settings["head_dim"],) for name in "qk"}
    shapes |= {"eh_proj.weight": (hidden, 2 * hidden), "mlp.gate.weight": (num_experts, hidden)}
    shapes["mlp.gate.e_score_correction_bias"] = (num_experts,)
    shapes |= _mlp("mlp.shared_experts", settings["n_shared_experts"] * size, hidden)
    if is_stacked:
        shapes["mlp.experts.gate_up_proj"] = num_experts, 2 * size, hidden
        shapes["mlp.experts.down_proj"] = num_experts, hidden, size
    for expert in range(0 if is_stacked else num_experts):
        shapes |= _mlp(f"mlp.experts.{expert}", size, hidden)
    return {f"{_prefix_behind(settings)}{name}": shape for name, shape in shapes.items()}


def _latent_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    plain, rotated, output, latent, rank = (
        settings[name]
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    )
    shapes: dict[str, tuple[int, ...]] = {}
    projections = {
        "kv_a_proj_with_mqa": (latent + rotated, hidden),
        "kv_b_proj": (heads * (plain + output), latent),
        "o_proj": (hidden, heads * output),
    }
    queries = heads * (plain + rotated)
    if rank is None:
        projections["q_proj"] = queries, hidden
    else:
        projections |= {"q_a_proj": (rank, hidden), "q_b_proj": (queries, rank)}
        shapes["self_attn.q_a_layernorm.weight"] = (rank,)
    shapes["self_attn.kv_a_layernorm.weight"] = (latent,)
    for name, shape in projections.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if settings.get("attention_bias") and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    return shapes


def _mlp(prefix: str, size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (size, hidden),
        f"{prefix}.up_proj.weight": (size, hidden),
        f"{prefix}.down_proj.weight": (hidden, size),
    }


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    deviation = 0.3 if name.endswith("bias") else 0.2
    if len(shape) > 1:
        deviation = 2.0 * shape[-1] ** -0.5
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
