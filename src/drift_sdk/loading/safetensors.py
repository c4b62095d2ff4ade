"""Weights in safetensors files: one, or shards with an index."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from drift_sdk.errors import ModelLoadError

__all__ = ["INDEX_FILE", "SINGLE_FILE", "SafetensorsFolder"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsFolder:
    """The TensorSource of a folder with model.safetensors, or with model.safetensors.index.json and shards.

    Opening reads the headers alone. Raises ModelLoadError naming a file that is missing, truncated or
    corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        if (folder / SINGLE_FILE).is_file():
            handle = _open(folder / SINGLE_FILE)
            files = dict.fromkeys(handle.keys(), SINGLE_FILE)
            self._handles = {SINGLE_FILE: handle}
        elif (folder / INDEX_FILE).is_file():
            files = _read_index(folder / INDEX_FILE)
            self._handles = {file: _open(folder / file) for file in sorted(set(files.values()))}
        else:
            raise ModelLoadError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")

        self._files = files
        self._folder = folder
        stored = {file: set(handle.keys()) for file, handle in self._handles.items()}
        for name, file in files.items():
            if name not in stored[file]:
                raise ModelLoadError(
                    f"{folder / file}: tensor {name} is missing, {INDEX_FILE} places it there"
                )

    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[self._files[name]].get_slice(name).get_shape())

    def file(self, name: str) -> str:
        return str(self._folder / self._files[name])

    def get(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._handles[self._files[name]].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelLoadError(f"{self.file(name)}: tensor {name} cannot be read: {error}") from error

        return tensor


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: not a whole safetensors file: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: not an index of shards: {error}") from error
