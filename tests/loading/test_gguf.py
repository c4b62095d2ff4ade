"""GGUF files: metadata, all quantisations, the order of rows, and invalid files."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from decoder_parity import assert_parity, load_decoder, random_tokens
from gguf import GGMLQuantizationType as Q
from gguf_files import write_gguf
from model_zoo import make_model
from msgspec import structs

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.gguf import GGUFFile
from drift_sdk.loading.source import Source, eos_token_ids, resolve
from drift_sdk.spec.rope import FrequencyFactors

# Indices of models in the zoo. Their widths are 32, 64 or 96, so that the rows of most matrices are whole
# blocks.
LLAMA_BIASED, LLAMA_TIED, LLAMA3, QWEN2, QWEN3 = 7, 4, 1, 12, 18
LLAMA_PLAIN = 6
WRITTEN = (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1)
K_QUANTS = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)


@pytest.mark.parametrize("index", [LLAMA_BIASED, LLAMA_TIED, QWEN2, QWEN3])
@pytest.mark.parametrize("quantisation", WRITTEN, ids=lambda kind: kind.name)
def test_decoder_equals_transformers_on_dequantised_weights(
    index: int, quantisation: Q, tmp_path: Path
) -> None:
    model = make_model(index, tmp_path / "hf")
    stored = write_gguf(model, tmp_path / "model.gguf", quantisation)
    kinds = [tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors]
    assert kinds.count(quantisation) >= 4 * model.config.num_hidden_layers
    tensors = GGUFFile(tmp_path / "model.gguf")
    expected = dict(stored.named_parameters())
    assert set(tensors.names()) == set(expected)
    for name, parameter in expected.items():
        assert tensors.get(name).dtype == torch.float32
        assert tensors.shape(name) == tuple(parameter.shape)
        assert torch.equal(tensors.get(name), parameter), name
        assert_read_in_place(tensors, name, parameter)

    decoder = load_decoder(tmp_path / "model.gguf")
    assert_parity(decoder, stored, random_tokens(decoder.spec, 24), (20, 1, 3))


@pytest.mark.parametrize("quantisation", K_QUANTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 3, 800])
def test_k_quants(quantisation: Q, num_rows: int, tmp_path: Path) -> None:
    """Random blocks with finite float16 scales, fewer and more than are dequantised at a time."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    raw = np.random.default_rng(0).integers(0, 255, (num_rows, 2 * block_bytes), dtype=np.uint8)
    raw = raw & 0x3F  # a float16 without the top bit of its exponent is finite
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.quants.dequantize(raw, quantisation)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = GGUFFile(tmp_path / "k.gguf")
    assert tensors.shape(name) == expected.shape == (num_rows, 2 * block_size)
    assert np.isfinite(expected).all() and np.abs(expected).max() > 0
    assert torch.equal(tensors.get(name), torch.from_numpy(expected))
    assert_read_in_place(tensors, name, torch.from_numpy(expected))


def assert_read_in_place(tensors: GGUFFile, name: str, expected: torch.Tensor) -> None:
    """A tensor is rounded once, from float32, to the dtype of its place; bytes are no place for it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        place = torch.full(expected.shape, torch.nan, dtype=dtype)
        tensors.read_into(name, place)
        assert torch.equal(place, expected.to(dtype))
    with pytest.raises(ModelLoadError, match=f"tensor {name} is stored as torch.float32, expected uint8"):
        tensors.read_into(name, torch.empty(expected.shape, dtype=torch.uint8))


def test_frequency_factors_are_llama3_scaling(tmp_path: Path) -> None:
    stored = write_gguf(make_model(LLAMA3, tmp_path / "hf"), tmp_path / "model.gguf")
    decoder = load_decoder(tmp_path / "model.gguf")
    scaling = decoder.spec.ropes[0].scaling
    assert isinstance(scaling, FrequencyFactors) and max(scaling.factors) == pytest.approx(4.0)
    assert_parity(decoder, stored, random_tokens(decoder.spec, 24), (24,))


def test_frequency_factors_beside_another_scaling_are_rejected(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    _small(tmp_path / "m.gguf", tensor="rope_freqs.weight", **metadata)
    with pytest.raises(ModelLoadError, match="rope_freqs.weight beside rope scaling 'linear'"):
        GGUFFile(tmp_path / "m.gguf")


def test_config_and_tokenizer(tmp_path: Path) -> None:
    write_gguf(make_model(LLAMA_PLAIN, tmp_path / "hf"), tmp_path / "model.gguf")
    source = resolve(tmp_path / "model.gguf")
    found = read_spec(source.config)
    expected = read_spec(resolve(tmp_path / "hf").config)
    assert found.final_norm.eps == pytest.approx(expected.final_norm.eps, rel=1e-6)
    layers = tuple(structs.replace(layer, norm=found.final_norm) for layer in expected.layers)
    assert found == structs.replace(expected, final_norm=found.final_norm, layers=layers)

    assert eos_token_ids(source, 100) == (7, 9)
    assert source.chat_templates == {"default": "{{ messages }}"}
    assert source.generation_config == {}


def _small(
    file: Path, architecture: str = "llama", tensor: str = "output_norm.weight", **metadata: Any
) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in metadata.items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)

    writer.add_tensor(tensor, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2'"),
        ({"architecture": "granitemoe"}, "architecture 'granitemoe'"),
        ({"architecture": "qwen2", "qwen2.expert_count": 8}, "qwen2.expert_count=8"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"architecture": "qwen3", "qwen3.attention.sliding_window": 128}, "sliding_window=128"),
        ({"architecture": "gemma3", "gemma3.final_logit_softcapping": 30.0}, "softcapping=30.0"),
        ({"architecture": "smollm3", "smollm3.attention.scale": 0.5}, "smollm3.attention.scale=0.5"),
        ({"llama.attention.key_length": 64, "llama.rope.dimension_count": 32}, "rope.dimension_count=32"),
        ({"split.count": 3}, "split.count=3, expected a name that ends"),
    ],
)
def test_metadata_that_is_not_implemented_is_rejected(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _small(tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(tmp_path / "m.gguf")

    assert message in str(caught.value) and str(tmp_path / "m.gguf") in str(caught.value)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "rope_type='yarn'"),
        ({"llama.attention.head_count": [4, 4]}, "num_attention_heads"),
    ],
)
def test_settings_that_are_not_implemented_are_rejected_by_the_config(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shapes = {"embedding_length": 8, "attention.head_count": 2, "attention.key_length": 4}
    shapes |= {"block_count": 1, "context_length": 8}
    _small(tmp_path / "m.gguf", **({f"llama.{key}": value for key, value in shapes.items()} | metadata))
    with pytest.raises(ModelLoadError, match=message):
        read_spec(GGUFFile(tmp_path / "m.gguf").config)


def test_linear_scaling(tmp_path: Path) -> None:
    _small(tmp_path / "new.gguf", **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    _small(tmp_path / "old.gguf", **{"llama.rope.scale_linear": 4.0})
    for file in ("new.gguf", "old.gguf"):
        rope = GGUFFile(tmp_path / file).config["rope_parameters"]
        assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)


def test_unknown_tensor_is_rejected_by_its_name_in_the_file(tmp_path: Path) -> None:
    model = make_model(QWEN2, tmp_path / "hf")
    write_gguf(model, tmp_path / "model.gguf", **{"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(
        ModelLoadError, match=r"model\.gguf: tensor blk\.0\.attn_sinks\.weight of shape \[4\]"
    ):
        load_decoder(tmp_path / "model.gguf")


def test_metadata_equals_the_gguf_package(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    _small(
        file,
        **{
            "a.string": "é" * 9,
            "a.float": 0.1,
            "an.int": 2**32 - 1,
            "some.strings": ["x", "", "ÿ"],
            "some.ints": [3, -4],
            "some.floats": [0.5, 1e9],
        },
    )
    found = GGUFFile(file).metadata
    reader = gguf.GGUFReader(file)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert found == expected


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    _small(tmp_path / "whole.gguf", **{"a.string": "text", "some.ints": [1, 2], "some.strings": ["a", "b"]})
    data = (tmp_path / "whole.gguf").read_bytes()
    # The file ends in padding that no tensor needs.
    end = gguf.GGUFReader(tmp_path / "whole.gguf").tensors[0].data_offset + 8 * 4
    file = tmp_path / "cut.gguf"
    for length in range(end):
        file.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf: not a whole GGUF file"):
            GGUFFile(file)

    file.write_bytes(data[:end])
    assert GGUFFile(file).get("model.norm.weight").tolist() == [1.0] * 8


@pytest.mark.parametrize(
    "offset, patch", [(0, b"GGML"), (4, struct.pack("<I", 1)), (4, struct.pack(">I", 3)), (16, b"\xff" * 8)]
)
def test_corrupt_header(offset: int, patch: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    _small(file)
    data = bytearray(file.read_bytes())
    data[offset : offset + len(patch)] = patch
    file.write_bytes(data)
    with pytest.raises(ModelLoadError, match="not a whole GGUF file"):
        GGUFFile(file)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _header(*parts: bytes, num_tensors: int = 0, num_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(parts)


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _tensor(name: bytes = b"a", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _string(name) + sizes + struct.pack("<IQ", kind, offset)


UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
NESTED = struct.pack("<IQ", ARRAY, 1) * 100_000
HEADERS = {
    "2^60 keys": (_header(num_keys=2**60), "truncated"),
    "2^60 tensors": (_header(num_tensors=2**60), "truncated"),
    "all zeros": (_header(b"\0" * 10**6, num_keys=2**60), "'' occurs twice"),
    "long string": (_header(struct.pack("<Q", 2**60), num_keys=1), "a string of 1152921504606846976 bytes"),
    "string behind the end": (_header(struct.pack("<Q", 2**20), num_keys=1), "a string ends at"),
    "2^60 strings": (
        _header(_key(b"k", ARRAY, struct.pack("<IQ", STRING, 2**60)), num_keys=1),
        "an array ends at",
    ),
    "2^60 bytes": (_header(_key(b"k", ARRAY, struct.pack("<IQ", 0, 2**60)), num_keys=1), "an array ends at"),
    "2^25 bytes": (
        _header(_key(b"k", ARRAY, struct.pack("<IQ", 0, 2**25) + b"\0" * 2**25), num_keys=1),
        "arrays of 33554432 items, expected at most 4194304",
    ),
    "nested arrays": (_header(_key(b"k", ARRAY, NESTED), num_keys=1), "array of arrays"),
    "unknown kind": (_header(_key(b"k", 99, b""), num_keys=1), "unknown kind of value 99"),
    "repeated key": (_header(*[_key(b"k", 0, b"\0")] * 2, num_keys=2), "'k' occurs twice"),
    "key is no text": (_header(_key(b"\xff", 0, b"\0"), num_keys=1), "utf-8"),
    "alignment 0": (
        _header(_key(b"general.alignment", UINT32, struct.pack("<I", 0)), num_keys=1),
        "general.alignment=0, expected a power of two",
    ),
    "alignment 24": (
        _header(_key(b"general.alignment", UINT32, struct.pack("<I", 24)), num_keys=1),
        "general.alignment=24, expected a power of two",
    ),
    "alignment in words": (
        _header(_key(b"general.alignment", STRING, _string(b"32")), num_keys=1),
        "general.alignment='32', expected a power of two",
    ),
    "repeated tensor": (
        _header(_tensor(), _tensor(offset=32), b"\0" * 128, num_tensors=2),
        "'a' occurs twice",
    ),
    "overlap": (_header(_tensor(), _tensor(b"b"), b"\0" * 128, num_tensors=2), "'a' and 'b' overlap"),
    "offset behind the end": (_header(_tensor(offset=2**63), num_tensors=1), "tensor 'a' ends at"),
    "2^124 numbers": (_header(_tensor(shape=(2**62, 2**62)), num_tensors=1), "tensor 'a' ends at"),
    "5 dimensions": (_header(_tensor(shape=(1,) * 5), num_tensors=1), "'a' has 5 dimensions"),
    "no dimension": (_header(_tensor(shape=()), num_tensors=1), "'a' has 0 dimensions"),
    "no numbers": (_header(_tensor(shape=(8, 0)), num_tensors=1), "'a' has a dimension of 0"),
    "type 999": (_header(_tensor(kind=999), num_tensors=1), "'a' is stored as type 999"),
    "a part of a block": (_header(_tensor(kind=2), num_tensors=1), "rows of 8, expected a multiple of 32"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_wrong_headers(name: str, tmp_path: Path) -> None:
    data, message = HEADERS[name]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelLoadError, match="not a whole GGUF file") as caught:
        GGUFFile(tmp_path / "m.gguf")
    assert message in str(caught.value) and len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"general.architecture": ["llama"]}, r"architecture \['llama'\]"),
        ({"general.architecture": "x" * 10**6}, "architecture 'xxx"),
        ({"split.count": "3"}, "split.count='3', expected a name"),
        ({"tokenizer.ggml.eos_token_id": ["7"]}, r"tokenizer.ggml.eos_token_id=\['7'\]: expected a token id"),
    ],
)
def test_metadata_of_the_wrong_type(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"general.architecture": "llama"} | metadata
    keys = []
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        text = b"".join(_string(item.encode()) for item in items)
        head = struct.pack("<IQ", STRING, len(items)) if isinstance(value, list) else b""
        keys.append(_key(key.encode(), ARRAY if isinstance(value, list) else STRING, head + text))
    (tmp_path / "m.gguf").write_bytes(_header(*keys, num_keys=len(keys)))
    with pytest.raises(ModelLoadError, match=message) as caught:
        GGUFFile(tmp_path / "m.gguf")
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("head_dim", [8, 64, [16]])
def test_misshapen_frequency_factors(head_dim: Any, tmp_path: Path) -> None:
    _small(tmp_path / "m.gguf", tensor="rope_freqs.weight", **{"llama.attention.key_length": head_dim})
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight has shape \[8\]"):
        GGUFFile(tmp_path / "m.gguf")


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    data = _header(
        _key(b"general.architecture", STRING, _string(b"llama")),
        _key(b"llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-6)),
        _tensor(b"output_norm.weight"),
        _tensor(b"model.norm.weight", offset=32),
        b"\0" * 128,
        num_tensors=2,
        num_keys=2,
    )
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelLoadError, match="output_norm.weight and model.norm.weight are the same"):
        GGUFFile(tmp_path / "m.gguf")


def test_scales_that_are_not_finite_are_read_without_warning(tmp_path: Path) -> None:
    """The code that loads weights rejects them."""
    raw = np.full((1, 34), 0xFF, np.uint8)  # Q8_0: a scale of NaN
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("output_norm.weight", raw, raw_dtype=Q.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(tmp_path / "m.gguf").get("model.norm.weight").isnan().all()


def test_named_chat_templates(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    _small(tmp_path / "m.gguf", **{key: "d", f"{key}s": ["tool_use", "lost"], f"{key}.tool_use": "t"})
    assert resolve(tmp_path / "m.gguf").chat_templates == {"default": "d", "tool_use": "t"}


def test_file_truncated_after_opening_is_named(tmp_path: Path) -> None:
    _small(tmp_path / "m.gguf")
    tensors = GGUFFile(tmp_path / "m.gguf")
    with (tmp_path / "m.gguf").open("r+b") as stored:
        stored.truncate(64)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: cannot be read: the file has become shorter"):
        tensors.get("model.norm.weight")


CUTS_WHILE_READING = """
import os, sys
from pathlib import Path
from drift_sdk.errors import ModelLoadError
from drift_sdk.loading import gguf_file
from drift_sdk.loading.gguf_file import GGUFParts

layout = gguf_file._layout

def cut(kind):
    os.truncate(sys.argv[1], 8192)
    return layout(kind)

gguf_file._layout = cut
try:
    GGUFParts(Path(sys.argv[1]))
except ModelLoadError as error:
    print(error)
"""


def test_file_truncated_while_its_header_is_read_kills_nothing(tmp_path: Path) -> None:
    """A mapping would, where a page is no longer in the file."""
    file, many = tmp_path / "m.gguf", 2**22
    file.write_bytes(_header(_key(b"k", ARRAY, struct.pack("<IQ", 0, many) + bytes(many)), num_keys=1))
    child = subprocess.run(
        [sys.executable, "-c", CUTS_WHILE_READING, str(file)], capture_output=True, text=True, check=True
    )
    assert child.stdout.startswith(f"{file}: not a whole GGUF file: truncated at byte ")


def test_files_are_closed_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _small(tmp_path / "m.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    opened: list[int] = []
    open_file = os.open

    def noting(path: Path, flags: int) -> int:
        opened.append(open_file(path, flags))
        return opened[-1]

    monkeypatch.setattr("drift_sdk.loading.gguf_file.os.open", noting)
    tensors = GGUFFile(tmp_path / "m.gguf")
    os.fstat(opened[0])
    del tensors
    with pytest.raises(ModelLoadError):
        GGUFFile(tmp_path / "bad.gguf")
    gc.collect()
    for descriptor in opened:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_arrays_are_bounded_together(tmp_path: Path) -> None:
    half = struct.pack("<IQ", 0, 2**21 + 1) + b"\0" * (2**21 + 1)
    keys = [_key(name, ARRAY, half) for name in (b"a", b"b")]
    (tmp_path / "m.gguf").write_bytes(_header(*keys, num_keys=2))
    with pytest.raises(ModelLoadError, match="arrays of 4194306 items, expected at most 4194304"):
        GGUFFile(tmp_path / "m.gguf")


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    """A default would give another model."""
    data = _header(
        _key(b"general.architecture", STRING, _string(b"llama")), _tensor(), num_tensors=1, num_keys=1
    )
    (tmp_path / "m.gguf").write_bytes(data + b"\0" * 128)
    with pytest.raises(ModelLoadError, match=r"llama\.attention\.layer_norm_rms_epsilon is missing"):
        GGUFFile(tmp_path / "m.gguf")
    for architecture, key in (("qwen3moe", "expert_count"), ("gpt-oss", "expert_count")):
        _small(tmp_path / "m.gguf", architecture)
        with pytest.raises(ModelLoadError, match=rf"{architecture}\.{key} is missing"):
            GGUFFile(tmp_path / "m.gguf")
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    _small(tmp_path / "m.gguf", "gpt-oss", **{f"gpt-oss.{key}": value for key, value in experts.items()})
    with pytest.raises(ModelLoadError, match=r"gpt-oss\.attention\.sliding_window is missing"):
        GGUFFile(tmp_path / "m.gguf")


def test_factor_of_attention_is_1_or_rejected(tmp_path: Path) -> None:
    _small(tmp_path / "m.gguf", **{"llama.rope.scaling.attn_factor": 1.0})
    assert GGUFFile(tmp_path / "m.gguf").config["rope_parameters"]["rope_type"] == "default"
    _small(tmp_path / "m.gguf", **{"llama.rope.scaling.attn_factor": 2.0})
    with pytest.raises(ModelLoadError, match=r"llama\.rope\.scaling\.attn_factor=2\.0 is not implemented"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("scale", [-1.0, 1e-30, float("inf")])
def test_scale_of_attention_is_bounded(scale: float, tmp_path: Path) -> None:
    _small(tmp_path / "m.gguf", "gemma3", **{"gemma3.attention.scale": scale})
    with pytest.raises(ModelLoadError, match=r"gemma3\.attention\.scale=.*, expected 1e-06 to 1e\+06"):
        GGUFFile(tmp_path / "m.gguf")


def test_ends_of_a_file(tmp_path: Path) -> None:
    """Whatever the type of their tokens."""
    file, tokens = tmp_path / "m.gguf", ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_eos_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert eos_token_ids(Source(file), len(tokens)) == (3, 5)
