"""Models in GGUF files: their configuration, and dequantised weights under Hugging Face names.

Format and names of metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.gguf_config import ROPE_FACTORS, find_architecture, read_gguf_config
from drift_sdk.loading.gguf_header import GGUFHeader, read_header

__all__ = ["GGUFFile"]

# Bytes passed as one row to gguf's quants module. It processes 16 rows at a time: long rows make few calls on
# much data.
ROW_BYTES = 1 << 16


class GGUFFile:
    """The TensorSource of a .gguf file.

    metadata:  the file's key/value metadata, as plain Python values.
    config:    the settings that a config.json of the model would have.

    Opening reads only the header; `get` dequantises a tensor to float32. Raises ModelLoadError naming the
    file if it is not whole, or holds a model that is not implemented.
    """

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

            self._header: GGUFHeader = read_header(self._data)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: not a whole GGUF file: {error}") from error

        self.metadata = self._header.metadata
        num_parts = self.metadata.get("split.count", 1)
        if num_parts not in (0, 1):
            raise ModelLoadError(f"{path}: one of {short_repr(num_parts)} parts, expected a single file")

        self._architecture = find_architecture(self.metadata, self.location)
        self.config = read_gguf_config(
            self._header, self.location, lambda name: self._dequantise(name).tolist()
        )
        self._stored_names: dict[str, str] = {}
        for stored in self._header.tensors:
            other = self._stored_names.setdefault(self._architecture.tensor_name(stored), stored)
            if other != stored:
                raise ModelLoadError(f"{path}: tensors {other} and {stored} are the same, expected one")

        for name in ROPE_FACTORS:
            self._stored_names.pop(name, None)

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header.tensors[self._stored_names[name]].shape

    def file(self, name: str) -> str:
        return self.location

    def get(self, name: str) -> torch.Tensor:
        """A tensor dequantised to float32, with the values and the order of rows of Hugging Face."""
        array = self._dequantise(self._stored_names[name])
        if self._architecture.is_permuted:
            for module, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".self_attn.{module}." in name:
                    array = _unpermute(array, self.config[heads])

        if self._architecture.norm_offset and name.endswith("norm.weight"):
            array = array - np.float32(self._architecture.norm_offset)

        return torch.from_numpy(array)

    def _dequantise(self, stored_name: str) -> npt.NDArray[np.float32]:
        """A tensor of the file, by the file's own name."""
        tensor = self._header.tensors[stored_name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        _, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
        row_bytes = ROW_BYTES // block_bytes * block_bytes
        num_whole = raw.size // row_bytes * row_bytes
        parts = [part for part in (raw[:num_whole].reshape(-1, row_bytes), raw[num_whole:]) if part.size]
        try:
            return np.concatenate([_to_float32(part, tensor.quantization) for part in parts]).reshape(
                tensor.shape
            )
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.location}: tensor {stored_name} is stored as {tensor.quantization.name}, "
                "which cannot be dequantised"
            ) from error


def _unpermute(array: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the permutation of a query or key projection's rows [num_heads * head_dim, ...].

    llama.cpp rotates pairs of neighbouring elements, so its files interleave the two halves of each head.
    """
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _to_float32(raw: npt.NDArray[np.uint8], quantization: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):  # numbers that are not finite are rejected later, with the tensor's name
        array: npt.NDArray[np.float32] = quants.dequantize(raw, quantization)
    return array.reshape(-1)
