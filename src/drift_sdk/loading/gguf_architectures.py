"""Architectures of GGUF files: the Hugging Face names of their tensors, and how their values differ.

Names are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

__all__ = ["ARCHITECTURES", "MIXTRAL", "GGUFArchitecture"]

MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FUSED_MODULES = LAYER_MODULES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
EXPERT_MODULES = LAYER_MODULES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
# Old files have a tensor for each expert, like "blk.0.ffn_gate.7.weight".
MIXTRAL_MODULES = (
    LAYER_MODULES
    | {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {
        f"ffn_{name}{suffix}": f"block_sparse_moe.experts.{{}}.{own}"
        for name, own in MIXTRAL_EXPERTS.items()
        for suffix in ("", "_exps")
    }
)
GPT_OSS_MODULES = LAYER_MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
POST_NORM_MODULES = LAYER_MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
"""Metadata of files with experts."""


class GGUFArchitecture(Struct, frozen=True, kw_only=True):
    """An architecture of GGUF files.

    model_type, architecture:  as in a config.json of its models.
    layer_modules:             Hugging Face names of a layer's modules, by their names in the file; "{}" is an
                               expert's number.
    layer_tensors:             Hugging Face names of a layer's tensors that belong to no module, likewise.
    is_permuted:               the rows of query and key projections are interleaved, see `GGUFFile.get`.
    norm_offset:               what files add to the weights of norms.
    keys:                      metadata that changes the arithmetic and is read for this architecture.
    required:                  metadata that files of this architecture have.
    """

    model_type: str
    architecture: str
    layer_modules: Mapping[str, str]
    layer_tensors: Mapping[str, str] = {}
    is_permuted: bool = False
    norm_offset: float = 0.0
    keys: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    @property
    def has_expert_matrices(self) -> bool:
        """Whether models have a tensor for each matrix of an expert."""
        return any("{}" in name for name in self.layer_modules.values())

    def tensor_name(self, name: str) -> str:
        """The Hugging Face name of a tensor; its name in the file if models have no such tensor."""
        if match := re.fullmatch(r"blk\.([0-9]+)\.(\w+)(?:\.([0-9]+))?\.(weight|bias)", name):
            layer, module, expert, suffix = match.groups()
            own = self.layer_tensors.get(f"{module}.{suffix}")
            if own is not None and expert is None:
                return f"model.layers.{layer}.{own}"

            known = self.layer_modules.get(module)
            if known is None or (expert is None) == ("{}" in known):
                return name

            return f"model.layers.{layer}.{known.format(expert)}.{suffix}"

        module, _, suffix = name.rpartition(".")
        return f"{MODULES[module]}.{suffix}" if module in MODULES else name


ARCHITECTURES = {
    # Files of Mistral models have the architecture "llama" as well.
    "llama": GGUFArchitecture(
        model_type="llama",
        architecture="LlamaForCausalLM",
        layer_modules=LAYER_MODULES,
        is_permuted=True,
        keys=("attention.sliding_window",),
    ),
    "qwen2": GGUFArchitecture(
        model_type="qwen2", architecture="Qwen2ForCausalLM", layer_modules=LAYER_MODULES
    ),
    "qwen3": GGUFArchitecture(
        model_type="qwen3", architecture="Qwen3ForCausalLM", layer_modules=LAYER_MODULES
    ),
    "qwen3moe": GGUFArchitecture(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        layer_modules=EXPERT_MODULES,
        keys=("expert_count",),
        required=EXPERT_KEYS,
    ),
    "gpt-oss": GGUFArchitecture(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        layer_modules=GPT_OSS_MODULES,
        layer_tensors={"attn_sinks.weight": "self_attn.sinks"},
        keys=("attention.sliding_window", "expert_count"),
        required=(*EXPERT_KEYS, "attention.sliding_window"),
    ),
    "phi3": GGUFArchitecture(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        layer_modules=FUSED_MODULES,
        keys=("attention.sliding_window", "rope.scaling.attn_factor"),
    ),
    "gemma3": GGUFArchitecture(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        layer_modules=POST_NORM_MODULES,
        norm_offset=1.0,
        keys=("attention.scale", "attention.sliding_window", "attention.sliding_window_pattern"),
    ),
    "smollm3": GGUFArchitecture(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        layer_modules=LAYER_MODULES,
        is_permuted=True,
    ),
    "granite": GGUFArchitecture(
        model_type="granite",
        architecture="GraniteForCausalLM",
        layer_modules=LAYER_MODULES,
        is_permuted=True,
        keys=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    ),
}
MIXTRAL = GGUFArchitecture(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    layer_modules=MIXTRAL_MODULES,
    is_permuted=True,
    keys=("attention.sliding_window", "expert_count"),
    required=EXPERT_KEYS[:2],
)
"""Of files of the architecture "llama" with experts."""
