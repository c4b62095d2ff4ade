"""GGUF files of small random models, whole or in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from drift_sdk.testing import EOS_TOKEN_ID, byte_alphabet

__all__ = ["write_gguf"]


def write_gguf(
    model: Any,
    file: Path,
    *,
    max_tensors: int = 0,
    has_tokenizer: bool = True,
    tensors: dict[str, npt.NDArray[np.float32]] | None = None,
) -> list[Path]:
    """Write a Qwen3 model of transformers in float32; returns the file, or its parts in order.

    max_tensors:   most tensors of a part; 0 = one file.
    has_tokenizer: with a vocabulary of bytes.
    tensors:       further tensors, by their names in the file.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen3", split_max_tensors=max_tensors)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(EOS_TOKEN_ID)
    if has_tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*byte_alphabet(), "<eos>", "ab"])
        writer.add_token_types([1] * 256 + [3, 1])
        writer.add_array("tokenizer.ggml.merges", ["a b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, parameter.detach().numpy())
    for stored, array in (tensors or {}).items():
        writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(file.parent.glob(f"{file.stem}*.gguf"))
