"""Greedy tokens of random models with recurrent layers, equal to those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_parity import (
    MIN_DISTINCT,
    answer,
    length_of,
    load,
    logits_of,
    num_wrong,
    stacked_and_each,
)
from hybrid_zoo import HYBRIDS, make_hybrid_model
from msgspec import structs
from safetensors.torch import load_file, save_file
from slow_cases import slow_after

from drift_sdk import EngineConfig, ModelLoadError, inspect
from drift_sdk.families import read_spec
from drift_sdk.models.channels import ExpertWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.mixers import gated_delta
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights
from drift_sdk.spec.model import Attention, GatedDelta

NUM_MODELS = 16


@pytest.mark.parametrize("seed", slow_after(1, range(NUM_MODELS)))
@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_equal_those_of_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = make_hybrid_model(family, seed, tmp_path)
    token_ids, expected = answer(model, seed)
    assert len(token_ids[length_of(seed) :].unique()) >= MIN_DISTINCT
    assert num_wrong(load(tmp_path), token_ids, expected, seed) == 0


Change = Callable[[Decoder], Decoder]


def _mixers(kind: type, **changes: Any) -> Change:
    def plant(decoder: Decoder) -> Decoder:
        layers = tuple(
            structs.replace(layer, mixer=structs.replace(layer.mixer, **changes))
            if isinstance(layer.mixer, kind)
            else layer
            for layer in decoder.spec.layers
        )
        return Decoder(structs.replace(decoder.spec, layers=layers), decoder.weights)

    return plant


def _weights(change: Callable[[GatedDeltaWeights], GatedDeltaWeights]) -> Change:
    def plant(decoder: Decoder) -> Decoder:
        layers = tuple(
            replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, GatedDeltaWeights) else layer
            for layer in decoder.weights.layers
        )
        return Decoder(decoder.spec, replace(decoder.weights, layers=layers))

    return plant


def _without_shared_gate(decoder: Decoder) -> Decoder:
    layers = [
        replace(layer, channel=replace(layer.channel, shared_gate=None))
        if isinstance(layer.channel, ExpertWeights)
        else layer
        for layer in decoder.weights.layers
    ]
    return Decoder(decoder.spec, replace(decoder.weights, layers=tuple(layers)))


def _whole_rotation(decoder: Decoder) -> Decoder:
    attention = next(layer.mixer for layer in decoder.spec.layers if isinstance(layer.mixer, Attention))
    assert attention.rope is not None
    rope = structs.replace(attention.rope, rotary_dim=attention.head_dim)
    return _mixers(Attention, rope=rope)(decoder)


FAULTS: dict[str, tuple[str, Change]] = {
    "convolution one row off": (
        "qwen3_5",
        _weights(lambda weights: replace(weights, conv=weights.conv.roll(1, -1))),
    ),
    "decay without a step": (
        "qwen3_5",
        _weights(lambda weights: replace(weights, step=weights.step * 0)),
    ),
    "rates and steps exchanged": (
        "qwen3_next",
        _weights(lambda weights: replace(weights, ba=weights.ba.roll(weights.step.shape[0], 0))),
    ),
    "norm with an offset": (
        "qwen3_5_moe",
        _weights(lambda weights: replace(weights, norm=weights.norm + 1)),
    ),
    "no gate of attention": ("qwen3_5", _mixers(Attention, has_gate=False)),
    "no norm of heads": ("qwen3_next", _mixers(Attention, head_norm=None)),
    "rotation of whole heads": ("qwen3_5", _whole_rotation),
    "no gate of the shared expert": ("qwen3_5_moe", _without_shared_gate),
    "order of fused rows": (
        "qwen3_next",
        _weights(lambda weights: replace(weights, qkvz=weights.qkvz.roll(1, 0))),
    ),
}


def _assert_found(
    decoder: Decoder, changed: torch.Tensor, answered: tuple[torch.Tensor, torch.Tensor]
) -> None:
    token_ids, expected = answered
    unchanged = logits_of(decoder, token_ids, [len(token_ids)])
    assert (changed - expected).abs().max() > 100 * (unchanged - expected).abs().max()


@pytest.mark.parametrize("fault", slow_after(3, FAULTS))
def test_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    family, plant = FAULTS[fault]
    found = answer(make_hybrid_model(family, 0, tmp_path), 0)
    decoder = load(tmp_path)
    _assert_found(decoder, logits_of(plant(decoder), found[0], [len(found[0])]), found)


@pytest.mark.parametrize("fault", ["decay of another row", "no decay", "keys of any length", "no scale"])
def test_planted_fault_of_the_rule_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(make_hybrid_model("qwen3_5", 0, tmp_path), 0)
    decoder, solve = load(tmp_path), gated_delta._solve

    def faulty(state, queries, keys, values, rates, decays):
        if fault == "decay of another row":
            decays = decays.roll(1, 0)
        elif fault == "no decay":
            decays = decays * 0
        elif fault == "keys of any length":
            keys = keys * 1.1
        else:
            queries = queries * queries.shape[-1] ** 0.5
        return solve(state, queries, keys, values, rates, decays)

    with monkeypatch.context() as patch:
        patch.setattr(gated_delta, "_solve", faulty)
        changed = logits_of(decoder, found[0], [len(found[0])])
    _assert_found(decoder, changed, found)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_experts_are_read_stacked_and_one_by_one(family: str, tmp_path: Path) -> None:
    make_hybrid_model(family, 0, tmp_path)
    file, token_ids = tmp_path / "model.safetensors", torch.arange(3, 90)
    expected = logits_of(load(tmp_path), token_ids, [87])
    forms = stacked_and_each(load_file(file))
    assert forms[0].keys() != forms[1].keys()
    for tensors in forms:
        save_file(tensors, file)
        assert torch.equal(logits_of(load(tmp_path), token_ids, [87]), expected)


def test_inspection_says_what_is_not_read(tmp_path: Path) -> None:
    make_hybrid_model("qwen3_5_vision", 0, tmp_path)
    info = inspect(tmp_path, EngineConfig(device="cpu"))
    assert info.unread == ("vision",) and not info.reasons
    assert "not read       vision" in info.text()
    assert info.state_bytes and info.num_checkpoints


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("qwen3_next", "linear_num_value_heads", 2**24),
        ("qwen3_next", "linear_value_head_dim", 2**24),
        ("qwen3_next", "linear_num_key_heads", 0),
        ("qwen3_5", "linear_num_key_heads", 7),
        ("qwen3_5", "linear_conv_kernel_dim", 1),
        ("qwen3_5", "attn_output_gate", False),
        ("qwen3_5_moe", "layer_types", ["linear_attention"] * 4),
        ("qwen3_5_moe", "layer_types", ["mamba"]),
    ],
)
def test_settings_that_cannot_be_are_named(family: str, setting: str, value: Any, tmp_path: Path) -> None:
    """Before anything of their size is allocated."""
    make_hybrid_model(family, 0, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=setting):
        read_spec(settings | {setting: value})


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_that_predict_more_tokens_are_not_read(family: str, tmp_path: Path) -> None:
    make_hybrid_model(family, 0, tmp_path)
    file, token_ids = tmp_path / "model.safetensors", torch.arange(3, 40)
    expected, given = logits_of(load(tmp_path), token_ids, [37]), load_file(file)
    save_file({**given, "mtp.fc.weight": torch.ones(3, 3)}, file)
    assert torch.equal(logits_of(load(tmp_path), token_ids, [37]), expected)
    save_file({**given, "other.fc.weight": torch.ones(3, 3)}, file)
    with pytest.raises(ModelLoadError, match=r"other\.fc\.weight"):
        load(tmp_path)


def test_every_fourth_layer_has_attention_without_layer_types() -> None:
    settings = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "max_position_embeddings": 262_144,
        "full_attention_interval": 4,
        "rope_theta": 10_000_000,
    }
    spec = read_spec(settings)
    attention = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mixer, Attention)]
    assert attention == list(range(3, 48, 4))
    assert spec.recurrent_layers == tuple(index for index in range(48) if index not in attention)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, GatedDelta) and mixer.has_fused_qkvz and mixer.has_fused_ba
    assert (mixer.num_key_heads, mixer.num_value_heads, mixer.key_dim, mixer.value_dim) == (16, 32, 128, 128)
