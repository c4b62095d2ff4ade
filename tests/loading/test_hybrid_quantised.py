"""Quantised files of models with recurrent layers give the logits of the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_parity import load, logits_of, stacked_and_each
from hybrid_zoo import make_hybrid_model
from quantised_files import FORMATS, write_checkpoint
from safetensors.torch import load_file, save_file
from slow_cases import slow_after

from drift_sdk import ModelLoadError
from drift_sdk.models.channels import ExpertWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights
from drift_sdk.quantised.formats import Fp8Weight
from drift_sdk.quantised.weight import QuantisedWeight, StackedWeight

SIZES = {
    "hidden_size": 160,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERT_SIZES = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
IGNORED = ("lm_head", "embed_tokens", "in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate", ".visual.")
"""Not quantised in published files."""
BLOCKS = "fp8, blocks of 128"
KINDS = (BLOCKS, "fp8, channel", "nvfp4", "nvfp4, modelopt", "awq", "gptq", "packed")
PROMPT = torch.arange(3, 90)


def write(family: str, folder: Path, kind: str = BLOCKS, *more: str) -> None:
    """A model, the same with quantised weights, and with their numbers. more: parts of the names of other
    matrices that are not quantised."""
    has_experts = family in ("qwen3_5_moe", "qwen3_next")
    make_hybrid_model(family, 0, folder / "plain", **SIZES | (EXPERT_SIZES if has_experts else {}))
    file = folder / "plain" / "model.safetensors"
    if has_experts:
        save_file(stacked_and_each(load_file(file))[1], file)
    write_checkpoint(folder / "plain", kind, folder / "quantised", folder / "twin", ignored=(*IGNORED, *more))


def logits(decoder: Decoder) -> torch.Tensor:
    return logits_of(decoder, PROMPT, [40, 1, 46])


def mixers(decoder: Decoder, kind: type = GatedDeltaWeights) -> list[Any]:
    return [layer.mixer for layer in decoder.weights.layers if isinstance(layer.mixer, kind)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", slow_after(1, ["qwen3_5_moe", "qwen3_5", "qwen3_next"]))
def test_logits_are_those_of_the_numbers(family: str, kind: str, tmp_path: Path) -> None:
    write(family, tmp_path, kind)
    expected = logits(load(tmp_path / "twin"))
    assert torch.equal(logits(load(tmp_path / "quantised")), expected)
    stored = load(tmp_path / "quantised", "stored")
    assert torch.equal(logits(stored), expected)
    for layer in stored.weights.layers:
        for name, matrix in layer.mixer.matrices.items():
            is_whole = isinstance(matrix, QuantisedWeight) and not isinstance(matrix, StackedWeight)
            assert is_whole == (name != "ba")
        if isinstance(layer.channel, ExpertWeights):
            assert isinstance(layer.channel.gate_up, tuple) and isinstance(layer.channel.down, tuple)
            assert all(isinstance(each, QuantisedWeight) for each in layer.channel.gate_up)


def test_blocks_are_stacked_as_they_are(tmp_path: Path) -> None:
    write("qwen3_5_vision", tmp_path)
    stored = load(tmp_path / "quantised", "stored")
    assert torch.equal(logits(stored), logits(load(tmp_path / "twin")))
    for mixer in mixers(stored):
        assert isinstance(mixer.qkvz, Fp8Weight)
        assert mixer.qkvz.block == (128, 128) and mixer.qkvz.scales.shape == (3, 2)


@pytest.mark.parametrize("kind", [BLOCKS, "gptq"])
@pytest.mark.parametrize("plain", ["q_proj", "k_proj", "v_proj", "in_proj_qkv.", "in_proj_z"])
def test_the_rest_of_a_matrix_stays_quantised(plain: str, kind: str, tmp_path: Path) -> None:
    """Also where rows of queries and gates are put in order."""
    write("qwen3_5", tmp_path, kind, plain)
    stored = load(tmp_path / "quantised", "stored")
    assert torch.equal(logits(stored), logits(load(tmp_path / "twin")))
    found = [matrix for mixer in mixers(stored, object) for matrix in mixer.matrices.values()]
    stacked = [matrix for matrix in found if isinstance(matrix, StackedWeight)]
    assert stacked
    for matrix in stacked:
        assert {isinstance(part, QuantisedWeight) for part in matrix.parts} == {False, True}


def test_stacked_experts_beside_quantised_projections(tmp_path: Path) -> None:
    """As tools leave them that know no modules but linear ones."""
    write("qwen3_5_moe", tmp_path, BLOCKS, ".mlp.experts.")
    for name in ("quantised", "twin"):
        file = tmp_path / name / "model.safetensors"
        tensors = load_file(file)
        experts = {each: tensor for each, tensor in tensors.items() if ".mlp.experts." in each}
        rest = {each: tensor for each, tensor in tensors.items() if each not in experts}
        save_file(rest | stacked_and_each(experts)[0], file)
    stored = load(tmp_path / "quantised", "stored")
    assert torch.equal(logits(stored), logits(load(tmp_path / "twin")))
    assert all(isinstance(layer.channel.gate_up, torch.Tensor) for layer in stored.weights.layers)


QKV = "model.layers.0.linear_attn.in_proj_qkv"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "weight_scale_inv",
            lambda scales: scales[:1],
            r"weight_scale_inv has shape \[1, 2\], expected \[2, 2\]",
        ),
        ("weight_scale_inv", lambda scales: scales * torch.nan, "weight_scale_inv has NaN or infinity"),
        ("weight_scale_inv", lambda scales: None, "weight_scale_inv is missing"),
        ("weight", lambda codes: None, "in_proj_qkv.weight of shape .* is missing"),
        (
            "weight",
            lambda codes: codes[:128],
            r"in_proj_qkv.weight has shape \[128, 160\], expected \[256, 160\]",
        ),
    ],
)
def test_broken_files_are_named(part: str, change: Any, message: str, tmp_path: Path) -> None:
    write("qwen3_5", tmp_path)
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(f"{QKV}.{part}"))
    save_file(tensors | ({} if changed is None else {f"{QKV}.{part}": changed.contiguous()}), file)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(tmp_path / "quantised", "stored")
    assert str(tmp_path) in str(caught.value)


def test_the_setting_of_modules_that_are_not_quantised_has_no_effect(tmp_path: Path) -> None:
    """Files tell."""
    write("qwen3_5", tmp_path)
    file = tmp_path / "quantised" / "config.json"
    settings = json.loads(file.read_text())
    expected = logits(load(tmp_path / "quantised"))
    settings["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.linear_attn.in_proj_b"]
    file.write_text(json.dumps(settings))
    assert torch.equal(logits(load(tmp_path / "quantised")), expected)
    assert set(FORMATS[BLOCKS].config) <= set(settings["quantization_config"])
