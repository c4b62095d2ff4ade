"""Small random models of every supported kind, made by transformers and saved as folders."""

from __future__ import annotations

import itertools
import json
import shutil
import string
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tolerances import bound

__all__ = [
    "NUM_MODELS",
    "first_layers",
    "logprob_bound",
    "make_model",
    "make_overflowing",
    "random_model",
    "save_tokenizer",
]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LARGE_BASE = {"rope_type": "default", "rope_theta": 1_000_000.0}


def _shape(heads: int, kv_heads: int, head_dim: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        **more,
    }


LLAMAS: tuple[dict[str, Any], ...] = (
    _shape(4, 4, 16, 64, rope_parameters=DEFAULT),
    _shape(4, 2, 16, 64, rope_parameters=LLAMA3),
    _shape(6, 2, 8, 48, rope_parameters=LINEAR, tie_word_embeddings=True),
    _shape(4, 1, 12, 48, rope_parameters=DEFAULT, attention_bias=True),
    _shape(4, 2, 10, 64, rope_parameters=LLAMA3, mlp_bias=True, tie_word_embeddings=True),
    _shape(3, 1, 32, 48, rope_parameters=LARGE_BASE, attention_bias=True, mlp_bias=True),
    _shape(9, 3, 8, 72, rope_parameters=DEFAULT, num_hidden_layers=4, tie_word_embeddings=True),
    _shape(8, 2, 6, 32, rope_parameters=LLAMA3, attention_bias=True, rms_norm_eps=1e-5),
    _shape(2, 2, 20, 56, rope_parameters=LINEAR, vocab_size=301, mlp_bias=True),
    _shape(5, 5, 14, 40, rope_parameters=DEFAULT, num_hidden_layers=1),
    _shape(6, 3, 4, 96, rope_parameters=LLAMA3, rms_norm_eps=1e-2, intermediate_size=37),
    _shape(4, 4, 64, 32, rope_parameters=LLAMA3, tie_word_embeddings=True, attention_bias=True),
)
QWEN2S: tuple[dict[str, Any], ...] = (
    _shape(4, 2, 16, 64, rope_parameters=LARGE_BASE),
    _shape(6, 2, 8, 48, rope_parameters=LARGE_BASE, tie_word_embeddings=True),
    _shape(4, 1, 12, 48, rope_parameters=DEFAULT, rms_norm_eps=1e-3),
    _shape(3, 3, 24, 72, rope_parameters=LINEAR, vocab_size=331),
    _shape(8, 4, 10, 80, rope_parameters=DEFAULT, num_hidden_layers=4, tie_word_embeddings=True),
    _shape(7, 1, 8, 56, rope_parameters=LLAMA3),
)
QWEN3S: tuple[dict[str, Any], ...] = (
    _shape(4, 2, 32, 64, rope_parameters=LARGE_BASE),
    _shape(4, 1, 24, 48, rope_parameters=LARGE_BASE, tie_word_embeddings=True),
    _shape(6, 2, 8, 48, rope_parameters=DEFAULT, attention_bias=True),
    _shape(3, 3, 18, 36, rope_parameters=LINEAR, num_hidden_layers=4),
    _shape(8, 2, 16, 40, rope_parameters=LARGE_BASE, attention_bias=True, tie_word_embeddings=True),
    _shape(2, 2, 6, 64, rope_parameters=DEFAULT, rms_norm_eps=1e-3, vocab_size=512),
    _shape(4, 4, 128, 64, rope_parameters=LLAMA3, num_hidden_layers=2),
    _shape(6, 1, 10, 60, rope_parameters=LLAMA3, intermediate_size=90),
)
SWITCHED = {"use_sliding_window": True, "sliding_window": 11}
WINDOWED_QWEN2S: tuple[dict[str, Any], ...] = (
    _shape(4, 2, 16, 64, rope_parameters=LARGE_BASE, max_window_layers=1, **SWITCHED),
)
WINDOWED_QWEN3S: tuple[dict[str, Any], ...] = (
    _shape(
        6,
        2,
        8,
        48,
        rope_parameters=DEFAULT,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **SWITCHED,
    ),
)
MISTRALS: tuple[dict[str, Any], ...] = (_shape(4, 2, 16, 64, rope_parameters=DEFAULT, sliding_window=7),)
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.2, 1.9, 3.0, 5.0, 8.0, 13.0],
    "partial_rotary_factor": 0.75,
}
PHI3S: tuple[dict[str, Any], ...] = (
    _shape(
        4,
        2,
        16,
        64,
        rope_parameters=LONG_ROPE,
        original_max_position_embeddings=256,
        tie_word_embeddings=True,
    ),
)
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA3S: tuple[dict[str, Any], ...] = (
    _shape(
        4,
        2,
        16,
        64,
        rope_parameters=GEMMA_ROPES,
        sliding_window=12,
        query_pre_attn_scalar=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
)
SMOLLM3S: tuple[dict[str, Any], ...] = (
    _shape(
        6, 2, 8, 48, rope_parameters=LARGE_BASE, no_rope_layers=[0, 1, 0], attention_bias=True, **SWITCHED
    ),
)
GRANITES: tuple[dict[str, Any], ...] = (
    _shape(
        4,
        2,
        16,
        64,
        rope_parameters=DEFAULT,
        embedding_multiplier=12.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
        logits_scaling=1.7,
        tie_word_embeddings=True,
    ),
)
LAST_TYPES = ["sliding_attention", "full_attention"]
GEMMA4S = [
    {
        "hidden_size": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 24,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", *LAST_TYPES],
        "sliding_window": 13,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 500,
        "final_logit_softcapping": 20.0,
    },
]
"""With keys of other layers and inputs of layers."""
LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "experts_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GLM_LITES = [
    LATENT
    | {
        "hidden_size": 60,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": 28,
        "rope_parameters": YARN,
        "n_group": 4,
        "topk_group": 2,
    },
]
DEEPSEEK_V2S = [
    LATENT
    | {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.4,
        "rope_parameters": DEFAULT,
    },
]
KINDS = (
    *((transformers.LlamaConfig, transformers.LlamaForCausalLM, fields) for fields in LLAMAS),
    *((transformers.Qwen2Config, transformers.Qwen2ForCausalLM, fields) for fields in QWEN2S),
    *((transformers.Qwen3Config, transformers.Qwen3ForCausalLM, fields) for fields in QWEN3S),
    *((transformers.Qwen2Config, transformers.Qwen2ForCausalLM, fields) for fields in WINDOWED_QWEN2S),
    *((transformers.Qwen3Config, transformers.Qwen3ForCausalLM, fields) for fields in WINDOWED_QWEN3S),
    *((transformers.MistralConfig, transformers.MistralForCausalLM, fields) for fields in MISTRALS),
    *((transformers.Phi3Config, transformers.Phi3ForCausalLM, fields) for fields in PHI3S),
    *((transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, fields) for fields in GEMMA3S),
    *((transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, fields) for fields in SMOLLM3S),
    *((transformers.GraniteConfig, transformers.GraniteForCausalLM, fields) for fields in GRANITES),
    *((transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM, fields) for fields in GEMMA4S),
    *((transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM, fields) for fields in GLM_LITES),
    *((transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, fields) for fields in DEEPSEEK_V2S),
)
NUM_MODELS = len(KINDS)


def make_model(index: int, folder: Path) -> Any:
    """Build model `index` (0 to NUM_MODELS - 1), save it to `folder` and return it, in float32 and eval mode.

    The same index gives the same weights. Every fourth model is saved in shards. Token 0 is the beginning of
    sequence, token 1 the end of sequence, token 2 padding.
    """
    config_class, model_class, fields = KINDS[index]
    config = config_class(
        **{
            "vocab_size": 500,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            **fields,
        }
    )
    model = random_model(model_class, config, seed=14_000 + index)
    model.save_pretrained(folder, max_shard_size="64KB" if index % 4 == 0 else "1GB")
    save_tokenizer(folder, config.vocab_size)
    return model


def first_layers(folder: Path, small: Path, num_layers: int) -> Path:
    """Copy a model of `make_model` with its first layers alone, and return the copy's folder."""
    small.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, small)
    tensors: dict[str, torch.Tensor] = {}
    for stored in folder.glob("*.safetensors"):
        tensors |= load_file(stored)
    dropped = tuple(f"model.layers.{index}." for index in range(num_layers, 99))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    save_file(kept, small / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kinds = {"layer_types": config["layer_types"][:num_layers]} if "layer_types" in config else {}
    (small / "config.json").write_text(json.dumps(config | kinds | {"num_hidden_layers": num_layers}))
    return small


def make_overflowing(folder: Path) -> None:
    """Change a saved model's weights so that hidden states overflow in float32."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"].mul_(1e30)
    tensors["model.layers.0.mlp.down_proj.weight"].mul_(1e30)
    save_file(tensors, file, {"format": "pt"})


def random_model(model_class: Any, config: Any, *, seed: int) -> Any:
    """A model in float32 and eval mode, with random weights: the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        model = model_class(config).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            _randomise(name, parameter, generator, config)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4, generator=generator)
            elif name.endswith("e_score_correction_bias"):
                # Mostly beyond the scores, so that masked ones are not the least.
                buffer.normal_(-0.8, 0.4, generator=generator)

    return model


def logprob_bound(index: int) -> float:
    """The largest difference between log-probabilities of model `index` that rounding explains.

    They reach down to about -16.
    """
    fields = {"intermediate_size": 80, "num_hidden_layers": 3, **KINDS[index][2]}
    width = fields["num_attention_heads"] * fields.get("head_dim", fields.get("v_head_dim"))
    inner = max(fields["hidden_size"], fields["intermediate_size"], width)
    return bound(16.0, inner=inner, depth=fields["num_hidden_layers"] + 1)


@torch.no_grad()
def _randomise(name: str, parameter: torch.Tensor, generator: torch.Generator, config: Any) -> None:
    """Draw random values for a parameter.

    They are large enough that greedy decoding varies (19 or more different tokens in 64, from prompts of 1,
    19 and 70 tokens), and small enough that rounding is not amplified. Embeddings are small compared with the
    output of the layers, so that a tied head does not repeat its input.
    """
    is_gemma, is_gemma4 = (config.model_type == f"gemma{number}_text" for number in (3, 4))
    scale = config.hidden_size**0.5 if is_gemma or is_gemma4 else getattr(config, "embedding_multiplier", 1.0)
    if name.endswith("norm.weight") or (is_gemma4 and parameter.dim() == 1):
        # Gemma 3's norms multiply by 1 + weight. The head of both is small, as it is the embedding.
        mean = scale if name == "model.norm.weight" and (is_gemma or is_gemma4) else 1.0
        mean -= float(is_gemma)
        parameter.normal_(mean, 0.2, generator=generator)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.3, generator=generator)
    elif "embed_tokens" in name or "lm_head" in name:
        parameter.normal_(0.0, 0.2 / scale, generator=generator)
    else:
        gain = 1.5 if "q_proj" in name or "k_proj" in name else 2.0
        if "_b_proj" in name:  # of latents, which have unit length
            gain = 1.0
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a byte-level BPE tokenizer: three special tokens, the 256 bytes, then pairs of letters."""
    special = ["<bos>", "<eos>", "<pad>"]
    pieces = special + sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.product(string.ascii_lowercase, repeat=2))[: vocab_size - len(pieces)]
    vocab = {piece: index for index, piece in enumerate(pieces + ["".join(merge) for merge in merges])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
