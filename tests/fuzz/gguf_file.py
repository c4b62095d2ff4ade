"""GGUF files: a valid file with some bytes changed, and random headers."""

from __future__ import annotations

import math
import struct
import tempfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import strategies as st

from drift_sdk.families import read_spec
from drift_sdk.loading.gguf import GGUFFile
from drift_sdk.loading.source import Source, eos_token_ids

TOKENS = ["<s>", "</s>", "a", "b", "ab", "\u0120", "\u0120a"]
FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "model.gguf"
MAX_ELEMENTS = 2**16


def _whole(tokenizer: str) -> bytes:
    writer = GGUFWriter(FILE, "llama")
    for key, number in (
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
    ):
        writer.add_uint32(f"llama.{key}", number)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
    writer.add_token_scores([0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    writer.add_token_merges(["a b", "\u0120 a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", np.zeros((7, 32), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    quantised = np.zeros((32, 34), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", quantised, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return FILE.read_bytes()


WHOLE = [_whole(tokenizer) for tokenizer in ("gpt2", "llama")]
KEYS = (
    *("general.architecture", "general.alignment", "split.count", "llama.block_count", "tokenizer.ggml.pre"),
    *("llama.attention.head_count", "llama.attention.key_length", "llama.rope.scaling.type", "tokenizer.x"),
    *("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores"),
    *("tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token"),
    *("tokenizer.ggml.unknown_token_id", "tokenizer.chat_template", "llama.embedding_length"),
    *("llama.attention.sliding_window", "llama.rope.dimension_count", "llama.attention.scale"),
)
NAMES = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "token_embd.weight",
    "blk.0.attn_q.weight",
    "blk.0.ffn_up.weight",
    "x",
)
SIZES = (0, 1, 8, 16, 32, 256, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)
TEXTS = (
    "llama",
    "phi3",
    "gemma3",
    "granite",
    "gpt2",
    "qwen2",
    "gpt-2",
    "llama-bpe",
    "linear",
    "a b",
    "a",
    "b",
    "ab",
    "",
)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


counts = st.integers(0, 4) | st.sampled_from(SIZES)
strings = (st.sampled_from(TEXTS).map(str.encode) | st.binary(max_size=6)).map(_string)
scalars = st.binary(min_size=1, max_size=8)
kinds = st.integers(0, 13).map(lambda kind: struct.pack("<I", kind))
items = st.lists(strings, max_size=8).map(lambda texts: struct.pack("<IQ", 8, len(texts)) + b"".join(texts))
arrays = items | st.tuples(kinds, counts.map(lambda count: struct.pack("<Q", count)), scalars).map(b"".join)
sized = st.sampled_from([(0, 1), (1, 1), (2, 2), (4, 4), (5, 4), (6, 4), (7, 1), (10, 8), (12, 8)])


def _scalars(kind: tuple[int, int]) -> st.SearchStrategy[tuple[bytes, bytes]]:
    """A type of GGUF metadata and a value of it: a small one, or arbitrary bytes."""
    size = kind[1]
    small = st.integers(0, 9).map(lambda value: value.to_bytes(size, "little"))
    return st.tuples(st.just(struct.pack("<I", kind[0])), small | st.binary(min_size=size, max_size=size))


whole = sized.flatmap(_scalars).map(b"".join)
numbers = st.tuples(sized.flatmap(_scalars), st.integers(0, 9)).map(
    lambda drawn: drawn[0][0] + struct.pack("<Q", drawn[1]) + drawn[0][1] * drawn[1]
)
typed = (
    whole
    | strings.map(lambda text: struct.pack("<I", 8) + text)
    | (numbers | arrays).map(lambda array: struct.pack("<I", 9) + array)
)
names = st.sampled_from(KEYS).map(lambda key: _string(key.encode())) | strings
entries = st.tuples(names, typed).map(b"".join)
shapes = st.lists(counts, max_size=5).map(lambda shape: struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
places = st.tuples(st.integers(0, 42), counts).map(lambda place: struct.pack("<IQ", *place))
tensors = st.tuples(
    st.sampled_from(NAMES).map(lambda name: _string(name.encode())) | strings, shapes, places
).map(b"".join)
LLAMA = _string(b"general.architecture") + struct.pack("<I", 8) + _string(b"llama")


def _header(parts: tuple[list[bytes], list[bytes], int, int, int]) -> bytes:
    keys, entries, extra_tensors, extra_keys, num_bytes = parts
    counts = struct.pack(
        "<IQQ", 3, (len(entries) + extra_tensors) % 2**64, (1 + len(keys) + extra_keys) % 2**64
    )
    return b"GGUF" + counts + LLAMA + b"".join(keys) + b"".join(entries) + b"\0" * num_bytes


extras = st.just(0) | st.sampled_from([-1, 1, 2**60])
headers = st.tuples(
    st.lists(entries, max_size=8), st.lists(tensors, max_size=3), extras, extras, st.integers(0, 4096)
).map(_header)
edits = st.lists(
    st.tuples(st.integers(0, len(WHOLE[0])), st.binary(min_size=1, max_size=2)), min_size=1, max_size=2
)


def _edit(parts: tuple[bytes, list[tuple[int, bytes]], int | None]) -> bytes:
    data, edits, size = bytearray(parts[0]), parts[1], parts[2]
    for start, patch in edits:
        data[start : start + len(patch)] = patch
    return bytes(data[:size])


def _other_value(parts: tuple[bytes, str, bytes]) -> bytes:
    """Give a key another value: the existing entry is renamed, and a new one with the value is added."""
    data, key, value = parts
    name = key.encode()
    counts = struct.unpack_from("<QQ", data, 8)
    data = data.replace(_string(name), _string(b"x" * len(name)), 1)
    header = data[:8] + struct.pack("<QQ", counts[0], counts[1] + 1) + _string(name) + value
    padding = -(len(header) - 24) % 32  # the tensors stay aligned
    filler = _key_of(padding)
    return header[:16] + struct.pack("<Q", counts[1] + 1 + bool(filler)) + header[24:] + filler + data[24:]


def _key_of(num_bytes: int) -> bytes:
    """A key and value of `num_bytes` bytes, or 32 more."""
    num_bytes += 32 if 0 < num_bytes < 16 else 0
    return _string(b"f" * (num_bytes - 13)) + struct.pack("<IB", 0, 0) if num_bytes else b""


others = st.tuples(st.sampled_from(WHOLE), st.sampled_from(KEYS), typed).map(_other_value)
cuts = st.tuples(st.sampled_from(WHOLE), edits, st.none() | st.none() | st.integers(0, len(WHOLE[0]))).map(
    _edit
)
strategy: st.SearchStrategy[bytes] = headers | others | others | cuts


def run(data: bytes) -> None:
    FILE.write_bytes(data)
    source = Source(FILE)
    tensors = source.tensors()
    assert isinstance(tensors, GGUFFile)
    for name in tensors.names():
        if math.prod(tensors.shape(name)) <= MAX_ELEMENTS and ".self_attn." not in name:
            numbers = tensors.get(name)
            assert tuple(numbers.shape) == tensors.shape(name)
            weight = tensors.quantised(name, numbers.device)
            assert (weight is None) == (tensors.quantised_bytes(name) is None)
            if weight is not None:
                found = weight.dequantise(numbers.dtype)
                assert weight.nbytes == tensors.quantised_bytes(name)
                assert torch.equal(found.nan_to_num(7.0), numbers.nan_to_num(7.0))

    assert isinstance(source.chat_templates, dict)
    eos_token_ids(source, 7)
    tokenizer = source.tokenizer()
    tokenizer.decode(tokenizer.encode("ab a<s>"))
    read_spec(source.config)
