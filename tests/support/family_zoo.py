"""Small random models of each family with drawn shapes and options, built in memory."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import torch
import transformers
from model_zoo import random_model

from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder

__all__ = ["FAMILIES", "StateTensors", "draw_config", "draw_model", "own_decoder"]

HEADS = ((4, 4), (4, 2), (4, 1), (6, 3), (6, 2), (3, 1), (2, 2), (5, 1))
LAYER_TYPES = ("full_attention", "sliding_attention")


class StateTensors:
    """The TensorSource of a transformers model in memory."""

    def __init__(self, model: Any) -> None:
        self.location = "a model in memory"
        self._tensors = model.state_dict(keep_vars=True)
        if model.config.tie_word_embeddings:
            del self._tensors["lm_head.weight"]

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def file(self, name: str) -> str:
        return self.location

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()


def _types(rng: random.Random, num_layers: int) -> list[str]:
    """Kinds of layers, of which at least one has a window."""
    types = [rng.choice(LAYER_TYPES) for _ in range(num_layers)]
    types[rng.randrange(num_layers)] = "sliding_attention"
    return types


def _rope(rng: random.Random) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice([500.0, 10_000.0, 1_000_000.0])}
    kind = rng.choice(["default", "default", "linear", "llama3"])
    if kind == "linear":
        return theta | {"rope_type": kind, "factor": rng.choice([2.0, 3.5])}

    if kind == "llama3":
        factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return theta | factors | {"rope_type": kind, "original_max_position_embeddings": 32}

    return theta | {"rope_type": kind}


def _mistral(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": rng.randint(1, 30), "rope_parameters": _rope(rng)}


def _qwen(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    switch = {"use_sliding_window": True, "sliding_window": rng.randint(2, 30), "rope_parameters": _rope(rng)}
    if rng.random() < 0.5:
        return switch | {"layer_types": _types(rng, fields["num_hidden_layers"])}

    return switch | {"max_window_layers": rng.randrange(fields["num_hidden_layers"])}


def _phi3(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """The rotation is LongRoPE in three of four models, with the short or the long factors in use."""
    head_dim = fields["head_dim"]
    rotary_dim = rng.choice([n for n in range(2, head_dim + 1, 2) if 4 * n >= head_dim])
    theta = {"rope_theta": rng.choice([500.0, 10_000.0]), "partial_rotary_factor": rotary_dim / head_dim}
    assert int(head_dim * theta["partial_rotary_factor"]) == rotary_dim
    window = {"sliding_window": rng.choice([None, rng.randint(2, 30)])}
    # Widths of heads are not among the settings of Phi-3.
    fields["hidden_size"] = fields["num_attention_heads"] * head_dim
    if rng.random() < 0.25:
        return window | {"rope_parameters": theta | {"rope_type": "default"}}

    short, long = ([rng.uniform(1.0, most) for _ in range(rotary_dim // 2)] for most in (2.0, 20.0))
    factors = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if rng.random() < 0.3:
        factors["attention_factor"] = 1.3
    return window | {
        "rope_parameters": theta | factors,
        "original_max_position_embeddings": rng.choice([16, 128]),
    }


def _gemma3(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    fields["hidden_size"] = fields["num_attention_heads"] * rng.randint(6, 12)
    fields["tie_word_embeddings"] = True
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": rng.choice([1.0, 8.0])},
        "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([500.0, 10_000.0])},
    }
    num_layers = fields["num_hidden_layers"]
    kinds = {"layer_types": _types(rng, num_layers)} if rng.random() < 0.7 else {"sliding_window_pattern": 2}
    return kinds | {
        "rope_parameters": ropes,
        "sliding_window": rng.randint(2, 30),
        "query_pre_attn_scalar": rng.randint(1, 12),
    }


def _smollm3(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    num_layers = fields["num_hidden_layers"]
    flags = [rng.randint(0, 1) for _ in range(num_layers)]
    nope = {"no_rope_layers": flags} if rng.random() < 0.6 else {"no_rope_layer_interval": rng.randint(1, 3)}
    biases = {"attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3}
    switch = {"use_sliding_window": rng.random() < 0.5, "sliding_window": rng.randint(2, 30)}
    return nope | biases | switch | {"rope_parameters": _rope(rng)}


def _granite(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": _rope(rng),
        "embedding_multiplier": rng.choice([1.0, 6.0, 12.0]),
        "residual_multiplier": rng.uniform(0.4, 1.5),
        "attention_multiplier": rng.uniform(0.1, 0.6),
        "logits_scaling": rng.uniform(0.5, 4.0),
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
    }


def _gemma4(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Of any size's kind: keys that are values or not, layers with the keys of others or not, and inputs of
    layers or not."""
    fields["tie_word_embeddings"] = True
    fields["num_hidden_layers"] = num_layers = rng.randint(4, 6)
    num_own, kinds = rng.choice((num_layers, num_layers, 2, 3)), list(LAYER_TYPES)
    kinds = rng.sample(kinds, 2) + [rng.choice(kinds) for _ in range(num_layers - 3)] + [kinds[0]]
    has_inputs = num_own < num_layers or rng.random() < 0.3  # transformers has shared keys with inputs alone
    theta = rng.choice([500.0, 10_000.0])
    return {
        "layer_types": kinds,
        "global_head_dim": rng.choice([8, 16, 32]),
        "attention_k_eq_v": rng.random() < 0.5,
        "num_global_key_value_heads": rng.choice([None, 1, fields["num_attention_heads"]]),
        "num_kv_shared_layers": num_layers - num_own,
        "use_double_wide_mlp": rng.random() < 0.5,
        "hidden_size_per_layer_input": rng.choice([4, 10]) if has_inputs else 0,
        "vocab_size_per_layer_input": fields["vocab_size"],
        "sliding_window": rng.randint(2, 30),
        "final_logit_softcapping": rng.choice([None, 5.0, 30.0]),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _gemma4_experts(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    num_experts = rng.choice((4, 6, 8))
    return _gemma4(rng, fields) | {
        "enable_moe_block": True,
        "num_experts": num_experts,
        "top_k_experts": rng.randint(1, 3),
        "moe_intermediate_size": rng.randint(6, 30),
        "experts_implementation": "eager",  # others need sizes of whole 16 bytes
    }


def _latent(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Latent attention with experts: rotations with and without YaRN, queries with and without a latent."""
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice([8, 12, 16])
    del fields["head_dim"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice([500.0, 10_000.0])}
    if rng.random() < 0.6:
        rope |= {"rope_type": "yarn", "factor": rng.choice([4.0, 40.0])}
        rope |= {"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
        rope |= {"mscale": rng.choice([0.707, 1.0]), "mscale_all_dim": rng.choice([0.0, 0.707, 1.0])}
    return {
        "rope_parameters": rope,
        "q_lora_rank": rng.choice([None, 20, 28]),
        "kv_lora_rank": rng.choice([12, 16, 24]),
        "qk_nope_head_dim": rng.choice([6, 8, 16]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([6, 12, 16]),
        "attention_bias": rng.random() < 0.3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": rng.choice([1, 2]),
        "moe_intermediate_size": rng.randint(6, 30),
        "routed_scaling_factor": rng.choice([1.0, 1.8]),
        "experts_implementation": "eager",  # others need sizes of whole 16 bytes
    }


def _sigmoid_groups(rng: random.Random) -> dict[str, Any]:
    num_groups, num_active_groups = rng.choice(((1, 1), (2, 1), (4, 2)))
    return {"n_group": num_groups, "topk_group": num_active_groups, "norm_topk_prob": rng.random() < 0.7}


def _glm4_moe_lite(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    options = _latent(rng, fields) | _sigmoid_groups(rng)
    kinds = [rng.choice(["dense", "sparse"]) for _ in range(fields["num_hidden_layers"] - 1)]
    return options | {"mlp_layer_types": [*kinds, "sparse"], "rope_interleave": rng.random() < 0.7}


def _deepseek_v3(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    options = _latent(rng, fields) | _sigmoid_groups(rng)
    return options | {"first_k_dense_replace": rng.randint(0, 1), "rope_interleave": rng.random() < 0.7}


def _deepseek_v2(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    options = _latent(rng, fields) | {"first_k_dense_replace": rng.randint(0, 1)}
    if rng.random() < 0.5:
        return options | {"topk_method": "greedy"}

    return options | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": rng.choice([1, 2])}


FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, _mistral),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _qwen),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, _qwen),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, _phi3),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, _gemma3),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, _smollm3),
    "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM, _gemma4),
    "gemma4 experts": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM, _gemma4_experts),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM, _granite),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM, _glm4_moe_lite),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, _deepseek_v3),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, _deepseek_v2),
}


def draw_config(family: str, seed: int, **changes: Any) -> Any:
    """A configuration of transformers with drawn shapes and options, the same for the same seed, and with
    `changes`."""
    config_class, _, draw_options = FAMILIES[family]
    rng = random.Random(f"{family} {seed}")
    num_heads, num_kv_heads = rng.choice(HEADS)
    fields: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 4 * rng.randint(8, 16),
        "intermediate_size": rng.randint(20, 80),
        "num_hidden_layers": rng.randint(2, 3),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": rng.choice([8, 12, 16, 24]),
        "max_position_embeddings": 512,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    options = draw_options(rng, fields)
    return config_class(**(fields | options | changes))


def draw_model(family: str, seed: int, **changes: Any) -> Any:
    """A transformers model of `draw_config`, with random weights."""
    return random_model(FAMILIES[family][1], draw_config(family, seed, **changes), seed=seed)


def own_decoder(model: Any, *, max_model_len: int | None = None) -> Decoder:
    """The decoder of a transformers model, with the same weights."""
    settings = model.config.to_dict() | {"architectures": [type(model).__name__]}
    spec = read_spec(settings, max_model_len=max_model_len)
    return Decoder.load(spec, StateTensors(model), device="cpu", dtype=torch.float32)
