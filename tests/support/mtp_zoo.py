"""The layer of a random model with recurrent layers that predicts one more token, in the model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["add_mtp", "make_often_right"]


def add_mtp(folder: Path, seed: int = 0, *, is_stacked: bool = False) -> None:
    """Add the layer to a model of one of the families qwen3_5 and qwen3_5_moe.

    is_stacked: experts have a tensor for all of them, as the model's other layers have; otherwise one each.
    """
    config = json.loads((folder / "config.json").read_text())
    settings = config.get("text_config", config)
    settings["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    drawn = {name: _draw(name, shape, generator) for name, shape in _shapes(settings, is_stacked).items()}
    save_file(load_file(file) | drawn, file, {"format": "pt"})


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
    identity = torch.eye(tensors["mtp.fc.weight"].shape[0])
    tensors["mtp.fc.weight"].mul_(0.1)[:, : len(identity)] += identity
    norm = next(name for name in tensors if name.endswith("model.norm.weight"))
    tensors["mtp.norm.weight"] = tensors[norm].clone()
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
    save_file(tensors, file, {"format": "pt"})


def _shapes(settings: dict[str, Any], is_stacked: bool) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = settings["hidden_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * head_dim, settings["num_key_value_heads"] * head_dim
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
    projections = {
        "q": (2 * queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
    }
    for name, shape in projections.items():
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = shape
        if settings.get("attention_bias"):
            shapes[f"layers.0.self_attn.{name}_proj.bias"] = shape[:1]
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
