"""Descriptions of Gemma 4, in the forms of published files and of those that transformers writes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_parity import assert_parity, load_decoder, random_tokens
from family_zoo import draw_config
from hybrid_parity import logits_of
from model_zoo import random_model, save_tokenizer
from quantised_files import write_checkpoint
from safetensors.torch import load_file, save_file

from drift_sdk import EngineConfig, ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import tensor_shapes
from drift_sdk.quantised.weight import QuantisedWeight
from drift_sdk.spec.model import Attention, ParallelExperts
from drift_sdk.startup import executor_factory

SLIDING, FULL = "sliding_attention", "full_attention"
COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 262_144,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
SMALL = COMMON | {
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "attention_k_eq_v": False,
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}


def config_of(base: dict[str, Any], period: int = 6, **fields: Any) -> dict[str, Any]:
    """The text part of a config.json in which every layer of a period but the last has a window."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = dict(zip(names, fields.pop("sizes"), strict=True))
    kinds = [FULL if index % period == period - 1 else SLIDING for index in range(sizes["num_hidden_layers"])]
    return base | sizes | {"layer_types": kinds} | fields


PUBLISHED = {
    "31B": config_of(
        COMMON, sizes=(60, 5376, 21504, 32), num_key_value_heads=16, num_global_key_value_heads=4
    ),
    "26B-A4B": config_of(
        COMMON,
        sizes=(30, 2816, 2112, 16),
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "12B": config_of(
        COMMON | {"model_type": "gemma4_unified_text"},
        sizes=(48, 3840, 15360, 16),
        num_key_value_heads=8,
        num_global_key_value_heads=1,
    ),
    "E4B": config_of(SMALL, sizes=(42, 2560, 10240, 8), num_key_value_heads=2, num_kv_shared_layers=18),
    "E2B": config_of(
        SMALL,
        5,
        sizes=(35, 1536, 6144, 8),
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
}
BILLIONS = {"31B": 30.70, "26B-A4B": 25.23, "12B": 11.91, "E4B": 7.46, "E2B": 4.63}
KV_BYTES = {
    "31B": (81_920, 819_200),
    "26B-A4B": (20_480, 204_800),
    "12B": (16_384, 327_680),
    "E4B": (16_384, 40_960),
    "E2B": (6_144, 12_288),
}
"""Of a token in bfloat16: of layers that see all keys, and of those with a window."""


def outer_of(text: dict[str, Any]) -> dict[str, Any]:
    """The whole config.json."""
    name = "Gemma4Unified" if "unified" in text["model_type"] else "Gemma4"
    return {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size: str) -> None:
    spec = read_spec(outer_of(PUBLISHED[size]))
    num_parameters = sum(prod(shape) for shape in tensor_shapes(spec).values())
    assert num_parameters / 1e9 == pytest.approx(BILLIONS[size], abs=0.01)
    by_window = [0, 0]
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention)
        by_window[layer.mixer.window is not None] += 0 if layer.kv is None else 2 * layer.kv.size
    assert tuple(by_window) == KV_BYTES[size]
    assert spec.layers[-1].mixer.window is None
    assert isinstance(spec.layers[0].channel, ParallelExperts) == (size == "26B-A4B")


def test_shared_keys_are_of_the_last_layer_of_a_kind() -> None:
    spec = read_spec(PUBLISHED["E2B"])
    shared = {layer.mixer.kv_of for layer in spec.layers[15:]}
    assert shared == {13, 14}
    assert spec.layers[14].mixer.window is None and spec.layers[13].mixer.window == 512
    assert all(spec.layers[each.mixer.kv_of].mixer.window == each.mixer.window for each in spec.layers[15:])
    assert {layer.channel.intermediate_size for layer in spec.layers[15:]} == {2 * 6144}


def test_heads_as_transformers_writes_them() -> None:
    text = PUBLISHED["26B-A4B"]
    heads = {"head_dim": 512, "num_key_value_heads": 2}
    full = [index for index, kind in enumerate(text["layer_types"]) if kind == FULL]
    own = {name: value for name, value in text.items() if "global" not in name}
    per_layer: dict[str, Any] = {str(index): heads for index in full}
    assert read_spec(own | {"per_layer_config": per_layer}) == read_spec(text)
    for wrong in (
        per_layer | {"0": heads},
        per_layer | {str(full[0]): heads | {"head_dim": 256}},
        {str(index): {"hidden_size": 4} for index in full},
        7,
    ):
        with pytest.raises(ModelLoadError, match="per_layer_config="):
            read_spec(own | {"per_layer_config": wrong})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {FULL: {}}}, "rope_parameters="),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers=35"),
        ({"num_kv_shared_layers": 34}, "num_kv_shared_layers=34: expected a layer of type 'full_attention'"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input=7: expected 262144"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not implemented"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts=None"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts=5"),
        ({"global_head_dim": "x"}, "global_head_dim='x'"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 0}, "num_global_key_value_heads=0"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(PUBLISHED["E2B"] | fields)


@pytest.mark.parametrize("model_type", ["gemma3_text", {"a": 1}, ["gemma4_text"], 5])
@pytest.mark.parametrize(
    "architecture", ["Gemma4ForConditionalGeneration", "Mistral3ForConditionalGeneration"]
)
def test_text_part_of_another_type_is_refused_by_name(architecture: str, model_type: Any) -> None:
    config = outer_of(PUBLISHED["E2B"]) | {"architectures": [architecture]}
    config["text_config"] = config["text_config"] | {"model_type": model_type}
    with pytest.raises(ModelLoadError, match="text_config with model_type=.*: expected one of"):
        read_spec(config)


@pytest.mark.parametrize("size", PUBLISHED)
def test_graphs_compute_all_sizes(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)
    device, spec = torch.device("cuda"), read_spec(PUBLISHED[size])
    assert executor_factory.choose_executor(EngineConfig(), device, spec) == ("graph", None)
    assert executor_factory.choose_executor(EngineConfig(), device, spec, torch.bfloat16) == ("graph", None)
    name, reason = executor_factory.choose_executor(EngineConfig(), device, spec, torch.float32)
    assert name == "eager" and "heads of 512 dimensions in float32" in str(reason)


@pytest.mark.parametrize("kind", ["packed", "fp8, channel"])
def test_quantised_text_part_beside_other_parts(kind: str, tmp_path: Path) -> None:
    """Towers and embedders are quantised or not, which is not looked at."""
    plain, quantised, twin = (tmp_path / name for name in ("plain", "quantised", "twin"))
    sizes = {"hidden_size": 48, "intermediate_size": 40, "hidden_size_per_layer_input": 0}
    config = draw_config("gemma4", 0, num_kv_shared_layers=0, **sizes)
    random_model(transformers.Gemma4ForCausalLM, config, seed=4).save_pretrained(plain)
    write_checkpoint(plain, kind, quantised, twin, ignored=("embed_tokens",))
    file, prefix = quantised / "model.safetensors", "model.language_model."
    tensors = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in load_file(file).items()}
    parts = ("vision_embedder.patch_dense", "embed_vision.projection", "audio_tower.layers.0.q_proj")
    last = ("weight", "weight_packed", "weight_scale")
    spare = {f"model.{part}.{name}": torch.ones(3) for part in parts for name in last}
    save_file(tensors | spare, file)
    text = json.loads((quantised / "config.json").read_text())
    quantisation = text.pop("quantization_config")
    text |= {"model_type": "gemma4_unified_text"}
    outer = outer_of(text) | {"quantization_config": quantisation}
    (quantised / "config.json").write_text(json.dumps(outer))
    source = resolve(quantised)
    spec, token_ids = read_spec(source.config), torch.arange(3, 40)
    stored = Decoder.load(spec, source.tensors(), device="cpu", dtype=torch.float32, form="stored")
    assert isinstance(stored.weights.layers[0].mixer.output, QuantisedWeight)
    assert torch.equal(*(logits_of(each, token_ids, [37]) for each in (stored, load_decoder(twin))))


def test_text_part_beside_other_parts(tmp_path: Path) -> None:
    """Files with towers, and with keys of layers that do not use them."""
    model = random_model(transformers.Gemma4ForCausalLM, draw_config("gemma4", 4), seed=4)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 160)
    file = tmp_path / "model.safetensors"
    prefix = "model.language_model."
    tensors = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in load_file(file).items()}
    parts = "vision_tower.x", "embed_vision", "audio_tower"
    spare = {f"model.{part}.weight": torch.ones(3) for part in parts}
    keys = {f"{prefix}layers.4.self_attn.{part}_proj.weight": torch.ones(2, 2) for part in "kv"}
    save_file(tensors | spare | keys, file)
    decoder = load_decoder(tmp_path)
    assert decoder.spec.layers[4].mixer.kv_of is not None
    assert_parity(decoder, model, random_tokens(decoder.spec, 30), (17, 1, 12))
