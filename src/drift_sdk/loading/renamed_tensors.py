"""Tensors under other names than those in their files."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.safetensors import SafetensorsFolder

__all__ = ["RenamedTensors"]


class RenamedTensors:
    """The TensorSource of a folder whose tensors have other names than Hugging Face's.

    Raises ModelLoadError for two tensors of one name.
    """

    def __init__(self, folder: SafetensorsFolder, rename: Callable[[str], str]) -> None:
        self.location = folder.location
        self.num_readers = folder.num_readers
        self._folder = folder
        self._stored_names: dict[str, str] = {}
        for stored in folder.names():
            other = self._stored_names.setdefault(rename(stored), stored)
            if other != stored:
                raise ModelLoadError(
                    f"{folder.location}: tensors {other} and {stored} are the same, expected one"
                )

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._folder.shape(self._stored_names[name])

    def file(self, name: str) -> str:
        return self._folder.file(self._stored_names[name])

    def get(self, name: str) -> torch.Tensor:
        return self._folder.get(self._stored_names[name])

    def read_into(self, name: str, place: torch.Tensor) -> None:
        self._folder.read_into(self._stored_names[name], place)
