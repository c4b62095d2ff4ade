"""The config.json of a model and of a draft, with any value in any setting."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from drift_sdk.families import read_spec
from drift_sdk.models.dflash import DFlashConfig, read_head_config
from drift_sdk.spec.rope import Rope

ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
FAMILIES: tuple[dict[str, Any], ...] = (
    {},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16},
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True},
    {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.5},
    {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 16},
    {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {name: value for name, value in MODEL.items() if name != "architectures"}
        | {"model_type": "gemma3_text"},
    },
    {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1]},
    {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 2.0},
    {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 2},
    {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
    {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 16},
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "q_lora_rank": 16,
    },
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
    },
    {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
    },
    {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {name: value for name, value in MODEL.items() if name != "architectures"}
        | {"model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"vocab_size_per_layer_input": 100, "per_layer_config": {"3": {"head_dim": 32}}},
    },
)
DRAFT: dict[str, Any] = MODEL | {"num_hidden_layers": 1, "draft_vocab_size": 50}
LAYER = {name: value for name, value in MODEL.items() if name != "architectures"}
LAYER |= {"model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 16}
DFLASH: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": 4, "mask_token_id": 7}
HEADS: tuple[dict[str, Any], ...] = (
    DRAFT,
    {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": LAYER | {"sliding_window": 8, "use_sliding_window": True},
        "mask_token_id": 7,
    },
    DFLASH | LAYER | {"dflash_config": {"target_layer_ids": [0, 2]}},
    DFLASH | {"transformer_layer_config": LAYER, "aux_hidden_state_layer_ids": [1, 4]},
)
SETTINGS = (
    *DRAFT,
    *DFLASH,
    *("dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids", "speculators_model_type", "causal"),
    *("short_factor", "long_factor", "attention_factor", "full_attention", "sliding_attention"),
    *("hidden_activation", "query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"),
    *("no_rope_layers", "no_rope_layer_interval", "final_logit_softcapping", "text_config"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "quantization_config"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", *ROPE, "type", "factors"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"),
    *("decoder_sparse_step", "norm_topk_prob", "swiglu_limit", "beta_fast", "beta_slow", "truncate"),
    *("attention_factor", "mscale", "mscale_all_dim"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave"),
    *("topk_method", "scoring_func", "moe_layer_freq", "n_group", "topk_group", "routed_scaling_factor"),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"),
    *("mlp_layer_types", "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers"),
    *("attention_k_eq_v", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"),
    *("top_k_experts", "use_double_wide_mlp", "per_layer_config", "use_bidirectional_attention"),
    *("eagle_config", "transformer_layer_config", "speculators_config", "algorithm", "norm_before_fc"),
    *("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "use_aux_hidden_state", "fc_norm"),
    *("target_hidden_size", "truncated_vocab_size", "norm_output", "bias", "parallel_draft_step"),
)
LIKELY = (
    *("sliding_attention", "longrope", "gelu_pytorch_tanh", [1.0] * 8),
    *(
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "gguf"},
        {"quant_method": "fp8"},
    ),
    *("llama", "qwen2", "qwen3", "silu", "full_attention", "linear", "default", "factors", "eagle3"),
    *("qwen3_moe", "mixtral", "gpt_oss", "mxfp4", "yarn", "noaux_tc", "greedy", "sigmoid", "softmax"),
    *("dense", "sparse", ["dense"] * 4, ["full_attention"] * 4, ["sliding_attention"] * 4, "proportional"),
    *({"3": {"head_dim": 32}}, {"3": {"num_key_value_heads": 3}}, {"0": {}}, {"full_attention": {}}),
    *("LlamaForCausalLM", "Qwen3ForCausalLM", 1, 2, 4, 16, 64, 1.0, 2**24, 2**31, 2**63, 10**4000, 0.5),
)

scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-2, 9) | st.floats() | st.sampled_from(LIKELY)
)
values = st.recursive(
    scalars | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(SETTINGS), inner, max_size=4)
        | inner.map(lambda value: ROPE | {"factor": value})
    ),
    max_leaves=6,
)
families = st.sampled_from(HEADS) | st.sampled_from(FAMILIES)
strategy = st.tuples(families, st.dictionaries(st.sampled_from(SETTINGS), values, max_size=3))


def run(data: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A draft's config if the family is one of HEADS. Changes concern its layers too."""
    family, changes = data
    if family in HEADS:
        target = read_spec(MODEL)
        config = family | {
            name: table | changes for name, table in family.items() if name == "transformer_layer_config"
        }
        draft = read_head_config(copy.deepcopy(config | changes), target)
        assert draft.target_hidden_size == target.hidden_size
        assert all(0 <= layer <= target.num_layers for layer in draft.aux_layers)
        if isinstance(draft, DFlashConfig):
            ropes: tuple[Rope, ...] = draft.shape.ropes
        else:
            assert draft.attention.rope is not None
            ropes = (draft.attention.rope,)
    else:
        found = read_spec(copy.deepcopy(MODEL | family | changes))
        assert found.max_position_embeddings >= 2
        used = [layer.mixer.rope for layer in found.layers if layer.mixer.rope is not None]
        assert set(used) == set(found.ropes)
        ropes = found.ropes

    for rope in ropes:
        if rope.rotary_dim > 2**16:
            continue
        frequencies = rope.frequencies()
        assert frequencies.isfinite().all() and (frequencies >= 0).all()
