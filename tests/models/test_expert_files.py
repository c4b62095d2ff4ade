"""Files of models with experts: settings, names and shapes of tensors, and errors that name what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_parity import load_decoder
from expert_zoo import make_expert_model, quantise_folder
from model_zoo import save_tokenizer
from safetensors.torch import load_file, save_file

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import eos_token_ids, resolve
from drift_sdk.models.channels import ExpertWeights, QuantisedMatrices
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import tensor_shapes, weight_bytes
from drift_sdk.spec.model import ClampedGate, Mlp
from drift_sdk.spec.rope import YarnScaling

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_theta": 150_000,
    "rope_scaling": YARN,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
SIZES = {"20b": (24, 32), "120b": (36, 128)}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts": 8,
    "max_position_embeddings": 128,
}
ORIGINAL_MODULES = {
    "model.embed_tokens": "embedding",
    "model.norm": "norm",
    "lm_head": "unembedding",
    "input_layernorm": "attn.norm",
    "self_attn.o_proj": "attn.out",
    "post_attention_layernorm": "mlp.norm",
    "mlp.router": "mlp.gate",
}
ORIGINAL_TENSORS = {
    "self_attn.sinks": "attn.sinks",
    "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
    "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
    "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    quantise_folder(make_expert_model("gpt_oss", folder), folder, folder / "mxfp4")
    return folder / "mxfp4"


def copied(folder: Path, to: Path, **changes: torch.Tensor) -> Path:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file(tensors, to / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (to / name).write_text((folder / name).read_text())
    return to


@pytest.mark.parametrize("size", SIZES)
def test_tensors_of_both_sizes_of_gpt_oss(size: str) -> None:
    num_layers, num_experts = SIZES[size]
    spec = read_spec(GPT_OSS | {"num_hidden_layers": num_layers, "num_local_experts": num_experts})
    shapes = tensor_shapes(spec)
    assert len(shapes) == 19 * num_layers + 3
    layer = f"model.layers.{num_layers - 1}"
    expected = {
        "mlp.experts.gate_up_proj_blocks": (num_experts, 5760, 90, 16),
        "mlp.experts.gate_up_proj_scales": (num_experts, 5760, 90),
        "mlp.experts.gate_up_proj_bias": (num_experts, 5760),
        "mlp.experts.down_proj_blocks": (num_experts, 2880, 90, 16),
        "mlp.experts.down_proj_scales": (num_experts, 2880, 90),
        "mlp.experts.down_proj_bias": (num_experts, 2880),
        "mlp.router.weight": (num_experts, 2880),
        "mlp.router.bias": (num_experts,),
        "self_attn.sinks": (64,),
        "self_attn.q_proj.bias": (4096,),
        "self_attn.v_proj.weight": (512, 2880),
        "self_attn.o_proj.bias": (2880,),
    }
    assert {name: shapes[f"{layer}.{name}"] for name in expected} == expected
    assert spec.windows == (128, None) * (num_layers // 2)
    # Quantised weights keep their bytes: 17 for 32 numbers.
    experts = num_layers * num_experts * 3 * 2880 * 2880 * 17 // 32
    others = sum(
        math.prod(shape) for name, shape in shapes.items() if not name.endswith(("blocks", "scales"))
    )
    assert weight_bytes(spec, torch.bfloat16) == experts + 2 * others


def test_rotation_of_gpt_oss() -> None:
    spec = read_spec(GPT_OSS | {"num_hidden_layers": 2})
    (rope,) = spec.ropes
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.scaling.first, rope.scaling.last) == pytest.approx((8.0928, 17.3980), abs=1e-4)
    assert rope.magnitude == pytest.approx(1.34657, abs=1e-5)
    theirs = transformers.models.gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding(
        transformers.GptOssConfig(rope_parameters=YARN | {"rope_theta": 150_000.0})
    )
    assert torch.equal(rope.frequencies(), theirs.inv_freq)
    assert rope.magnitude == theirs.attention_scaling
    # The defaults of gpt-oss are those of its files.
    fewer = {name: value for name, value in GPT_OSS.items() if name not in ("rope_theta", "rope_scaling")}
    assert read_spec(fewer | {"num_hidden_layers": 2}) == spec


def test_ends_of_original_files(tmp_path: Path) -> None:
    """Those of generation_config.json of gpt-oss-20b, as long as the vocabulary is that of gpt-oss."""
    marks = {"experts_per_token": 4, "initial_context_length": 4096, "rope_ntk_alpha": 1}
    for vocab_size, ends, expected in (
        (201_088, {}, (200_002, 199_999, 200_012)),
        (201_088, {"eos_token_id": 7}, (7,)),
        (300, {}, ()),
    ):
        (tmp_path / "config.json").write_text(json.dumps(marks | {"vocab_size": vocab_size} | ends))
        assert eos_token_ids(resolve(tmp_path), vocab_size) == expected


def test_original_files_equal_those_of_hugging_face(quantised: Path, tmp_path: Path) -> None:
    tensors = load_file(quantised / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        suffix = "scale" if module.endswith("norm") else suffix
        if not name.startswith("model.layers."):
            renamed[f"{ORIGINAL_MODULES[module]}.{suffix}"] = tensor
            continue

        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module = rest.rpartition(".")[0]
        if rest in ORIGINAL_TENSORS:
            renamed[f"block.{layer}.{ORIGINAL_TENSORS[rest]}"] = tensor
        elif module in ORIGINAL_MODULES:
            renamed[f"block.{layer}.{ORIGINAL_MODULES[module]}.{suffix}"] = tensor
        elif ".q_proj." in rest:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            renamed[f"block.{layer}.attn.qkv.{suffix}"] = torch.cat(parts)
    save_file(renamed, tmp_path / "model.safetensors")
    rope = config["rope_parameters"]
    original = {
        "num_hidden_layers": config["num_hidden_layers"],
        "num_experts": config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        **{name: config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
        **{name: config[name] for name in ("num_attention_heads", "num_key_value_heads", "sliding_window")},
        "swiglu_limit": 7.0,
        "initial_context_length": rope["original_max_position_embeddings"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling_factor": rope["factor"],
        "rope_ntk_alpha": rope["beta_slow"],
        "rope_ntk_beta": rope["beta_fast"],
    }
    (tmp_path / "config.json").write_text(json.dumps(original))
    save_tokenizer(tmp_path, config["vocab_size"])
    assert read_spec(resolve(tmp_path).config).max_position_embeddings == 131_072
    found, expected = load_decoder(tmp_path), load_decoder(quantised)
    assert found.spec.ropes == expected.spec.ropes
    assert found.spec.experts == expected.spec.experts
    assert torch.equal(found.weights.embedding, expected.weights.embedding)
    assert torch.equal(found.weights.head, expected.weights.head)
    for ours, theirs in zip(found.weights.layers, expected.weights.layers, strict=True):
        for name in ("mixer_norm", "channel_norm"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for name in ("qkv", "qkv_bias", "output", "output_bias", "sinks"):
            assert torch.equal(getattr(ours.mixer, name), getattr(theirs.mixer, name)), name
        for name in ("router", "router_bias", "gate_up_bias", "down_bias"):
            assert torch.equal(getattr(ours.channel, name), getattr(theirs.channel, name)), name
        for name in ("gate_up", "down"):
            mine, other = getattr(ours.channel, name), getattr(theirs.channel, name)
            assert torch.equal(mine.blocks, other.blocks) and torch.equal(mine.scales, other.scales)


def test_scales_of_numbers_that_are_not_finite_are_rejected(quantised: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(quantised / "model.safetensors")[name]
    scales[2, 3, 1] = 255
    folder = copied(quantised, tmp_path, **{name: scales})
    with pytest.raises(ModelLoadError, match="scale 255, expected at most 252") as caught:
        load_decoder(folder)
    assert name in str(caught.value) and "model.safetensors" in str(caught.value)


def test_blocks_of_another_type_are_rejected(quantised: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    blocks = load_file(quantised / "model.safetensors")[name]
    folder = copied(quantised, tmp_path, **{name: blocks.to(torch.float32)})
    with pytest.raises(ModelLoadError, match=f"{name} is stored as torch.float32, expected uint8"):
        load_decoder(folder)


def test_quantised_experts_are_rejected_in_float16(quantised: Path) -> None:
    with pytest.raises(ModelLoadError, match="MXFP4 weights in float16: expected bfloat16 or float32"):
        load_decoder(quantised, torch.float16)


def test_random_quantised_weights_have_the_scale_of_others() -> None:
    changes = {"num_hidden_layers": 2, "num_local_experts": 4, "vocab_size": 50}
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    spec = read_spec(GPT_OSS | changes | small)
    first, again = (Decoder.random(spec, device="cpu", dtype=torch.float32, seed=3) for _ in range(2))
    for layer, same in zip(first.weights.layers, again.weights.layers, strict=True):
        experts = layer.channel
        assert isinstance(experts, ExpertWeights) and isinstance(same.channel, ExpertWeights)
        for matrices, twin, inner in (
            (experts.gate_up, same.channel.gate_up, 64),
            (experts.down, same.channel.down, 96),
        ):
            assert isinstance(matrices, QuantisedMatrices) and isinstance(twin, QuantisedMatrices)
            assert torch.equal(matrices.blocks, twin.blocks)
            assert len(matrices.blocks.unique()) == 256
            # Powers of two: at most a factor of sqrt(2) beside 1 / sqrt(inner), for a deviation of 2.93.
            scale = 2.0 ** (int(matrices.scales[0, 0, 0]) - 127)
            assert 0.7 < 2.926 * scale * inner**0.5 < 1.42


def test_settings_of_experts() -> None:
    plain = read_spec(QWEN3_MOE)
    assert plain.experts is not None
    assert (plain.experts.num_experts, plain.experts.num_active) == (8, 8)
    assert not plain.experts.router.is_normalised
    assert {layer.channel for layer in plain.layers} == {plain.experts}
    assert all(layer.mixer.head_norm is not None for layer in plain.layers)
    some = read_spec(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True})
    assert some.experts is not None and some.experts.router.is_normalised
    assert [layer.channel == some.experts for layer in some.layers] == [False, False, False, True]
    mlp = Mlp(intermediate_size=QWEN3_MOE["intermediate_size"])
    assert [layer.channel for layer in some.layers[:3]] == [mlp] * 3
    # Files of transformers 5 have the other name.
    renamed = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    assert read_spec(renamed | {"num_local_experts": 8}) == plain
    gpt_oss = read_spec(GPT_OSS | {"num_hidden_layers": 2, "swiglu_limit": None})
    assert gpt_oss.experts is not None
    assert gpt_oss.experts.clamped_gate == ClampedGate(alpha=1.702, limit=7.0)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9: expected an integer from 1 to 8"),
        (QWEN3_MOE, {"num_experts": 5000}, "num_experts=5000: expected an integer from 1 to 1024"),
        (
            QWEN3_MOE,
            {"num_experts": 65, "num_hidden_layers": 1024},
            "num_experts=65: expected an integer from 1 to 64",
        ),
        (QWEN3_MOE, {"mlp_only_layers": ["x"]}, r"mlp_only_layers=\['x'\]: expected numbers of layers"),
        (QWEN3_MOE, {"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh': expected 'silu' for experts"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0: expected an integer from 1"),
        (
            QWEN3_MOE,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "'mxfp4': expected one of 'fp8', .* for",
        ),
        (GPT_OSS, {"hidden_size": 2864}, "hidden_size=2864: expected a multiple of 32 for MXFP4 experts"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit=0: expected a number from 0.001"),
        (GPT_OSS, {"quantization_config": {"quant_method": "awq"}}, "'awq': expected 'mxfp4' for this arch"),
        (GPT_OSS, {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast=0.5: expected at least beta_slow"),
        (GPT_OSS, {"rope_scaling": YARN | {"truncate": 1}}, "truncate=1: expected true or false"),
        (GPT_OSS, {"rope_scaling": {"rope_type": "yarn"}}, "factor=None in the rope settings"),
        (GPT_OSS, {"rope_theta": 1.0}, "rope_theta=1.0: expected more than 1 for YaRN"),
    ],
)
def test_settings_that_are_rejected(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec({"num_hidden_layers": 2} | config | changes)
