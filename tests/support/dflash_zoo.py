"""Small random DFlash heads in the formats of their publishers, and their formula in float64."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["NUM_HEADS", "DFlashReference", "draw_dflash", "make_dflash"]

NUM_HEADS = 8
"""Seeds whose heads cover every format and option."""


def draw_dflash(seed: int, target: dict[str, Any]) -> dict[str, Any]:
    """The contents of the config.json of a head for a target with these settings."""
    rng = random.Random(f"dflash {seed}")
    num_kv_heads, num_layers = rng.choice([1, 2]), rng.choice([1, 2, 3])
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_kv_heads * rng.choice([2, 3]),
        "num_key_value_heads": num_kv_heads,
        "head_dim": rng.choice([8, 12]),
        "hidden_act": "silu",
        "max_position_embeddings": 16,
        "rms_norm_eps": rng.choice([1e-5, 1e-3]),
        "attention_bias": rng.random() < 0.3,
    }
    if rng.random() < 0.5:
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    else:
        layer["rope_theta"] = 700.0
    if seed % 4 >= 2:
        layer["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"][:num_layers]
        layer["sliding_window"] = rng.choice([3, 9])
    taps = sorted(rng.sample(range(target["num_hidden_layers"]), min(2, target["num_hidden_layers"])))
    size, mask = rng.choice([4, 5, 8]), rng.randrange(target["vocab_size"])
    if seed % 2:
        return {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "speculators_config": {"algorithm": "dflash"},
            "transformer_layer_config": layer,
            "draft_vocab_size": 96,
            "block_size": size,
            "mask_token_id": mask,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
            "sliding_window_non_causal": seed % 4 == 3,
        }

    table: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": taps}
    if seed % 8 == 4:
        table["causal"] = True
    flat = {"architectures": ["DFlashDraftModel"], "num_target_layers": target["num_hidden_layers"], **layer}
    return (
        flat
        | ({"block_size": size} if seed % 4 == 0 else {})
        | {"dflash_config": table if seed % 4 == 0 else table | {"block_size": size}}
    )


def make_dflash(seed: int, folder: Path, target_folder: Path) -> None:
    """Save a head for the target in `target_folder`. The same seed gives the same weights."""
    settings = json.loads((target_folder / "config.json").read_text())
    target = settings.get("text_config", settings)
    config = draw_dflash(seed, target)
    layer = config.get("transformer_layer_config", config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    width, dim, size = layer["hidden_size"], layer["head_dim"], layer["intermediate_size"]
    taps = config.get("aux_hidden_state_layer_ids") or config["dflash_config"]["target_layer_ids"]
    queries, keys = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    shapes = {
        "fc.weight": (width, len(taps) * target["hidden_size"]),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    if "draft_vocab_size" in config:
        number = config["draft_vocab_size"]
        shapes |= {"lm_head.weight": (number, width), "embed_tokens.weight": (target["vocab_size"], width)}
        ids = torch.randperm(target["vocab_size"], generator=generator)[:number].sort().values
        tensors["d2t"] = ids - torch.arange(number)
    for index in range(layer["num_hidden_layers"]):
        prefix = f"layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.post_attention_layernorm.weight": (width,),
            f"{prefix}.self_attn.q_norm.weight": (dim,),
            f"{prefix}.self_attn.k_norm.weight": (dim,),
            f"{prefix}.mlp.gate_proj.weight": (size, width),
            f"{prefix}.mlp.up_proj.weight": (size, width),
            f"{prefix}.mlp.down_proj.weight": (width, size),
        }
        for name, rows, columns in (
            ("q", queries, width),
            ("k", keys, width),
            ("v", keys, width),
            ("o", width, queries),
        ):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, columns)
            if layer["attention_bias"]:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.2 * tensors[name]
        elif name.endswith("bias"):
            tensors[name] *= 0.3
        elif "embed" not in name:
            tensors[name] *= shape[-1] ** -0.5
    save_file(tensors, folder / "model.safetensors")


class DFlashReference:
    """A head of a folder in float64, independent of the implementation.

    taps: the target's layers whose output it takes.
    """

    def __init__(self, folder: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """embedding, head: the target's, for heads without their own."""
        config = json.loads((folder / "config.json").read_text())
        self.shape = config.get("transformer_layer_config", config)
        self.options = config | config.get("dflash_config", {})
        ids = self.options.get("aux_hidden_state_layer_ids")
        self.taps = self.options["target_layer_ids"] if ids is None else [one - 1 for one in ids]
        self.num_masks = self.options["block_size"] - 1
        stored = load_file(folder / "model.safetensors")
        self.w = {name: tensor.double() for name, tensor in stored.items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.head = self.w.get("lm_head.weight", head.double())
        self.ids = torch.arange(len(self.head))
        if "d2t" in stored:
            self.ids = self.ids + stored["d2t"]

    def draft(self, outputs: list[torch.Tensor], anchor: int) -> torch.Tensor:
        """Logits [num_masks, draft_vocab] of the masks behind an anchor. outputs: [N, H] of all layers of the
        target, for the N tokens before the anchor."""
        taken = torch.cat([outputs[tap].double() for tap in self.taps], dim=-1)
        features = self._norm(taken @ self.w["fc.weight"].T, "hidden_norm")
        tokens = [anchor] + [self.options["mask_token_id"]] * self.num_masks
        stream = self.embedding[torch.tensor(tokens)]
        for index in range(self.shape["num_hidden_layers"]):
            prefix = f"layers.{index}"
            x = self._norm(stream, f"{prefix}.input_layernorm")
            stream = stream + self._attention(index, features, x)
            x = self._norm(stream, f"{prefix}.post_attention_layernorm")
            gate, up = (self._project(f"{prefix}.mlp.{name}_proj", x) for name in ("gate", "up"))
            stream = stream + self._project(f"{prefix}.mlp.down_proj", gate * gate.sigmoid() * up)
        return self._norm(stream[1:], "norm") @ self.head.T

    def _attention(self, index: int, features: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        prefix, start = f"layers.{index}.self_attn", len(features)
        num_heads, num_kv_heads = self.shape["num_attention_heads"], self.shape["num_key_value_heads"]
        both = torch.cat((features, x))
        positions = torch.arange(len(both))
        query = self._heads(f"{prefix}.q", x, num_heads, positions[start:])
        key = self._heads(f"{prefix}.k", both, num_kv_heads, positions)
        value = self._project(f"{prefix}.v_proj", both).view(len(both), num_kv_heads, -1)
        is_sliding = self.shape.get("layer_types", ["full_attention"] * 9)[index] == "sliding_attention"
        is_causal = is_sliding and not self.options.get("sliding_window_non_causal")
        heads = []
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            products = query[:, head] @ key[:, shared].T / self.shape["head_dim"] ** 0.5
            for row in range(len(x)):
                for column in range(len(both)):
                    distance = start + row - column
                    is_after = distance < 0 and self.options.get("causal", is_causal)
                    if is_after or (is_sliding and distance >= self.shape["sliding_window"]):
                        products[row, column] = -torch.inf
            heads.append(products.softmax(-1) @ value[:, shared])
        return self._project(f"{prefix}.o_proj", torch.cat(heads, dim=-1))

    def _heads(self, name: str, x: torch.Tensor, number: int, positions: torch.Tensor) -> torch.Tensor:
        heads = self._project(f"{name}_proj", x).view(len(x), number, -1)
        heads = self._norm(heads, f"{name}_norm")
        half = heads.shape[-1] // 2
        theta = self.shape.get("rope_parameters", self.shape)["rope_theta"]
        angles = positions[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = heads[..., :half], heads[..., half:]
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat(turned, dim=-1)

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.w[f"{name}.weight"].T
        return product + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else product

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.shape["rms_norm_eps"]).sqrt()
        return self.w[f"{name}.weight"] * x / scale
