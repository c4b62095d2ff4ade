"""Published shapes of the models that are measured, as their config.json names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DRAFTS", "PUBLISHED", "in_fp8_blocks"]

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA_3 = LLAMA | {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LLAMA_3_2 = LLAMA_3 | {
    "tie_word_embeddings": True,
    "rope_scaling": LLAMA_3["rope_scaling"] | {"factor": 32.0},
}
QWEN_2_5 = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
}
QWEN_3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
}
SMOLLM_2 = LLAMA | {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
}
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "initial_context_length": 4096,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
QWEN3_5 = COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "attention_bias": False,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
}
GLM_4_7_FLASH = COMMON | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "max_position_embeddings": 202_752,
    "rope_theta": 1_000_000.0,
}
DEEPSEEK_V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GEMMA_4 = COMMON | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GEMMA_4_12B = GEMMA_4 | {
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": LLAMA_3
    | {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-3.2-1b": LLAMA_3_2
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "llama-3.2-3b": LLAMA_3_2
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
    },
    "llama-2-7b": LLAMA
    | {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
    },
    "qwen2.5-3b": QWEN_2_5
    | {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": QWEN_2_5
    | {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-0.6b": QWEN_3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": QWEN_3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": QWEN_3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "smollm2-135m-random": SMOLLM_2 | {"num_hidden_layers": 30, "tie_word_embeddings": True},
    "smollm2-shapes": SMOLLM_2 | {"num_hidden_layers": 6},
    "tiny": LLAMA
    | {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
    },
    "gemma-3-27b": COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262_208,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "gemma-4-31b": GEMMA_4
    | {
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "gemma-4-26b-a4b": GEMMA_4
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "gemma-4-12b": GEMMA_4_12B,
    "gemma-4-shapes": GEMMA_4_12B | {"num_hidden_layers": 6},
    "gpt-oss-120b": GPT_OSS
    | {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "gpt-oss-20b": GPT_OSS
    | {
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "qwen3-30b-a3b": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3.5-0.8b": QWEN3_5
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3.6-27b": QWEN3_5
    | {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.6-35b-a3b": QWEN3_5
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "glm-4.7-flash": GLM_4_7_FLASH,
    # One layer with an MLP and three with experts: what a GPU of 141 GB holds in bfloat16.
    "deepseek-v3-4-layers": DEEPSEEK_V3 | {"num_hidden_layers": 4, "first_k_dense_replace": 1},
    "deepseek-v2-lite": COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163_840,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "tiny-hybrid": QWEN3_5
    | {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 1024,
    },
    "tiny-experts": GPT_OSS
    | {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}

DRAFTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"intermediate_size": 17_280, "max_position_embeddings": 65_536},
    "qwen3_moe": {},
    "qwen3_5_moe_text": {"intermediate_size": 6144},
}
"""Settings of a published EAGLE-3 draft that differ from those of its target, by the target's model_type."""

ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
NOT_IN_BLOCKS = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", *ROUTERS)
"""Matrices of a layer that published files in blocks of FP8 have in bfloat16."""


def in_fp8_blocks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model whose layers are published in FP8, with a scale for 128 rows and columns.

    Raises ValueError for a model that is quantised in another way.
    """
    if "quantization_config" in settings:
        raise ValueError("fp8-blocks: expected a model whose published weights are not quantised")

    layers = range(settings["num_hidden_layers"])
    quantisation = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            "mtp.fc",
            *(f"mtp.layers.0.{name}" for name in ROUTERS),
            *(f"model.layers.{index}.{name}" for index in layers for name in NOT_IN_BLOCKS),
        ],
    }
    return {**settings, "quantization_config": quantisation}
