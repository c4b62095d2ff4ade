"""Special files in place of regular ones: FIFOs, devices, sockets, directories, broken links."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.draft import DraftTensors
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from drift_sdk.loading.source import resolve

READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda folder: resolve(folder).config,
    "generation_config.json": lambda folder: resolve(folder).generation_config,
    "tokenizer_config.json": lambda folder: resolve(folder).tokenizer(),
    "tokenizer.json": lambda folder: resolve(folder).tokenizer(),
    "chat_template.jinja": lambda folder: resolve(folder).chat_templates,
    SINGLE_FILE: lambda folder: resolve(folder).tensors(),
    INDEX_FILE: lambda folder: resolve(folder).tensors(),
    "shard.safetensors": lambda folder: resolve(folder).tensors(),
    "pytorch_model.bin": DraftTensors,
}
KINDS = ["FIFO", "directory", "device", "socket", "link loop", "dangling link", "link to a FIFO"]


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def put(kind: str, path: Path, sockets: list[socket.socket]) -> None:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        sockets.append(socket.socket(socket.AF_UNIX))
        directory = os.open(path.parent, os.O_RDONLY)  # a socket's path may have 107 bytes
        try:
            sockets[-1].bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    elif kind == "link loop":
        path.symlink_to(path.name)
    elif kind == "dangling link":
        path.symlink_to("no such file")
    else:
        os.mkfifo(path.parent / "a FIFO")
        path.symlink_to("a FIFO")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="special files as Linux has them")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_special_file_is_rejected_without_blocking(
    name: str, kind: str, tmp_path: Path, sockets: list[socket.socket]
) -> None:
    if name == "shard.safetensors":
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    put(kind, tmp_path / name, sockets)
    with pytest.raises(ModelLoadError) as caught:
        READERS[name](tmp_path)
    assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_special_file_as_the_model(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelLoadError, match="is not a folder or a .gguf file"):
        resolve(tmp_path / name)
    for missing in (Path("x" * 5000), Path("a\0b")):
        with pytest.raises(ModelLoadError, match="does not exist"):
            resolve(missing)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ModelLoadError, match="is not a folder or a .gguf file"):
        resolve(tmp_path / "loop")


@pytest.mark.parametrize(
    "shard",
    [
        *("/etc/passwd", "../outside.safetensors", "a/../../outside.safetensors", "", ".", "..", "a\0b"),
        *("..\\outside.safetensors", "c:outside.safetensors", "\\\\host\\outside.safetensors"),
    ],
)
def test_shard_outside_the_folder_is_rejected(shard: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    for name in (shard, str(tmp_path / "outside.safetensors") if shard.startswith("/") else shard):
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelLoadError) as caught:
            SafetensorsFolder(folder)
        found = f"{folder / INDEX_FILE}: shard {name!r}, expected a path inside the folder"
        assert str(caught.value) == found


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """Each file of a snapshot is a symbolic link out of its folder; a shard may lie in a subfolder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    (snapshot / "weights").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "1")
    save_file({"b": torch.ones(2)}, blobs / "2")
    (blobs / "3").write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "weights/2.safetensors"}}))
    (blobs / "4").write_text('{"eos_token_id": 7}')
    for name, blob in (
        ("1.safetensors", "../../blobs/1"),
        ("weights/2.safetensors", "../../../blobs/2"),
        (INDEX_FILE, "../../blobs/3"),
        ("generation_config.json", "../../blobs/4"),
    ):
        (snapshot / name).symlink_to(blob)
    source = resolve(snapshot)
    assert source.generation_config == {"eos_token_id": 7}
    tensors = source.tensors()
    assert {name: tensors.shape(name) for name in tensors.names()} == {"a": (1,), "b": (2,)}
    assert tensors.get("b").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", [*READERS, "m.gguf"])
def test_file_without_permission_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the system's. Opening fails by a patch, as the superuser may open every file."""
    for other in ("config.json", "tokenizer.json"):
        (tmp_path / other).write_text("{}")
    if name == "shard.safetensors":
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    path = tmp_path / name
    path.write_text("{}")

    def refusing(open_file: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, *args: Any, **options: Any) -> Any:
            if file == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(file))

            return open_file(file, *args, **options)

        return opened

    monkeypatch.setattr(io, "open", refusing(io.open))
    monkeypatch.setattr(os, "open", refusing(os.open))
    with pytest.raises(ModelLoadError) as caught:
        if name == "m.gguf":
            _ = resolve(path).config
        else:
            READERS[name](tmp_path)
    assert str(caught.value) == f"{path}: cannot be read: Permission denied"
