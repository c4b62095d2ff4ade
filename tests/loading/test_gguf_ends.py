"""Tokens that end a completion of a model in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.source import Source, eos_token_ids, gguf_eos_token_ids

GEMMA3 = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
GEMMA4 = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"]
PHI3 = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>"]
GPT_OSS = ["a", "b", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>"]
LLAMA3 = ["a", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
QWEN = ["a", "<|im_end|>", "<|im_start|>", "<|endoftext|>"]


def _metadata(tokens: list[str], **ids: Any) -> dict[str, Any]:
    return {"tokenizer.ggml.tokens": tokens} | {f"tokenizer.ggml.{name}": ids[name] for name in ids}


@pytest.mark.parametrize(
    "tokens, named, expected",
    [
        (GEMMA3, 1, {1, 5}),
        (GEMMA4, 1, {1, 4, 5}),
        (PHI3, 3, {3, 5}),
        (GPT_OSS, 3, {2, 3, 4}),
        (GPT_OSS, 5, {2, 3, 4}),
        (LLAMA3, 3, {2, 3}),
        (QWEN, 1, {1, 3}),
    ],
)
def test_ends_by_text(tokens: list[str], named: int, expected: set[int]) -> None:
    """Files of llama.cpp's converter name one end. `<|end|>` of gpt-oss ends a message, not the answer."""
    ids = gguf_eos_token_ids(_metadata(tokens, eos_token_id=named), "m.gguf")
    assert set(ids) == expected and len(ids) == len(expected)


def test_ends_by_id() -> None:
    keys = {"eos_token_id": 7, "eot_token_id": 9, "eom_token_id": 7, "eos_token_ids": [9, 8]}
    assert gguf_eos_token_ids(_metadata(["a"], **keys), "m.gguf") == [7, 9, 8]
    assert gguf_eos_token_ids({}, "m.gguf") == []


@pytest.mark.parametrize("ids", [["7"], "7", [True], [[7]]])
def test_ends_that_are_no_ids(ids: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"m.gguf: tokenizer.ggml.eos_token_ids=.*: expected a token id"):
        gguf_eos_token_ids(_metadata(["a"], eos_token_ids=ids), "m.gguf")


def test_ends_of_a_file(tmp_path: Path) -> None:
    """Whatever the type of their tokens."""
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PHI3)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(PHI3))
    writer.add_eos_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert eos_token_ids(Source(file), len(PHI3)) == (3, 5)
