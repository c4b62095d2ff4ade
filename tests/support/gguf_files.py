"""Writes GGUF files of transformers models, as llama.cpp's converter does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file

from drift_sdk.spec.rope import inverse_frequencies

__all__ = ["write_gguf", "write_gpt_oss"]

ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
}
"""Architectures of files, where they differ from the model_type."""
PERMUTED = ("llama", "smollm3", "granite")
K_SCALES = {Q.Q4_K: {0: 4e-4, 2: 3e-3}, Q.Q5_K: {0: 2e-4, 2: 3e-3}, Q.Q6_K: {208: 3e-5}}
"""The scales of blocks of K-quants, by their places."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA4_NAMES = GEMMA_NAMES | {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "layer_scalar": "layer_output_scale",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
}
GPT_OSS_NAMES = NAMES | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}


def write_gguf(
    model: Any, file: Path, quantisation: Q | Callable[[str], Q] = Q.F32, **extra: npt.NDArray[np.float32]
) -> Any:
    """Write a model, with `extra` tensors. Returns a copy of it with the weights as stored.

    quantisation: of all matrices, or of each by the name of its parameter. K-quants, which the gguf package
    cannot make, are random blocks.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, architecture)
    _add_settings(writer, model)
    stored = copy.deepcopy(model)
    parameters = _parameters(stored)
    offset = np.float32(1.0 if architecture == "gemma3" else 0.0)
    for name, parameter in parameters.items():
        module, _, suffix = name.rpartition(".")
        array = parameter.numpy().copy()
        num_heads = None
        if architecture in PERMUTED:
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            num_heads = heads.get(module.rpartition(".")[2])
        is_permuted = num_heads is not None
        array = _permute(array, num_heads) if is_permuted else array
        if name.endswith("norm.weight"):
            array = array + offset
        wanted = quantisation if isinstance(quantisation, Q) else quantisation(name)
        block_size, _ = gguf.GGML_QUANT_SIZES[wanted]
        is_router = module.endswith(("mlp.gate", "router.proj"))
        is_matrix = array.ndim > 1 and array.shape[-1] % block_size == 0 and not is_router
        kind = wanted if is_matrix else Q.F32
        is_drawn = kind in K_SCALES
        raw = _random_blocks(name, array.shape, kind) if is_drawn else gguf.quants.quantize(array, kind)
        writer.add_tensor(_gguf_name(architecture, module, suffix), raw, raw_dtype=kind)
        array = gguf.quants.dequantize(raw, kind)
        if name.endswith("norm.weight"):
            array = array - offset
        if is_permuted:
            array = array.reshape(num_heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

        with torch.no_grad():
            parameter.copy_(torch.from_numpy(array.copy()))

    for name, array in (_rope_factors(model) | extra).items():
        writer.add_tensor(name, array)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def write_gpt_oss(model: Any, folder: Path, file: Path, kind: Q = Q.F32) -> None:
    """Write a gpt-oss model whose folder has MXFP4 experts. kind: of the matrices of attention whose rows
    have whole blocks."""
    writer = gguf.GGUFWriter(file, "gpt-oss")
    _add_settings(writer, model)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_scales"):
            continue

        if ".experts." not in name:
            array = tensor.numpy()
            has_blocks = "_proj.weight" in name and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            stored = kind if has_blocks else Q.F32
            writer.add_tensor(_gpt_oss_name(name), gguf.quants.quantize(array, stored), raw_dtype=stored)
            continue

        place, _, projection = name.partition(".mlp.experts.")
        layer = place.rpartition(".")[2]
        parts = {"down": tensor}
        if projection.startswith("gate_up"):
            parts = {"gate": tensor[:, 0::2], "up": tensor[:, 1::2]}
        if name.endswith("_bias"):
            for part, bias in parts.items():
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.bias", bias.numpy().copy())
            continue

        scales = load_file(folder / "model.safetensors")[name.removesuffix("blocks") + "scales"]
        rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
        for part, blocks in parts.items():
            raw = _mxfp4_blocks(blocks.numpy(), scales[:, rows[part]].numpy())
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", raw, raw_dtype=Q.MXFP4)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _mxfp4_blocks(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Blocks as files have them, [experts, rows, bytes], of codes [experts, rows, blocks, 16] whose bytes
    have neighbours."""
    numbers = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], 32)
    halves = numbers[..., :16] | (numbers[..., 16:] << 4)
    return np.concatenate((scales[..., None], halves), axis=-1).reshape(*scales.shape[:2], -1)


def _gpt_oss_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if suffix == "sinks":
        return f"blk.{module.split('.')[2]}.attn_sinks.weight"

    return _gguf_name("gpt-oss", module, suffix)


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    """The parameters, with gate and up projections of experts apart, as files have them."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith(".mlp.experts.gate_up_proj"):
            gate, up = parameter.detach().chunk(2, dim=1)
            prefix = name.removesuffix("gate_up_proj")
            found |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        else:
            found[name if name.endswith(("weight", "bias")) else f"{name}.weight"] = parameter.detach()
    scalars = {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}
    return found | {f"{name}.weight": buffer for name, buffer in scalars.items()}


def _random_blocks(name: str, shape: tuple[int, ...], kind: Q) -> npt.NDArray[np.uint8]:
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    *rows, columns = shape
    blocks = np.random.default_rng(crc32(name.encode())).integers(
        0, 256, (*rows, columns // block_size, num_bytes), dtype=np.uint8
    )
    for place, scale in K_SCALES[kind].items():
        blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*rows, -1)


def _add_settings(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type != "gemma4_text":  # whose sizes are those of layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(9)
    writer.add_chat_template("{{ messages }}")
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])

    match config.model_type:
        case "mistral" | "phi3":
            writer.add_sliding_window(config.sliding_window or 0)
        case "gemma3_text":
            writer.add_sliding_window(config.sliding_window)
            writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
            writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
        case "gemma4_text":
            _add_gemma4_settings(writer, model)
        case "gpt_oss":
            writer.add_sliding_window(config.sliding_window)
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.intermediate_size)
        case "mixtral":
            writer.add_sliding_window(config.sliding_window or 0)
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
        case "qwen3_moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        case "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)

    if config.model_type == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)


def _add_gemma4_settings(writer: gguf.GGUFWriter, model: Any) -> None:
    """Lists have an entry for each layer; sizes that are equal in all layers are numbers."""
    config, layers, kinds = model.config, model.model.layers, model.config.layer_types
    widths = [layer.mlp.gate_proj.weight.shape[0] for layer in layers]
    heads: dict[str, int] = dict(zip(kinds, (layer.self_attn.head_dim for layer in layers), strict=True))
    kept = layers[: len(kinds) - config.num_kv_shared_layers]
    rows = {kind: layer.self_attn.k_proj.weight.shape[0] for kind, layer in zip(kinds, kept, strict=False)}
    num_kv_heads = [rows[kind] // heads[kind] for kind in kinds]
    for add, numbers in (
        (writer.add_feed_forward_length, widths),
        (writer.add_head_count_kv, num_kv_heads),
    ):
        add(numbers if len(set(numbers)) > 1 else numbers[0])
    for kind, suffix in (("full_attention", ""), ("sliding_attention", "_swa")):
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"gemma4.{name}{suffix}", heads.get(kind, 8))
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _rope_factors(model: Any) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors of rope factors, for the two scalings that are stored in this form."""
    rope = model.config.rope_parameters
    if model.config.model_type == "gemma4_text":
        frequencies = model.model.rotary_emb.full_attention_inv_freq
        return {"rope_freqs.weight": np.where(frequencies > 0, 1.0, 1e30).astype(np.float32)}

    if rope.get("rope_type") == "llama3":
        frequencies = model.model.rotary_emb.inv_freq
        plain = inverse_frequencies(2 * len(frequencies), rope["rope_theta"], None)
        return {"rope_freqs.weight": (plain / frequencies).numpy()}

    if rope.get("rope_type") == "longrope":
        sets = ("short", "long")
        return {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in sets}

    return {}


def _permute(array: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The order of rows that llama.cpp's converter writes: row 2i of a head is row i of the model, and row
    2i + 1 is row i + head_dim / 2."""
    head_dim = array.shape[0] // num_heads
    order = [
        h * head_dim + i + half
        for h in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, head_dim // 2)
    ]
    return array[order]


def _gguf_name(architecture: str, module: str, suffix: str) -> str:
    others = {"gemma3": GEMMA_NAMES, "gemma4": GEMMA4_NAMES, "gpt-oss": GPT_OSS_NAMES}
    names = others.get(architecture, NAMES)
    if module in names:
        return f"{names[module]}.{suffix}"

    _, _, layer, rest = module.split(".", 3)
    own = names[rest]
    return f"blk.{layer}.{own}" if own.endswith(".scale") else f"blk.{layer}.{own}.{suffix}"
