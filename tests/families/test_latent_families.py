"""Descriptions of models with latent attention, in the forms of published files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_parity import BLOCK_SIZE, assert_parity, load_decoder, random_tokens, shuffled_blocks
from family_zoo import draw_model
from gguf import GGMLQuantizationType
from model_zoo import save_tokenizer
from msgspec import structs
from safetensors.torch import load_file, save_file

from drift_sdk import (
    ConfigError,
    DynamicTree,
    EngineConfig,
    ModelLoadError,
    PartialVerification,
    Speculation,
)
from drift_sdk._kernels.launch.gpu_limits import limited_gpu
from drift_sdk.execution.forward.caches import PagedKVCache
from drift_sdk.families import gguf_architecture, read_spec
from drift_sdk.loading.gguf_file import GGUFHeader, GGUFTensor, read_gguf_config
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import mtp_shapes
from drift_sdk.models.mixers.latent_attention import LatentWeights
from drift_sdk.models.shard import shard_obstacles
from drift_sdk.models.weights import tensor_shapes
from drift_sdk.quantised.formats import Fp8Weight, quantise_fp8
from drift_sdk.spec.model import Experts, LatentAttention, Mlp, ModelSpec
from drift_sdk.startup import executor_factory
from drift_sdk.startup.model_startup import _choose
from drift_sdk.steps import ExecutorLimits
from perf.cross_compile import GPUS

GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "max_position_embeddings": 163_840,
    "rope_scaling": YARN,
    "rope_theta": 10_000,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "max_position_embeddings": 163_840,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
PUBLISHED = {"GLM-4.7-Flash": GLM_FLASH, "DeepSeek-V3": DEEPSEEK_V3, "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE}
SIZES = {
    "GLM-4.7-Flash": (29.94, 54_144),
    "DeepSeek-V3": (671.0, 70_272),
    "DeepSeek-V2-Lite": (15.71, 31_104),
}
"""Billions of parameters, and bytes of a token in the cache in bfloat16."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    spec = read_spec(PUBLISHED[name])
    num_parameters = sum(prod(shape) for shape in tensor_shapes(spec).values()) / 1e9
    assert num_parameters == pytest.approx(SIZES[name][0], abs=0.05)
    assert sum(2 * layer.kv.size for layer in spec.layers if layer.kv is not None) == SIZES[name][1]
    num_dense = {"DeepSeek-V3": 3}.get(name, 1)
    assert [isinstance(layer.channel, Mlp) for layer in spec.layers[:4]] == [n < num_dense for n in range(4)]


METADATA: dict[str, dict[str, Any]] = {
    "GLM-4.7-Flash": {
        "block_count": 47,
        "context_length": 202_752,
        "embedding_length": 2048,
        "feed_forward_length": 10_240,
        "attention.head_count": 20,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 768,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "rope.freq_base": 1e6,
        "rope.dimension_count": 64,
        "leading_dense_block_count": 1,
        "expert_count": 64,
        "expert_used_count": 4,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 1536,
        "expert_weights_scale": 1.8,
        "expert_weights_norm": True,
    },
    "DeepSeek-V3": {
        "block_count": 61,
        "context_length": 163_840,
        "embedding_length": 7168,
        "feed_forward_length": 18_432,
        "attention.head_count": 128,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.q_lora_rank": 1536,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": 64,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "leading_dense_block_count": 3,
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_group_count": 8,
        "expert_group_used_count": 4,
        "expert_gating_func": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 2048,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    },
    "DeepSeek-V2-Lite": {
        "block_count": 27,
        "context_length": 163_840,
        "embedding_length": 2048,
        "feed_forward_length": 10_944,
        "attention.head_count": 16,
        "attention.head_count_kv": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 192,
        "attention.value_length": 128,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": 64,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        "leading_dense_block_count": 1,
        "expert_count": 64,
        "expert_used_count": 6,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 1408,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": False,
    },
}
"""Of published GGUF files; the one of DeepSeek-V2-Lite was written in 2024."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_metadata_of_published_files_describe_the_models(name: str) -> None:
    """Numbers of the metadata are rounded to float32."""
    values = {
        f"deepseek2.{key}": float(np.float32(value)) if isinstance(value, float) else value
        for key, value in METADATA[name].items()
    }
    metadata = values | {"general.architecture": "deepseek2"}
    config, shape = PUBLISHED[name], (PUBLISHED[name]["vocab_size"], PUBLISHED[name]["hidden_size"])
    shapes = {"token_embd.weight": shape, "output.weight": shape}
    if name != "DeepSeek-V2-Lite":
        shapes["blk.3.exp_probs_b.bias"] = (config.get("n_routed_experts", 64),)
    tensors = {
        tensor: GGUFTensor(shape=shape, quantization=GGMLQuantizationType.F32, offset=0, num_bytes=0)
        for tensor, shape in shapes.items()
    }
    family, architecture = gguf_architecture(metadata, "x.gguf")
    header = GGUFHeader(metadata=metadata, tensors=tensors)
    found = read_spec(read_gguf_config(header, family, architecture, "x.gguf", lambda _: []))
    assert rounded(found) == rounded(read_spec(config | {"num_nextn_predict_layers": 0}))


def rounded(spec: ModelSpec) -> ModelSpec:
    """A model of files without quantised weights, with the numbers of norms and routers in float32."""
    layers = []
    for layer in spec.layers:
        channel = layer.channel
        if isinstance(channel, Experts):
            router = structs.replace(channel.router, scale=np.float32(channel.router.scale))
            channel = structs.replace(channel, router=router)
        norm = structs.replace(layer.norm, eps=np.float32(layer.norm.eps))
        layers.append(structs.replace(layer, channel=channel, norm=norm))
    return structs.replace(spec, layers=tuple(layers), final_norm=layers[0].norm, quantisation=None)


def test_published_attention_and_router() -> None:
    glm, v3, lite = (read_spec(config) for config in PUBLISHED.values())
    mixer, experts = glm.attention, glm.experts
    assert isinstance(mixer, LatentAttention) and isinstance(experts, Experts)
    assert (mixer.head_dim, mixer.value_dim, mixer.query_dim, mixer.output_size) == (576, 512, 256, 5120)
    assert mixer.scale == 256**-0.5 and mixer.rope.theta == 1e6 and mixer.is_interleaved
    assert (experts.router.kind, experts.router.scale, experts.num_active) == ("sigmoid", 1.8, 4)
    magnitude = 0.1 * 3.6888794541139363 + 1  # of ln 40
    assert v3.attention.scale == pytest.approx(192**-0.5 * magnitude**2)
    assert v3.attention.rope.magnitude == 1.0
    router = v3.experts.router
    assert (router.num_groups, router.num_active_groups, router.scale) == (8, 4, 2.5)
    assert isinstance(lite.attention, LatentAttention) and lite.attention.query_rank is None
    assert lite.experts.router.kind == "wide" and lite.experts.shared.intermediate_size == 2816


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("GLM-4.7-Flash", {"scoring_func": "softmax"}, "scoring_func='softmax': expected 'sigmoid'"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types="),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"] * 46 + ["other"]}, "mlp_layer_types="),
        ("GLM-4.7-Flash", {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63: expected an even number"),
        ("GLM-4.7-Flash", {"num_attention_heads": 2**20}, "num_attention_heads=1048576: expected at most"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method='greedy': expected 'noaux_tc'"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq=2: expected 1"),
        ("DeepSeek-V3", {"topk_group": 9}, "topk_group=9"),
        ("DeepSeek-V3", {"num_experts_per_tok": 129}, "num_experts_per_tok=129: expected at most 128"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': expected 'greedy' or"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob=True is not implemented"),
        ("DeepSeek-V2-Lite", {"mlp_bias": True}, "mlp_bias=True is not implemented"),
    ],
)
def test_settings_that_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(PUBLISHED[name] | fields)


def test_what_latents_do_not_have_is_refused_by_name() -> None:
    spec = read_spec(GLM_FLASH)
    assert list(shard_obstacles(spec, 2)) == ["latent attention"]
    speculation = Speculation(draft="head", partial_verification=PartialVerification())
    with pytest.raises(ConfigError, match="partial_verification=.*None for a model with latent attention"):
        executor_factory.check_views(EngineConfig(speculation=speculation), spec)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("GLM-4.7-Flash", {}, None),
        ("DeepSeek-V3", {}, None),
        ("DeepSeek-V2-Lite", {}, None),
        (
            "DeepSeek-V2-Lite",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
            "CUDA graphs do not support groups of experts by a softmax",
        ),
    ],
)
def test_what_graphs_compute(
    name: str, fields: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)
    spec, device = read_spec(PUBLISHED[name] | fields), torch.device("cuda")
    expected = ("graph", None) if reason is None else ("eager", reason)
    assert executor_factory.choose_executor(EngineConfig(), device, spec) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(), None),
        (EngineConfig(speculation=Speculation(draft="head")), None),
        (EngineConfig(kv_dtype="fp8"), None),
        (EngineConfig(fast_prompts=True), "fast_prompts=True: expected False for latent attention"),
        (
            EngineConfig(speculation=Speculation(draft="head", shape=DynamicTree())),
            "expected a Chain for latent attention on CUDA graphs",
        ),
        (EngineConfig(speculation=Speculation(draft="head", checks=True)), "checks=True: expected False"),
    ],
)
def test_what_graphs_refuse(config: EngineConfig, message: str | None) -> None:
    refused = nullcontext() if message is None else pytest.raises(ConfigError, match=message)
    with limited_gpu(GPUS[90]), refused:
        executor_factory.check_attention_room(
            config, read_spec(GLM_FLASH), torch.bfloat16, torch.device("cuda")
        )


def test_gpus_without_room_for_latents_run_them_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that graphs refuse are none of theirs then."""
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)
    (tmp_path / "config.json").write_text(json.dumps(GLM_FLASH))
    source, device = resolve(tmp_path, has_weights=False), torch.device("cuda")
    for capability, form, is_eager in (
        (80, None, False), (89, None, True), (90, None, False), (120, None, True), (89, "fp8", False),
    ):  # fmt: skip
        config = EngineConfig(load="random", kv_dtype=form)
        with limited_gpu(GPUS[capability]):
            chosen = _choose(source, config, device, torch.bfloat16)
            assert chosen.executor_name == ("eager" if is_eager else "graph")
            assert is_eager == ("no room on this GPU for latent attention" in str(chosen.fallback))
            for changes in ({"executor": "graph"}, {"strict_performance": True}) if is_eager else ():
                with pytest.raises(
                    ConfigError, match="no room on this GPU for latent attention: head_dim=576"
                ):
                    _choose(source, config.replace(**changes), device, torch.bfloat16)
            fast = config.replace(fast_prompts=True)
            with nullcontext() if is_eager else pytest.raises(ConfigError, match="fast_prompts=True"):
                _choose(source, fast, device, torch.bfloat16)


def test_keys_of_odd_sizes_are_computed_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)
    spec, device = read_spec(GLM_FLASH | {"qk_rope_head_dim": 60}), torch.device("cuda")
    expected = "eager", "a key takes 1144 bytes, not a multiple of 16"
    assert executor_factory.choose_executor(EngineConfig(), device, spec, torch.bfloat16) == expected


def test_layers_behind_the_last_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layer that predicts one more token, with an embedding and a head of its own."""
    model = draw_model("deepseek_v3", 1)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 160)
    number, file = model.config.num_hidden_layers, tmp_path / "model.safetensors"
    names = ("eh_proj.weight", "shared_head.head.weight", "embed_tokens.weight", "mlp.gate.weight")
    extra = {f"model.layers.{number}.{name}": torch.ones(3, 2) for name in names}
    save_file(load_file(file) | extra, file)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    decoder = load_decoder(tmp_path)
    assert_parity(decoder, model, random_tokens(decoder.spec, 30), (17, 1, 12))
    assert not [record for record in caplog.records if record.name.startswith("drift_sdk")]


@pytest.mark.parametrize("name", ["GLM-4.7-Flash", "DeepSeek-V3"])
def test_the_layer_that_predicts_one_more_token_is_described(name: str) -> None:
    spec = read_spec(PUBLISHED[name])
    layer, number = spec.mtp, spec.num_layers
    assert layer is not None and layer == spec.layers[-1]
    assert isinstance(layer.mixer, LatentAttention) and isinstance(layer.channel, Experts)
    assert spec.names.mtp.prefix == f"model.layers.{number}." == spec.names.unread[0]
    shapes, hidden = mtp_shapes(spec), spec.hidden_size
    assert shapes[f"model.layers.{number}.eh_proj.weight"] == (hidden, 2 * hidden)
    assert f"model.layers.{number}.self_attn.kv_b_proj.weight" in shapes
    assert not any(part in tensor for tensor in shapes for part in ("embed_tokens", "shared_head.head"))
    for changes in ({"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 2}):
        assert read_spec(PUBLISHED[name] | changes).mtp is None


def test_a_dense_decoder_has_experts_in_that_layer() -> None:
    spec = read_spec(GLM_FLASH | {"first_k_dense_replace": 47})
    assert spec.experts is None
    assert spec.mtp is not None and isinstance(spec.mtp.channel, Experts)


EXPANDED = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias")
"""What quantised files have in numbers."""


def make_fp8(folder: Path, seed: int = 1) -> dict[str, torch.Tensor]:
    """Save a model whose matrices are e4m3 in blocks of 128 x 128; returns its tensors in numbers."""
    sizes = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 144}
    heads = {"kv_lora_rank": 136, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 130}
    model = draw_model("deepseek_v3", seed, **sizes, **heads, rope_interleave=True, num_hidden_layers=2)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if any(part in name for part in EXPANDED) or tensor.dim() != 2:
            stored[name] = numbers[name] = tensor
            continue

        weight = quantise_fp8(tensor, (128, 128))
        numbers[name] = weight.dequantise(torch.float32)
        stored |= {name: weight.values, f"{name}_scale_inv": weight.scales}
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = DEEPSEEK_V3["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return numbers


@torch.inference_mode()
def logits_of(decoder: Decoder) -> torch.Tensor:
    cache, tokens = decoder.empty_kv_cache(8, BLOCK_SIZE), random_tokens(decoder.spec, 30)
    batch = AttentionBatch([SequenceRows(shuffled_blocks(8), 0, 30)], cache)
    return decoder.logits(decoder.forward(tokens, batch, cache)[0])


def test_weights_in_blocks_of_e4m3_are_those_in_numbers(tmp_path: Path) -> None:
    """Rows are put in the order of the rotation without a change to blocks."""
    numbers = make_fp8(tmp_path)
    source = resolve(tmp_path)
    spec = read_spec(source.config)
    stored, expanded = (
        Decoder.load(spec, source.tensors(), device="cpu", dtype=torch.float32, form=form)
        for form in ("stored", "expanded")
    )
    assert torch.equal(logits_of(stored), logits_of(expanded))
    weights, others = stored.weights.layers[0].mixer, expanded.weights.layers[0].mixer
    assert isinstance(weights, LatentWeights) and isinstance(weights.query_up, Fp8Weight)
    assert weights.query_up.block == (128, 128)
    up = numbers["model.layers.0.self_attn.kv_b_proj.weight"]
    assert torch.equal(weights.up.flatten(0, 1), up) and torch.equal(others.up, weights.up)
    query = numbers["model.layers.0.self_attn.q_b_proj.weight"].unflatten(0, (2, 192))
    found = weights.query_up.dequantise(torch.float32).unflatten(0, (2, 192))
    assert torch.equal(found[:, :128], query[:, :128])
    assert torch.equal(found[:, 128:160], query[:, 128::2]) and torch.equal(found[:, 160:], query[:, 129::2])


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_latents_in_eight_and_four_bits(form: Any) -> None:
    """The cache has one tensor, and values are read from the codes of keys."""
    model = draw_model("glm4_moe_lite", 1, kv_lora_rank=32, qk_rope_head_dim=16)
    settings = model.config.to_dict() | {"architectures": ["Glm4MoeLiteForCausalLM"]}
    spec = read_spec(settings)
    plain = Decoder.random(spec, device="cpu", dtype=torch.float32, seed=3)
    coded = Decoder.random(spec, device="cpu", dtype=torch.float32, seed=3, kv_form=form)
    cache = coded.empty_kv_cache(2, BLOCK_SIZE)
    assert len(cache.tensors) == 1 and cache.tensors[0].dtype.itemsize == 1
    expected = 2 * BLOCK_SIZE * executor_factory.kv_bytes_per_token(spec, torch.float32, form)
    assert cache.tensors[0].nbytes == expected
    if form == "fp8":  # of the graph executor
        limits = ExecutorLimits(
            vocab_size=160, max_num_seqs=1, max_model_len=64, num_blocks=2, block_size=BLOCK_SIZE
        )
        paged = PagedKVCache(coded, limits)
        paged.allocate(2)
        assert [tensors.keys.nbytes for tensors in paged.groups] == [expected]
        assert paged.layer(1).key_scale is not None and paged.layer(1).value_scale is not None
    keys, slots = torch.randn(5, 1, 48), torch.arange(3, 8)
    cache.store(1, slots, keys, keys[..., :32])
    read_keys, read_values = cache.read(1, slots)
    assert torch.equal(read_keys[..., :32], read_values)
    assert 0 < (read_keys - keys).abs().max() < 0.5
    difference = (logits_of(coded) - logits_of(plain)).abs()
    assert 0 < difference.mean() < {"fp8": 0.15, "nvfp4": 0.5}[form] * logits_of(plain).std()
