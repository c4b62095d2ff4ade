"""Folders of safetensors: single, sharded, broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_zoo import make_model
from safetensors.torch import save_file

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder

SHARDED, SINGLE = 0, 1


@pytest.mark.parametrize("index", [SHARDED, SINGLE])
def test_every_tensor_is_found(index: int, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": 1}}', "{}", "\udcff"])
def test_broken_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match="not an index"):
        SafetensorsFolder(tmp_path)


def test_tensor_that_the_index_misplaces_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"x\.safetensors: tensor b is missing"):
        SafetensorsFolder(tmp_path)
