"""Writes GGUF files of models with latent attention, as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Q
from hybrid_gguf import K_SCALES
from hybrid_parity import stacked_and_each
from safetensors.torch import load_file, save_file

__all__ = ["write_latent_gguf"]

Array = npt.NDArray[np.float32]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}
SCORES = {"deepseek_v2": gguf.ExpertGatingFuncType.SOFTMAX, "deepseek_v3": gguf.ExpertGatingFuncType.SIGMOID}
"""Functions of scores that a config names; GLM-4.7-Flash names none."""


def write_latent_gguf(
    folder: Path,
    file: Path,
    kind: Callable[[str], Q] = lambda name: Q.F32,
    *,
    is_old: bool = False,
    metadata: dict[str, Any] | None = None,
    **extra: Array,
) -> None:
    """Write the model of a folder. The folder "twin" beside the file has the numbers as stored.

    kind:          of each matrix, by its name in the file; Q8_0 or F32 where rows have no whole blocks of it.
                   K-quants, which the gguf package cannot make, are random blocks.
    is_old:        keys and values of heads are one matrix, and groups of experts and the softmax of scores
                   are not named.
    metadata:      instead of the file's own; None: left out.
    extra:         further tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    given = stacked_and_each(load_file(folder / "model.safetensors"))[0]
    behind = f"model.layers.{config['num_hidden_layers']}."
    writer = gguf.GGUFWriter(file, "deepseek2")
    _add_settings(writer, config, is_old, int(any(name.startswith(behind) for name in given)))
    for key, value in (metadata or {}).items():
        found = writer.kv_data[0].pop(f"deepseek2.{key}", None)
        if value is not None:
            kind_of = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
            value_type = found.type if found is not None else kind_of[type(value)]
            writer.add_key_value(f"deepseek2.{key}", value, value_type)
    twin = {}
    for name, tensor in given.items():
        parts = _converted(name, tensor.numpy(), config, is_old)
        written = []
        for part, array in parts.items():
            own = _gguf_name(part)
            raw, stored = _quantised(own, array, kind(own))
            writer.add_tensor(own, raw, raw_dtype=stored)
            written.append(gguf.quants.dequantize(raw, stored).reshape(array.shape))
        twin[name] = torch.from_numpy(_restored(name, written, config).reshape(tensor.shape).copy())
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (file.parent / "twin").mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", file.parent / "twin")
    save_file(twin, file.parent / "twin" / "model.safetensors", {"format": "pt"})


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any], is_old: bool, num_predicting: int) -> None:
    rope, latent = config["rope_parameters"], config["kv_lora_rank"]
    rotated, output = config["qk_rope_head_dim"], config["v_head_dim"]
    key = config["qk_nope_head_dim"] + rotated
    kinds = config.get("mlp_layer_types")
    num_dense = config["first_k_dense_replace"] if kinds is None else kinds.count("dense")
    assert kinds is None or "dense" not in kinds[num_dense:]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + num_predicting)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_attention_heads"] if is_old else 1)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if not is_old:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(key if is_old else latent + rotated)
    writer.add_value_length(output if is_old else latent)
    if not is_old:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(output)
    writer.add_leading_dense_block_count(num_dense)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    scores = SCORES.get(config["model_type"])
    if scores is not None and not (is_old and scores == gguf.ExpertGatingFuncType.SOFTMAX):
        writer.add_expert_gating_func(scores)
    if config.get("n_group") is not None and not is_old:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if num_predicting:
        writer.add_nextn_predict_layers(num_predicting)
    writer.add_eos_token_id(1)


def _converted(name: str, array: Array, config: dict[str, Any], is_old: bool) -> dict[str, Array]:
    """The tensors of the file for a tensor of a folder, by Hugging Face names."""
    prefix = name.rpartition(".")[0]
    if name.endswith(".experts.gate_up_proj"):
        gate, up = np.split(array, 2, axis=1)
        return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": np.ascontiguousarray(up)}

    if name.endswith(".experts.down_proj"):
        return {f"{name}.weight": array}

    if name.endswith(".kv_b_proj.weight") and not is_old:
        heads = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        attention = prefix.removesuffix(".kv_b_proj")
        return {
            f"{attention}.k_b_proj.weight": np.ascontiguousarray(keys.swapaxes(1, 2)),
            f"{attention}.v_b_proj.weight": np.ascontiguousarray(values),
        }

    return {name: array}


def _restored(name: str, written: list[Array], config: dict[str, Any]) -> Array:
    """The tensor of a folder, from the numbers of its tensors in the file."""
    if len(written) == 1:
        return written[0]

    if name.endswith(".kv_b_proj.weight"):
        keys, values = written
        return np.concatenate((keys.swapaxes(1, 2), values), axis=1)

    return np.concatenate(written, axis=1)


def _quantised(name: str, array: Array, wanted: Q) -> tuple[npt.NDArray[Any], Q]:
    """The blocks of a tensor, and their kind."""
    is_matrix = array.ndim > 1 and "ffn_gate_inp" not in name
    kinds = (wanted, Q.Q8_0, Q.F32) if is_matrix and wanted != Q.F32 else (Q.F32,)
    kind = next(each for each in kinds if array.shape[-1] % gguf.GGML_QUANT_SIZES[each][0] == 0)
    if kind not in K_SCALES:
        return gguf.quants.quantize(array, kind), kind

    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*array.shape[:-1], array.shape[-1] // block_size, num_bytes)
    blocks = np.random.default_rng(crc32(name.encode())).integers(0, 256, shape, dtype=np.uint8)
    for place, scale in K_SCALES[kind].items():
        blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1), kind


def _gguf_name(name: str) -> str:
    if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias", name):
        return f"blk.{match[1]}.exp_probs_b.bias"

    module, _, suffix = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{suffix}"

    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"
