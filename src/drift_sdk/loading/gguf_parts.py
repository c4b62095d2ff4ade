"""A model in one GGUF file or in the parts of a split one, read as a whole.

Each part has a header for its own tensors; the first has the model's metadata.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from drift_sdk._files import has_file, unreadable
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.gguf_header import GGUFHeader, GGUFTensor, read_header
from drift_sdk.loading.gguf_names import part_of

__all__ = ["GGUFParts"]

BUFFER_BYTES = 1 << 20
"""Bytes of a header that are read at a time."""


class GGUFParts:
    """The header of a model, with the tensors of all its parts, and the bytes of each tensor.

    path: the file, or any one part.

    Opening reads only the headers. Raises ModelLoadError naming the part that is missing, or a file that is
    not whole or does not belong to the others.
    """

    def __init__(self, path: Path) -> None:
        part = part_of(path.name)
        self.files: list[Path] = [path]
        if part is not None:
            self.files = [path.with_name(part.file(index)) for index in range(1, part.num_parts + 1)]
            for file in self.files:
                if not has_file(file):
                    raise ModelLoadError(f"{file}: is missing, {path.name} is one of {part.num_parts} parts")

        opened = [self._open(file) for file in self.files]
        self._descriptors = [descriptor for descriptor, _ in opened]
        headers = [header for _, header in opened]
        for index, header in enumerate(headers):
            self._check_split(index, header.metadata)
        self.header: GGUFHeader = GGUFHeader(metadata=headers[0].metadata, tensors=self._joined(headers))

    def file(self, tensor: GGUFTensor) -> str:
        """The file that holds a tensor."""
        return str(self.files[tensor.part])

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """A copy of the bytes of a tensor as stored. Raises ModelLoadError if the file cannot be read.

        Not a view of a mapping: the process would be killed where the file has become shorter.
        """
        found = np.empty(tensor.num_bytes, np.uint8)
        rest, offset = found.data, tensor.offset
        try:
            while rest:
                num_read = os.preadv(self._descriptors[tensor.part], [rest], offset)
                if not num_read:
                    raise OSError("the file has become shorter")

                rest, offset = rest[num_read:], offset + num_read
        except OSError as error:
            raise ModelLoadError(f"{self.file(tensor)}: cannot be read: {error}") from error

        return found

    def _open(self, path: Path) -> tuple[int, GGUFHeader]:
        """A descriptor of a file, which this object closes when it is deleted, and the file's header. Raises
        ModelLoadError naming a file that is not whole."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            with open(descriptor, "rb", buffering=BUFFER_BYTES, closefd=False) as file:
                return descriptor, read_header(file)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise ModelLoadError(f"{path}: not a whole GGUF file: {error}") from error

    def _check_split(self, index: int, metadata: dict[str, Any]) -> None:
        """Raise ModelLoadError unless the metadata of a part agree with its place among the files."""
        num_parts = len(self.files)
        found = metadata.get("split.count", 1) or 1
        if found != num_parts:
            expected = "a name that ends in -00001-of-0000N.gguf" if num_parts == 1 else str(num_parts)
            raise ModelLoadError(f"{self.files[index]}: split.count={short_repr(found)}, expected {expected}")

        place = metadata.get("split.no", index)
        if num_parts > 1 and place != index:
            raise ModelLoadError(
                f"{self.files[index]}: split.no={short_repr(place)}, expected {index} as its name says"
            )

    def _joined(self, headers: list[GGUFHeader]) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for index, header in enumerate(headers):
            for name, tensor in header.tensors.items():
                if name in tensors:
                    other = self.files[tensors[name].part].name
                    raise ModelLoadError(
                        f"{self.files[index]}: tensor {short_repr(name)} is in {other} as well"
                    )

                tensors[name] = structs.replace(tensor, part=index)

        expected = headers[0].metadata.get("split.tensors.count", len(tensors))
        if len(self.files) > 1 and expected != len(tensors):
            raise ModelLoadError(
                f"{self.files[0]}: split.tensors.count={short_repr(expected)}, the parts hold {len(tensors)}"
            )

        return tensors
