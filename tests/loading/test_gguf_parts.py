"""GGUF files in parts: any part names the model, and parts that do not belong together are rejected."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_model import write_gguf
from model_zoo import make_model

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.file_names import missing_parts, part_of
from drift_sdk.loading.source import resolve


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    model = make_model(18, folder / "model")
    write_gguf(model, folder / "m.gguf", max_tensors=9)
    write_gguf(model, folder / "whole.gguf")
    return folder


@pytest.fixture
def parts(written: Path, tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(file, tmp_path)) for file in sorted(written.glob("m-*.gguf"))]


def test_any_part_names_the_model(parts: list[Path], written: Path) -> None:
    whole = resolve(written / "whole.gguf")
    for part in parts:
        source = resolve(part)
        assert source.config == whole.config
        assert source.tokenizer().encode("ab") == [257]
        tensors = source.tensors()
        assert set(tensors.names()) == set(whole.tensors().names())
        assert {tensors.file(name) for name in tensors.names()} == {str(file) for file in parts}
    for name in tensors.names():
        assert tensors.shape(name) == whole.tensors().shape(name)
        assert torch.equal(tensors.get(name), whole.tensors().get(name))


@pytest.mark.parametrize("index", [0, 1, -1])
def test_missing_part_is_named(index: int, parts: list[Path]) -> None:
    parts[index].unlink()
    (other, *_) = [part for part in parts if part.exists()]
    with pytest.raises(ModelLoadError, match=f"^{parts[index]}: is missing, {other.name} is one of 4 parts"):
        _ = resolve(other).config


def test_special_file_in_place_of_a_part(parts: list[Path]) -> None:
    parts[2].unlink()
    os.mkfifo(parts[2])
    with pytest.raises(ModelLoadError, match=f"^{parts[2]}: is a FIFO"):
        _ = resolve(parts[0]).config


def test_truncated_part_is_named(parts: list[Path]) -> None:
    parts[3].write_bytes(parts[3].read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=f"^{parts[3]}: not a whole GGUF file: truncated"):
        _ = resolve(parts[0]).config


def test_parts_of_different_models_are_rejected(parts: list[Path], written: Path) -> None:
    shutil.copy(written / "m-00003-of-00004.gguf", parts[1])
    with pytest.raises(ModelLoadError, match=rf"^{parts[1]}: split.no=2, expected 1 as its name says"):
        _ = resolve(parts[0]).config

    shutil.copy(written / "whole.gguf", parts[1])
    with pytest.raises(ModelLoadError, match=rf"^{parts[1]}: split.count=1, expected 4"):
        _ = resolve(parts[0]).config


@pytest.mark.parametrize(
    "name, said",
    [
        ("token_embd.weight", r"tensor 'token_embd.weight' is in m-00001-of-00004.gguf as well"),
        ("a.weight", r"split.tensors.count=\d+, the parts hold \d+"),
    ],
)
def test_tensors_that_do_not_add_up_are_rejected(name: str, said: str, parts: list[Path]) -> None:
    writer = gguf.GGUFWriter(parts[3], "qwen3")
    for key, value in {"split.no": 3, "split.count": 4}.items():
        writer.add_uint16(key, value)
    writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=said):
        _ = resolve(parts[0]).config


def test_part_under_another_name_is_rejected(parts: list[Path]) -> None:
    alone = parts[0].rename(parts[0].with_name("alone.gguf"))
    with pytest.raises(ModelLoadError, match=f"^{alone}: split.count=4, expected a name that ends in"):
        _ = resolve(alone).config


def test_names_of_parts() -> None:
    part = part_of("a-b-00002-of-00003.gguf")
    assert part is not None and (part.stem, part.index, part.num_parts) == ("a-b", 2, 3)
    assert part.file(3) == "a-b-00003-of-00003.gguf"
    wrong = ("a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "-00001-of-00003.gguf", "a-1-of-3.gguf")
    for name in ("a.gguf", *wrong):
        assert part_of(name) is None
    assert missing_parts(["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"]) == ["a-00002-of-00003.gguf"]
    assert missing_parts(["a.gguf"]) == []
