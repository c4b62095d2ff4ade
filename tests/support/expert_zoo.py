"""Small random models with experts, made by transformers and saved as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from model_zoo import save_tokenizer
from safetensors.torch import load_file, save_file

from drift_sdk.loading.stored_formats import dequantise_mxfp4

__all__ = ["EXPERT_MODELS", "QUANTISED", "make_expert_model", "quantise_folder"]

COMMON = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5_000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
GPT_OSS = (transformers.GptOssConfig, transformers.GptOssForCausalLM)
QWEN3_MOE = (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM)
MIXTRAL = (transformers.MixtralConfig, transformers.MixtralForCausalLM)
EXPERT_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt_oss": (
        *GPT_OSS,
        {
            "intermediate_size": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 12,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gpt_oss, other layers": (
        *GPT_OSS,
        {
            "intermediate_size": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "sliding_window": 2,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_parameters": YARN | {"attention_factor": 1.25},
            "attention_bias": False,
            "tie_word_embeddings": True,
            "swiglu_alpha": 1.5,
            "swiglu_limit": 1.0,
        },
    ),
    "qwen3_moe": (
        *QWEN3_MOE,
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3_moe, some MLPs": (
        *QWEN3_MOE,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "mixtral": (*MIXTRAL, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
}
QUANTISED = "gpt_oss"
"""The model that `quantise_folder` can quantise: its sizes are multiples of 32."""


def make_expert_model(name: str, folder: Path) -> Any:
    """Build a model of EXPERT_MODELS, save it to `folder` and return it, in float32 and eval mode."""
    config_class, model_class, fields = EXPERT_MODELS[name]
    with torch.random.fork_rng(devices=[]):
        model = model_class(config_class(**COMMON | fields)).eval()
    for module in model.modules():
        if hasattr(module, "alpha") and hasattr(module, "limit"):
            # Older transformers ignore these two fields of the configuration.
            module.alpha = fields.get("swiglu_alpha", module.alpha)
            module.limit = fields.get("swiglu_limit", module.limit)
    generator = torch.Generator().manual_seed(17_000 + list(EXPERT_MODELS).index(name))
    for parameter_name, parameter in model.named_parameters():
        # gpt-oss stores its experts [in, out], and all other matrices are [out, in].
        is_transposed = parameter.dim() == 3 and model.config.model_type == "gpt_oss"
        _randomise(parameter_name, parameter, parameter.shape[1 if is_transposed else -1], generator)
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)
    return model


@torch.no_grad()
def quantise_folder(model: Any, source: Path, folder: Path) -> None:
    """Replace the experts of a gpt-oss model by random ones in MXFP4, and write them to `folder` beside the
    other weights in `source`."""
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for index, layer in enumerate(model.model.layers):
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{index}.mlp.experts.{projection}"
            num_experts, inner, outer = tensors.pop(name).shape
            shape = num_experts, outer, inner // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = dequantise_mxfp4(blocks, scales, torch.float32).transpose(1, 2)
            getattr(layer.mlp.experts, projection).copy_(values)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    save_tokenizer(folder, config["vocab_size"])


@torch.no_grad()
def _randomise(name: str, parameter: torch.Tensor, inner: int, generator: torch.Generator) -> None:
    """Draw values for a parameter, as in model_zoo. inner: columns of a matrix. Routers have large numbers,
    so that experts differ in weight."""
    if name.endswith("norm.weight"):
        parameter.normal_(1.0, 0.2, generator=generator)
    elif name.endswith("sinks"):
        parameter.normal_(1.0, 1.0, generator=generator)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.3, generator=generator)
    elif "embed_tokens" in name or "lm_head" in name:
        parameter.normal_(0.0, 0.2, generator=generator)
    else:
        gain = 3.0 if ".mlp.gate.weight" in name or "router" in name else 2.0
        parameter.normal_(0.0, gain * inner**-0.5, generator=generator)
