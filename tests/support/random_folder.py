"""Folders of models without weights, for engines with `load="random"`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_zoo import save_tokenizer

__all__ = ["make_random_draft_folder", "make_random_folder"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_random_folder(folder: Path, model_type: str, **fields: Any) -> Path:
    """Write config.json of a medium-sized model, with `fields`, and a tokenizer; returns the folder."""
    config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, config["vocab_size"])
    return folder


def make_random_draft_folder(folder: Path, target: Path, **fields: Any) -> Path:
    """Write config.json of an EAGLE-3 head for a target's folder, with `fields`; returns the folder."""
    shapes = json.loads((target / "config.json").read_text())
    config = shapes | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": shapes["vocab_size"] // 4,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
