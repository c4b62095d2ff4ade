"""The text part of a model that reads images as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_parity import assert_parity, load_decoder, random_tokens
from model_zoo import random_model, save_tokenizer
from safetensors.torch import load_file, save_file

from drift_sdk.errors import ModelLoadError

TEXT = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 6,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A Gemma 3 with vision, saved to `tmp_path`."""
    config = transformers.Gemma3Config(
        text_config=TEXT,
        vision_config={"model_type": "siglip_vision_model", **VISION},
        mm_tokens_per_image=4,
        image_token_index=299,
        boi_token_index=298,
        eoi_token_index=297,
    )
    text = random_model(transformers.Gemma3ForCausalLM, config.text_config, seed=1)
    with torch.random.fork_rng(devices=[]):
        model = transformers.Gemma3ForConditionalGeneration(config).eval()

    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, TEXT["vocab_size"])
    return model


def _name_of_2025(name: str) -> str:
    """The name of a tensor in the files of the published models."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")

    return name.removeprefix("model.")


@pytest.mark.parametrize("is_old", [False, True])
def test_text_part_equals_transformers(model: Any, is_old: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any("vision_tower" in name for name in tensors)
    if is_old:
        save_file({_name_of_2025(name): tensor for name, tensor in tensors.items()}, file)

    decoder = load_decoder(tmp_path)
    assert decoder.spec.windows == (8, None, 8)
    assert_parity(decoder, model, random_tokens(decoder.spec, 30), (17, 1, 12))


def test_unknown_tensor_beside_the_text_part(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.touch_tower.weight": torch.ones(3)}, file)
    with pytest.raises(ModelLoadError, match="model.touch_tower.weight .*not part of this model"):
        load_decoder(tmp_path)


def test_model_without_its_text_settings(model: Any, tmp_path: Path) -> None:
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"text_config": 7}))
    with pytest.raises(ModelLoadError, match="text_config=7"):
        load_decoder(tmp_path)
