"""Writes GGUF files of models with recurrent layers, as llama.cpp's converter does."""

from __future__ import annotations

import copy
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
from hybrid_zoo import make_hybrid_model
from mtp_zoo import add_mtp, make_often_right
from safetensors.torch import load_file, save_file

__all__ = ["ARCHITECTURES", "write_hybrid_gguf", "write_mtp_gguf"]

Array = npt.NDArray[np.float32]
ARCHITECTURES = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
K_SCALES = {Q.Q4_K: {0: 4e-4, 2: 3e-3}, Q.Q6_K: {208: 3e-5}}
"""The scales of blocks of K-quants, by their places."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
NEXTN = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "shared_head.norm.weight",
}
NAMES |= {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
UNQUANTISED = ("conv1d", "mlp.gate", "shared_expert_gate")


def write_hybrid_gguf(
    model: Any,
    file: Path,
    kind: Callable[[str], Q] = lambda name: Q.F32,
    *,
    is_split: bool = True,
    has_fused_experts: bool = False,
    has_vector_gates: bool = True,
    num_predicting: int = 0,
    mtp: dict[str, torch.Tensor] | None = None,
    **extra: Array,
) -> Any:
    """Write a model. Returns a copy of it with the weights as stored.

    kind:              of each matrix whose rows have whole blocks, by its name in the file. K-quants, which
                       the gguf package cannot make, are random blocks.
    is_split:          projections that Qwen3-Next has together are apart, as of 2026.
    has_fused_experts: gate and up projections of experts are one tensor.
    has_vector_gates:  gates of shared experts have one dimension.
    num_predicting:    layers that predict more tokens, which are counted.
    mtp:               tensors of such a layer, by Hugging Face names and with experts in one tensor;
                       replaced by the numbers as stored.
    extra:             further tensors.
    """
    config, stored = model.config, copy.deepcopy(model)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.model_type])
    _add_settings(writer, config, num_predicting)
    layer = {_behind(name, config.num_hidden_layers): tensor for name, tensor in (mtp or {}).items()}
    for name, parameter in [*stored.named_parameters(), *layer.items()]:
        converted = _converted(name, parameter.detach(), config, is_split, has_fused_experts)
        written = []
        for part, array in converted.items():
            own = _gguf_name(part)
            wanted = kind(own)
            has_blocks = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
            found = wanted if has_blocks and not any(each in part for each in UNQUANTISED) else Q.F32
            is_drawn = found in K_SCALES
            raw = _random_blocks(own, array.shape, found) if is_drawn else gguf.quants.quantize(array, found)
            is_vector = has_vector_gates and part.endswith("shared_expert_gate.weight")
            writer.add_tensor(own, raw.reshape(-1) if is_vector else raw, raw_dtype=found)
            written.append(gguf.quants.dequantize(raw, found).reshape(array.shape))
        with torch.no_grad():
            parameter.copy_(_restored(name, written, parameter.shape, config, is_split, has_fused_experts))
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def write_mtp_gguf(
    family: str, seed: int, folder: Path, kind: Callable[[str], Q], sizes: dict[str, Any], **form: bool
) -> Path:
    """Write a model with the layer that predicts one more token, often right, to "model.gguf" in a folder.
    The folder "twin" there has the numbers as stored. sizes: of the model. kind, form: as of
    `write_hybrid_gguf`."""
    model = make_hybrid_model(family, seed, folder, **sizes)
    add_mtp(folder, is_stacked=True)
    make_often_right(folder)
    given = load_file(folder / "model.safetensors")
    layer = {name: tensor for name, tensor in given.items() if name.startswith("mtp.")}
    model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    file, twin = folder / "model.gguf", folder / "twin"
    write_hybrid_gguf(model, file, kind, num_predicting=1, mtp=layer, **form).save_pretrained(twin)
    shutil.copy(folder / "config.json", twin)
    save_file(load_file(twin / "model.safetensors") | layer, twin / "model.safetensors")
    return file


def _add_settings(writer: gguf.GGUFWriter, config: Any, num_predicting: int) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + num_predicting)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if config.model_type != "qwen3_5_moe_text":
        writer.add_feed_forward_length(config.intermediate_size)
    if config.model_type != "qwen3_5_text":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if num_predicting:
        writer.add_nextn_predict_layers(num_predicting)
    writer.add_eos_token_id(1)


def _converted(
    name: str, tensor: torch.Tensor, config: Any, is_split: bool, has_fused_experts: bool
) -> dict[str, Array]:
    """The tensors of the file for a parameter, by Hugging Face names."""
    array = tensor.numpy().copy()
    if name.endswith(".gate_up_proj") and not has_fused_experts:
        gate, up = np.split(array, 2, axis=1)
        prefix = name.removesuffix("gate_up_proj")
        return {f"{prefix}gate_proj": gate, f"{prefix}up_proj": np.ascontiguousarray(up)}

    if name.endswith("in_proj_qkvz.weight") and is_split:
        qkvz, place = array[_split_rows(config)], 2 * _key_rows(config) + _value_rows(config)
        qkv, z = name.replace("qkvz", "qkv"), name.replace("qkvz", "z")
        return {qkv: qkvz[:place], z: qkvz[place:]}

    if config.model_type != "qwen3_next":
        array = _reordered(name, array, config, _tiled)
    if name.endswith("A_log"):
        array = -np.exp(array)
    elif "conv1d" in name:
        array = array.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array + 1
    return {name: array}


def _restored(
    name: str,
    written: list[Array],
    shape: torch.Size,
    config: Any,
    is_split: bool,
    has_fused_experts: bool,
) -> torch.Tensor:
    """The parameter, from the numbers of its tensors in the file."""
    array = np.concatenate(written, axis=1 if name.endswith(".gate_up_proj") and not has_fused_experts else 0)
    if name.endswith("in_proj_qkvz.weight") and is_split:
        array = array[np.argsort(_split_rows(config))]
    elif name.endswith("A_log"):
        array = np.log(-array)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array - 1
    if config.model_type != "qwen3_next":
        array = _reordered(name, array, config, _grouped)
    return torch.from_numpy(np.ascontiguousarray(array)).view(shape)


def _reordered(name: str, array: Array, config: Any, order: Callable[[Array, Any], Array]) -> Array:
    """A tensor with its value heads in an order. order: of rows, from an array and the config."""
    part = name.rpartition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        first = 2 * _key_rows(config)
        return np.concatenate((array[:first], order(array[first:], config)))

    if part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return order(array, config)

    return np.ascontiguousarray(order(array.T, config).T) if part == "out_proj.weight" else array


def _tiled(rows: Array, config: Any) -> Array:
    """Rows of value head j of key head k at j * (number of key heads) + k."""
    heads = config.linear_num_value_heads
    group = heads // config.linear_num_key_heads
    by_head = rows.reshape(heads, -1, *rows.shape[1:])
    order = [k * group + j for j in range(group) for k in range(config.linear_num_key_heads)]
    return by_head[order].reshape(rows.shape)


def _grouped(rows: Array, config: Any) -> Array:
    """The inverse of `_tiled`."""
    place = _tiled(np.arange(len(rows), dtype=np.float32), config).astype(np.int64)
    return rows[np.argsort(place)]


def _split_rows(config: Any) -> npt.NDArray[np.int64]:
    """The rows of a projection of Qwen3-Next, in which those of each key head are together, by part."""
    heads = config.linear_num_key_heads
    key, value = config.linear_key_head_dim, _value_rows(config) // heads
    rows = np.arange(heads * 2 * (key + value)).reshape(heads, -1)
    return np.concatenate([each.ravel() for each in np.split(rows, np.cumsum([key, key, value]), axis=1)])


def _key_rows(config: Any) -> int:
    return config.linear_num_key_heads * config.linear_key_head_dim


def _value_rows(config: Any) -> int:
    return config.linear_num_value_heads * config.linear_value_head_dim


def _random_blocks(name: str, shape: tuple[int, ...], kind: Q) -> npt.NDArray[np.uint8]:
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    *rows, columns = shape
    blocks = np.random.default_rng(crc32(name.encode())).integers(
        0, 256, (*rows, columns // block_size, num_bytes), dtype=np.uint8
    )
    for place, scale in K_SCALES[kind].items():
        blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*rows, -1)


def _behind(name: str, num_layers: int) -> str:
    """The name of a tensor of the layer that predicts one more token, as one of a layer behind the others."""
    return f"model.layers.{num_layers}.{NEXTN.get(name) or name.removeprefix('mtp.layers.0.')}"


def _gguf_name(name: str) -> str:
    if name.endswith(("A_log", "dt_bias")):
        return f"blk.{name.split('.')[2]}." + ("ssm_a" if name.endswith("A_log") else "ssm_dt.bias")

    module, _, suffix = name.rpartition(".")
    if ".mlp.experts" in name:
        module, suffix = name, "weight"
    if module in NAMES:
        return f"{NAMES[module]}.{suffix}"

    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"
