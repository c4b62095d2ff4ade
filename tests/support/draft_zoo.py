"""Small random EAGLE-3 drafts in every format and variant, for targets of the model zoo."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors.torch import save_file

__all__ = ["VARIANTS", "make_draft"]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


class Variant(Struct, frozen=True, kw_only=True):
    """The format of a draft's files, and settings of its config besides the shapes.

    file:              "bin", "legacy bin" (no zip archive), "safetensors" or "shards".
    draft_vocab_size:  None for the whole vocabulary, without d2t and t2d.
    layer:             settings of the Llama layer.
    options:           settings of the draft.
    eagle:             settings of its eagle_config.
    """

    architecture: str = "LlamaForCausalLMEagle3"
    file: str = "safetensors"
    first_layer: str = "midlayer"
    is_nested: bool = False
    draft_vocab_size: int | None = 96
    vocab_key: str = "draft_vocab_size"
    hidden_size: int | None = None
    num_layers: int = 1
    num_features: int = 3
    has_head: bool = True
    has_embedding: bool = False
    has_marks: bool = True
    has_masks: bool = False
    layer: dict[str, Any] = {}
    options: dict[str, Any] = {}
    eagle: dict[str, Any] | None = None


WINDOWED = {"model_type": "qwen3", "sliding_window": 5, "use_sliding_window": True}

VARIANTS = {
    "reference": Variant(architecture="LlamaForCausalLM", file="bin"),
    "legacy": Variant(architecture="LlamaForCausalLM", file="legacy bin", has_marks=False),
    "specforge": Variant(
        layer={"rope_theta": 500.0, "head_dim": 10}, eagle={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    ),
    "speculators": Variant(
        architecture="Eagle3Speculator",
        is_nested=True,
        first_layer="layers.0",
        has_embedding=True,
        options={"speculators_model_type": "eagle3", "speculators_config": {"algorithm": "eagle3"}},
    ),
    "speculators after": Variant(
        architecture="Eagle3DraftModel",
        is_nested=True,
        first_layer="layers.0",
        options={"norm_before_residual": False},
    ),
    "flat before": Variant(
        architecture="Eagle3LlamaForCausalLM", first_layer="layers.0", options={"norm_before_residual": True}
    ),
    "narrow": Variant(hidden_size=40, has_embedding=True),
    "norm before fc": Variant(
        eagle={
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "use_aux_hidden_state": True,
            "next_layer_regular": True,
            "use_mtp_layernorm": False,
        }
    ),
    "fc norm": Variant(options={"fc_norm": True}, num_features=2, eagle={"num_aux_hidden_states": 2}),
    "fc norm and output norm": Variant(options={"fc_norm": True, "norm_output": True}),
    "post norm": Variant(eagle={"return_hidden_post_norm": True}),
    "final hidden": Variant(
        draft_vocab_size=None,
        has_head=False,
        num_features=0,
        layer={"rms_norm_eps": 0.1},
        eagle={"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []},
    ),
    "ids only": Variant(has_head=False),
    "whole vocabulary": Variant(draft_vocab_size=None, layer={"tie_word_embeddings": True}),
    "tied": Variant(
        draft_vocab_size=None, has_head=False, has_embedding=True, layer={"tie_word_embeddings": True}
    ),
    "deep": Variant(file="shards", num_layers=3, first_layer="layers.0", vocab_key="truncated_vocab_size"),
    "biased": Variant(
        layer={"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3, "rope_theta": 100.0}
    ),
    "peagle": Variant(
        architecture="PEagleDraftModel",
        is_nested=True,
        first_layer="layers.0",
        num_layers=2,
        has_embedding=True,
        has_masks=True,
        options={
            "speculators_model_type": "peagle",
            "speculators_config": {"algorithm": "peagle"},
            "mask_token_id": 7,
        },
    ),
    "windowed": Variant(
        architecture="Eagle3Speculator",
        is_nested=True,
        first_layer="layers.0",
        num_layers=2,
        num_features=2,
        layer=WINDOWED | {"layer_types": ["sliding_attention"] * 2},
        options={"speculators_model_type": "eagle3", "norm_output": True},
    ),
    "windowed peagle": Variant(
        architecture="PEagleSpeculator",
        is_nested=True,
        first_layer="layers.0",
        has_embedding=True,
        has_masks=True,
        layer=WINDOWED | {"layer_types": ["sliding_attention"]},
        options={"speculators_model_type": "peagle", "mask_token_id": 7},
    ),
    "flat peagle": Variant(
        has_embedding=True,
        has_masks=True,
        options={"pard_token": 11, "norm_before_fc": True, "norm_before_residual": True},
    ),
}


def make_draft(name: str, folder: Path, target_folder: Path) -> None:
    """Save the draft `name` for the target in `target_folder`. The same name gives the same weights."""
    variant = VARIANTS[name]
    target = json.loads((target_folder / "config.json").read_text())
    layer = {
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "hidden_size": variant.hidden_size or target["hidden_size"],
        "intermediate_size": 56,
        "num_hidden_layers": variant.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "hidden_act": "silu",
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        **variant.layer,
    }
    config: dict[str, Any] = {"architectures": [variant.architecture], **variant.options}
    if variant.num_features == 2:
        config["eagle_aux_hidden_state_layer_ids"] = [0, 2]

    if variant.hidden_size is not None:
        config["target_hidden_size"] = target["hidden_size"]

    if variant.draft_vocab_size is not None or variant.has_head:
        config[variant.vocab_key] = variant.draft_vocab_size

    if variant.eagle is not None:
        config["eagle_config"] = variant.eagle

    if variant.is_nested:
        config["transformer_layer_config"] = layer
    else:
        config |= layer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shapes = _shapes(variant, layer, target["hidden_size"], config)
    tensors = {tensor: _random(tensor, shape, generator) for tensor, shape in shapes.items()}
    if variant.draft_vocab_size is not None:
        ids = (
            torch.randperm(target["vocab_size"], generator=generator)[: variant.draft_vocab_size]
            .sort()
            .values
        )
        tensors["d2t"] = ids - torch.arange(len(ids))
        if variant.has_marks:
            tensors["t2d"] = torch.zeros(target["vocab_size"], dtype=torch.bool).scatter_(0, ids, True)

    _save(variant.file, folder, tensors)


def _shapes(
    variant: Variant, layer: dict[str, Any], target_hidden: int, config: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    hidden, size, head_dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * head_dim, layer["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,)}
    options = config | (variant.eagle or {})
    if variant.num_features:
        shapes["fc.weight"] = (hidden, variant.num_features * target_hidden)

    if variant.has_masks:
        shapes["mask_hidden"] = (1, 1, variant.num_features * target_hidden)

    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (variant.num_features * target_hidden,)

    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(variant.num_features)}

    if variant.has_head:
        shapes["lm_head.weight"] = (variant.draft_vocab_size or layer["vocab_size"], hidden)

    if variant.has_embedding:
        shapes["embed_tokens.weight"] = (layer["vocab_size"], hidden)

    for index in range(variant.num_layers):
        prefix = variant.first_layer if index == 0 else f"layers.{index}"
        width = 2 * hidden if index == 0 else hidden
        projections = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (size, hidden),
            "mlp.up_proj": (size, hidden),
            "mlp.down_proj": (hidden, size),
        }
        if layer["model_type"] == "qwen3":
            shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}

        for module, shape in projections.items():
            shapes[f"{prefix}.{module}.weight"] = shape
            if layer.get("mlp_bias" if module.startswith("mlp") else "attention_bias"):
                shapes[f"{prefix}.{module}.bias"] = shape[:1]

        norms = ["input_layernorm", "post_attention_layernorm"] + ["hidden_norm"] * (index == 0)
        shapes |= {f"{prefix}.{norm}.weight": (hidden,) for norm in norms}

    return shapes


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(shape)
    if name.endswith("bias"):
        return tensor.normal_(0.0, 0.3, generator=generator)

    if len(shape) == 1:
        return tensor.normal_(1.0, 0.2, generator=generator)

    # The target's residual stream is several times larger than one, and that of the draft grows by the output
    # of its layers each time it is fed back. Small gains keep both near one, so that an absolute tolerance
    # means the same for every variant.
    gains = {"fc.": 0.3, "q_proj": 1.5, "k_proj": 1.5, "o_proj": 0.5, "down_proj": 0.5}
    gain = next((gain for part, gain in gains.items() if part in name), 1.0)
    return tensor.normal_(0.0, gain * shape[1] ** -0.5, generator=generator)


def _save(file: str, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    if file in ("bin", "legacy bin"):
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=file == "bin")
    elif file == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
        for shard in set(places.values()):
            part = {name: tensors[name] for name, place in places.items() if place == shard}
            save_file(part, folder / shard)

        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
