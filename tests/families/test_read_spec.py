"""Settings of config.json that are accepted, and errors that name the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_zoo import NUM_MODELS, make_model

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.models.weights import tensor_shapes
from drift_sdk.spec.model import Mlp, Norm
from drift_sdk.spec.rope import FrequencyFactors, LinearScaling, Llama3Scaling, Rope, inverse_frequencies

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
QWEN2: dict[str, Any] = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: dict[str, Any] = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_old_and_new_rope_settings_are_equivalent() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}
    spec = read_spec(old)
    assert spec == read_spec(new)
    assert spec.ropes == (Rope(theta=5e5, rotary_dim=16, scaling=Llama3Scaling(**LLAMA3)),)
    older = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    linear = Rope(theta=10_000.0, rotary_dim=16, scaling=LinearScaling(factor=4.0))
    assert read_spec(older).ropes == (linear,)


@pytest.mark.parametrize("index", range(NUM_MODELS))
def test_frequencies_equal_transformers(index: int, tmp_path: Path) -> None:
    model = make_model(index, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    spec = read_spec(settings, max_model_len=256)
    theirs = model.model.rotary_emb
    for index, layer in enumerate(spec.layers):
        rope = layer.mixer.rope
        if rope is not None:
            kind = f"{model.config.layer_types[index]}_" if hasattr(theirs, "full_attention_inv_freq") else ""
            assert torch.equal(rope.frequencies(), getattr(theirs, f"{kind}inv_freq"))
            assert rope.magnitude == getattr(theirs, f"{kind}attention_scaling")


def test_frequencies_of_llama_3_1_equal_transformers() -> None:
    """With the sizes of Llama 3.1, wavelengths of all three bands occur."""
    settings = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 8192}
    theirs = transformers.LlamaConfig(head_dim=128, rope_parameters=settings)
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs).inv_freq
    spec = read_spec(LLAMA | {"head_dim": 128, "rope_parameters": settings})
    found = spec.ropes[0].frequencies()
    assert torch.equal(found, expected)
    plain = inverse_frequencies(128, 5e5, None)
    ratios = plain / found
    assert ratios.min() == 1.0 and ratios.max() == 8.0 and ((ratios > 1.001) & (ratios < 7.999)).any()
    factors = FrequencyFactors(factors=tuple(ratios.tolist()))
    rtol = 3 * torch.finfo(torch.float32).eps  # two divisions
    torch.testing.assert_close(inverse_frequencies(128, 5e5, factors), expected, rtol=rtol, atol=0)


def test_options_of_families() -> None:
    specs = [read_spec(config) for config in (LLAMA, QWEN2, QWEN3)]
    mixers = [spec.attention for spec in specs]
    assert [mixer.head_dim for mixer in mixers] == [mixer.value_dim for mixer in mixers] == [16, 16, 128]
    assert [mixer.has_bias for mixer in mixers] == [False, True, False]
    assert [mixer.head_norm for mixer in mixers] == [None, None, Norm(1e-5)]
    biased = read_spec(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert biased.attention.has_bias and biased.attention.has_output_bias
    assert {layer.channel for layer in biased.layers} == {Mlp(intermediate_size=96, has_bias=True)}
    assert not mixers[1].has_output_bias
    assert {layer.channel for layer in specs[1].layers} == {Mlp(intermediate_size=96)}
    assert read_spec(LLAMA | {"num_key_value_heads": None}).attention.num_kv_heads == 4


@pytest.mark.parametrize(
    "config",
    [
        QWEN2 | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
        QWEN3 | {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 2},
        LLAMA | {"sliding_window": None},
        LLAMA | {"partial_rotary_factor": 1.0, "rope_scaling": None},
        {key: value for key, value in LLAMA.items() if key != "architectures"},
        {key: value for key, value in LLAMA.items() if key != "model_type"},
    ],
)
def test_settings_without_effect_are_accepted(config: dict[str, Any]) -> None:
    read_spec(config)


@pytest.mark.parametrize(
    "config, message",
    [
        (LLAMA | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        (LLAMA | {"model_type": "qwen3"}, "model_type='qwen3'"),
        (LLAMA | {"architectures": None, "model_type": "gpt2"}, "model_type='gpt2'"),
        ({}, "architectures=None"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA | {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=None is not"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not implemented"),
        (LLAMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not implemented"),
        (LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method='bitsandbytes'"),
        (LLAMA | {"rope_parameters": {"rope_type": "xpos", "factor": 4.0}}, "rope_type='xpos'"),
        (LLAMA | {"rope_scaling": {"type": "xpos", "factor": 2.0}}, "rope_type='xpos'"),
        (LLAMA | {"rope_scaling": {"type": "dynamic"}}, "factor=None in the rope settings"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor=None"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": -1}}, "factor=-1"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}},
            "low_freq_factor=4",
        ),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat set"),
        (LLAMA | {"rope_parameters": {"rope_theta": 0}}, "rope_theta=0"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        (LLAMA | {"head_dim": 7}, "head_dim=7"),
        (LLAMA | {"hidden_size": None}, "hidden_size=None"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (LLAMA | {"vocab_size": True}, "vocab_size=True"),
        (LLAMA | {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        (LLAMA | {"attention_bias": "yes"}, "attention_bias='yes'"),
    ],
)
def test_setting_that_is_not_implemented_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_spec(config)

    assert message in str(caught.value)


ROPE3 = {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 200_000}, "num_hidden_layers=200000: expected an integer from 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": 2**30}, "hidden_size=1073741824: expected an integer from 1 to 16777216"),
        ({"vocab_size": 2**30}, "vocab_size=1073741824"),
        ({"hidden_size": 10**5000}, "hidden_size=<int>"),
        ({"head_dim": 2**24}, "head_dim=16777216: expected an even number of at most 4194304"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: expected a divisor of 4"),
        ({"max_position_embeddings": 1}, "max_position_embeddings=1: expected an integer from 2 to"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.*: expected a number from 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": 0}, "rope_theta=0 in the rope settings: expected a number from 1"),
        ({"rope_theta": False}, "rope_theta=False"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rope_theta": 1e-300}, "rope_theta=1e-300"),
        ({"rope_theta": 1e300}, "rope_theta=1e"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta=0.0"),
        ({"rope_scaling": 7}, "rope settings 7: expected one flat set"),
        ({"rope_scaling": []}, r"rope settings \[\]: expected one flat set"),
        ({"rope_scaling": {"rope_type": ""}}, "rope_type='': expected default"),
        ({"rope_scaling": {"rope_type": []}}, r"rope_type=\[\]: expected default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None in the rope settings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor=-2.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-40}}, "factor=1e-40"),
        ({"rope_scaling": ROPE3 | {"low_freq_factor": None}}, "low_freq_factor=None"),
        ({"rope_scaling": ROPE3 | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0: expected less"),
        ({"rope_scaling": ROPE3 | {"original_max_position_embeddings": 1e300}}, "original_max_position_emb"),
        (
            {"rope_scaling": ROPE3 | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings=0",
        ),
        ({"rope_scaling": {"rope_type": "factors"}}, "rope factors None: expected 8 numbers"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0] * 7 + ["1"]}}, "rope factors .*'1'"),
        (
            {"rope_scaling": {"rope_type": "factors", "factors": [1.0] * 7 + [float("inf")]}},
            "rope factors .*inf",
        ),
        ({"layer_types": 7}, "layer_types=7: expected 2 of"),
        ({"layer_types": [[]]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*: expected 2 of 'full_attention' and"),
        ({"sliding_window": 0}, "sliding_window=0: expected an integer from 1"),
        ({"sliding_window": "4"}, "sliding_window='4'"),
        ({"sliding_window": 4, "use_sliding_window": 1}, "use_sliding_window=1: expected true or false"),
        ({"quantization_config": [1]}, r"quantization_config=\[1\]: expected a mapping"),
        ({"quantization_config": []}, r"quantization_config=\[\]: expected a mapping"),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(LLAMA | changes)


@pytest.mark.parametrize("theta", [1.0, 1e30])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 1e-6},
        {"rope_type": "linear", "factor": 1e30},
        ROPE3 | {"factor": 1e30, "low_freq_factor": 1e-6, "high_freq_factor": 1e30},
        ROPE3 | {"factor": 1e-6, "original_max_position_embeddings": 2**31 - 1},
    ],
)
def test_frequencies_at_the_ends_of_the_ranges_are_finite(
    theta: float, scaling: dict[str, Any] | None
) -> None:
    spec = read_spec(LLAMA | {"head_dim": 256, "rope_theta": theta, "rope_scaling": scaling})
    found = spec.ropes[0].frequencies()
    assert found.isfinite().all() and (found >= 0).all()


def test_shapes_of_the_largest_config() -> None:
    """They take no memory and little time, so that errors about missing tensors come at once."""
    most = {"num_hidden_layers": 1024, "hidden_size": 2**24, "intermediate_size": 2**24, "vocab_size": 2**24}
    heads = {"num_attention_heads": 2**23, "num_key_value_heads": 2**23, "head_dim": 2}
    shapes = tensor_shapes(read_spec(LLAMA | most | heads))
    assert len(shapes) == 9 * 1024 + 3
    assert shapes["model.layers.1023.mlp.down_proj.weight"] == (2**24, 2**24)
