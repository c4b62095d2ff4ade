"""Folders of safetensors: a single file, shards, and invalid files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import make_model
from safetensors.torch import save_file

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading import safetensors
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from drift_sdk.loading.source import Source
from drift_sdk.models.decoder import Decoder

SHARDED, SINGLE = 0, 1


@pytest.mark.parametrize("index", [SHARDED, SINGLE])
def test_all_tensors_are_read(index: int, tmp_path: Path) -> None:
    model = make_model(index, tmp_path)
    tensors = SafetensorsFolder(tmp_path)
    expected = model.state_dict()
    assert set(tensors.names()) == set(expected)
    assert (len({tensors.file(name) for name in tensors.names()}) > 1) == (index == SHARDED)
    for name, tensor in expected.items():
        assert tensors.shape(name) == tuple(tensor.shape)
        assert torch.equal(tensors.get(name), tensor)
        assert Path(tensors.file(name)).parent == tmp_path


@pytest.mark.parametrize("index", [SHARDED, SINGLE])
@pytest.mark.parametrize("damage", ["truncated", "cut header", "corrupt header", "empty", "missing"])
def test_broken_file_is_named(index: int, damage: str, tmp_path: Path) -> None:
    make_model(index, tmp_path)
    file = max(tmp_path.glob("model*.safetensors"))
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            {
                "truncated": data[:-1],
                "cut header": data[:40],
                "corrupt header": data[:8] + b"?" * 8 + data[16:],
                "empty": b"",
            }[damage]
        )

    with pytest.raises(ModelLoadError) as caught:
        SafetensorsFolder(tmp_path)

    named = SINGLE_FILE if damage == "missing" and index == SINGLE else str(file)
    assert named in str(caught.value)


ENTRY = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
OTHER = '{"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    "header",
    [
        f'{{"a": {ENTRY}, "a": {OTHER}}}',
        f'{{"a": {ENTRY}, "a": {ENTRY}}}',
        f'{{"a": {ENTRY}, "\\u0061": {ENTRY}}}',
        f'{{"__metadata__": {{"data_offsets": "x"}}, "a": {ENTRY}, "a": {ENTRY}}}',
    ],
)
def test_names_that_a_header_has_twice_are_refused(header: str, tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE_FILE, header.encode())
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: 'a' is in the header twice, expected it"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["a", "data_offsets", "\u00e4", 'a"', "\\", "dtype"])
def test_names_of_any_letters_are_read(name: str, tmp_path: Path) -> None:
    for written in (json.dumps(name), json.dumps(name, ensure_ascii=False)):
        metadata = '{"format": "pt", "data_offsets": "a\\n"}'
        header = f'{{"__metadata__": {metadata}, {written}: {ENTRY}}}'
        write_header(tmp_path / SINGLE_FILE, header.encode())
        assert list(SafetensorsFolder(tmp_path).names()) == [name]


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": 1}}', "{}", "\udcff"])
def test_broken_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match="not an index"):
        SafetensorsFolder(tmp_path)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"x\.safetensors: tensor b is missing"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [24, 1 << 20])
def test_read_into_equals_a_copy(
    stored: torch.dtype,
    wanted: torch.dtype,
    chunk_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", chunk_bytes)
    numbers = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)).to(stored)
    save_file({"first": numbers[0], "second": numbers[1], "vector": numbers[2, 0]}, tmp_path / SINGLE_FILE)
    tensors = SafetensorsFolder(tmp_path)
    for name, expected in (("vector", numbers[2, 0]), ("second", numbers[1]), ("first", numbers[0])):
        whole = torch.full((3, *expected.shape), -9.0, dtype=wanted)
        tensors.read_into(name, whole[1])
        assert torch.equal(whole[1], expected.to(wanted))
        assert (whole[0] == -9.0).all() and (whole[2] == -9.0).all()


def test_integers_are_not_read_into_weights(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.int32)}, tmp_path / SINGLE_FILE)
    place = torch.zeros(2)
    with pytest.raises(ModelLoadError, match=r"tensor a is stored as torch\.int32, expected float32"):
        SafetensorsFolder(tmp_path).read_into("a", place)
    with pytest.raises(KeyError):
        SafetensorsFolder(tmp_path).read_into("b", place)


def test_file_truncated_after_opening_is_named(tmp_path: Path) -> None:
    file = tmp_path / SINGLE_FILE
    save_file({"a": torch.ones(4096)}, file)
    tensors = SafetensorsFolder(tmp_path)
    with file.open("r+b") as stored:
        stored.truncate(file.stat().st_size - 8)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: tensor a cannot be read: .*shorter"):
        tensors.read_into("a", torch.empty(4096))


@pytest.mark.parametrize("form", ["expanded", "int4", "fp8"])
def test_file_truncated_while_it_is_loaded_kills_nothing(form: Any, tmp_path: Path) -> None:
    """A read through a mapping would: the file is replaced in place, by a download for example."""
    make_model(SINGLE, tmp_path)
    source = Source(tmp_path)
    tensors, config = source.tensors(), read_spec(source.config)
    with (tmp_path / SINGLE_FILE).open("r+b") as stored:
        stored.truncate(4096)
    with pytest.raises(ModelLoadError, match="cannot be read: the file has become shorter"):
        Decoder.load(config, tensors, device="cpu", dtype=torch.float32, form=form)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much of a file is in a process's memory")
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_read_into_uses_no_memory_of_the_mapping(wanted: torch.dtype, tmp_path: Path) -> None:
    names, shape = [f"t{index}" for index in range(8)], (1024, 1024)
    numbers = {name: torch.ones(shape, dtype=torch.bfloat16) for name in names}
    save_file(numbers, tmp_path / SINGLE_FILE)
    num_bytes = sum(tensor.nbytes for tensor in numbers.values())
    places = torch.empty(len(names), *shape, dtype=wanted)

    def mapped_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile:")) * 1024

    tensors, before = SafetensorsFolder(tmp_path), mapped_bytes()
    for name, place in zip(names, places, strict=True):
        tensors.read_into(name, place)
    assert mapped_bytes() - before < 0.1 * num_bytes
    for name, place in zip(names, places, strict=True):
        place.copy_(tensors.get(name))
    assert mapped_bytes() - before > 0.9 * num_bytes


def write_header(
    file: Path, header: dict[str, Any] | bytes, num_bytes: int = 8, length: int | None = None
) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + text + b"\0" * num_bytes)
    return file


def entry(start: int = 0, end: int = 8, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("metadata", [None, {}, {"data_offsets": "x"}, {"format": "pt", "dtype": "F32"}])
def test_metadata_is_ignored(metadata: Any, tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE_FILE, {"__metadata__": metadata, "a": entry()})
    tensors = SafetensorsFolder(tmp_path)
    assert list(tensors.names()) == ["a"] and tensors.shape("a") == (2,)
    place = torch.ones(2)
    tensors.read_into("a", place)
    assert place.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "header, length",
    [
        ({"a": entry()}, 2**63),
        ({"a": entry()}, 2**64 - 1),
        ({"a": entry()}, 0),
        ({"a": entry(end=12)}, None),
        ({"a": entry(), "b": entry()}, None),
        ({"a": entry(0, 4, shape=[1]), "b": entry(2, 6, shape=[1])}, None),
        ({"a": entry(8, 0)}, None),
        ({"a": entry(-8, 0)}, None),
        ({"a": entry(shape=[2**32, 2**32])}, None),
        ({"a": entry(shape=[2**63, 4])}, None),
        ({"a": entry(shape=[-2])}, None),
        ({"a": entry(shape="2")}, None),
        ({"a": entry(dtype="F31")}, None),
        ({"a": entry(dtype=7)}, None),
        ({"a": 7}, None),
        ({"__metadata__": 7, "a": entry()}, None),
        (b"[" * 100_000, None),
        (b'{"a":' * 100_000, None),
        (b'{"\xff": 1}', None),
        (b'{"\\ud800": 1}', None),
        (b"", None),
    ],
)
def test_wrong_headers(header: dict[str, Any] | bytes, length: int | None, tmp_path: Path) -> None:
    file = write_header(tmp_path / SINGLE_FILE, header, length=length)
    with pytest.raises(ModelLoadError, match=str(file)):
        SafetensorsFolder(tmp_path)


def test_tensor_in_two_shards_is_rejected(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(1), "c": torch.ones(1)}, tmp_path / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"2\.safetensors: tensor a is in 1\.safetensors as well"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["{}", '{"weight_map": {"a": 7}}', '{"weight_map": []}', "[" * 100_000, '{"weight_map":' * 100_000],
)
def test_wrong_indices(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ModelLoadError, match="not an index of shards"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.a", "language_model.model.layers.0.a", "language_model.layers.0.a"]
)
def test_two_names_of_a_tensor_of_the_text_model_are_rejected(name: str, tmp_path: Path) -> None:
    names = ["model.language_model.layers.0.a", name]
    save_file({each: torch.zeros(1) for each in names}, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match="expected one of them") as raised:
        SafetensorsFolder(tmp_path)
    assert all(each in str(raised.value) for each in names)
