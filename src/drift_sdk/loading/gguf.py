"""Models in GGUF files: their configuration, and their weights under Hugging Face names.

Format and names of metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from msgspec import structs

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import gguf_architecture
from drift_sdk.loading.gguf_config import ROPE_FACTORS, read_gguf_config
from drift_sdk.loading.gguf_experts import Mxfp4Experts, cut_by_expert
from drift_sdk.loading.gguf_header import is_block_matrix
from drift_sdk.loading.gguf_parts import GGUFParts
from drift_sdk.loading.tensors import InPlaceSource, check_dtype
from drift_sdk.quantised.blocks import BLOCK_FORMATS, BlockFormat, BlockWeight
from drift_sdk.quantised.tiles import TiledWeight
from drift_sdk.quantised.weight import QuantisedWeight
from drift_sdk.spec.gguf import GGUFChange, Tiles

__all__ = ["GGUFFile"]

T = TypeVar("T", bound=np.generic)

# Bytes passed as one row to gguf's quants module. It processes 16 rows at a time: long rows make few calls on
# much data.
ROW_BYTES = 1 << 16


class GGUFFile:
    """The QuantisedSource of a .gguf file, or of all parts of a split one.

    files:     the file, or the parts in order.
    metadata:  the file's key/value metadata, as plain Python values.
    config:    the settings that a config.json of the model would have.

    Opening reads only the header; `get` dequantises a tensor to float32, `read_into` on the device of its
    place. Raises ModelLoadError naming the file if it is not whole, or holds a model that is not implemented.
    """

    num_readers = 1
    """Numbers that are dequantised take memory for a while."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._parts = GGUFParts(path)
        header = self._parts.header
        self.files = self._parts.files
        self.metadata = header.metadata
        self._family, self._architecture = gguf_architecture(self.metadata, self.location)
        if self._architecture.has_expert_matrices:
            header = structs.replace(header, tensors=cut_by_expert(header.tensors, self.location))
        self._header = header
        self.config = read_gguf_config(
            self._header,
            self._family,
            self._architecture,
            self.location,
            lambda name: self._dequantise(name).tolist(),
        )
        self._stored_names: dict[str, str] = {}
        for stored in self._header.tensors:
            other = self._stored_names.setdefault(self._architecture.tensor_name(stored), stored)
            if other != stored:
                raise ModelLoadError(f"{path}: tensors {other} and {stored} are the same, expected one")

        for name in ROPE_FACTORS:
            self._stored_names.pop(name, None)

    def tensors(self) -> InPlaceSource:
        """The model's weights: this source, but experts in MXFP4 as Hugging Face has them."""
        return Mxfp4Experts(self) if self._family.has_mxfp4 else self

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        shape, change = self._header.tensors[self._stored_names[name]].shape, self._change(name)
        return shape if change.shape is None else change.shape(shape)

    def file(self, name: str) -> str:
        return self._parts.file(self._header.tensors[self._stored_names[name]])

    def get(self, name: str) -> torch.Tensor:
        """A tensor dequantised to float32, with the numbers, the order and the shape of Hugging Face."""
        array, change = self._in_order(name, self._dequantise(self._stored_names[name])), self._change(name)
        if change.columns is not None:
            array = _untile(array, 1, change.columns)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            array = array - np.float32(self._architecture.norm_offset)
        if change.numbers is not None:
            with np.errstate(all="ignore"):  # as in _to_float32
                array = change.numbers(array)
        return torch.from_numpy(array).view(self.shape(name))

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Fill `place`, as in InPlaceSource."""
        check_dtype(self, name, torch.float32, place.dtype)
        weight = self.quantised(name, place.device)
        place.copy_(self.get(name) if weight is None else weight.dequantise(place.dtype))

    def quantised_bytes(self, name: str) -> int | None:
        """Bytes of a matrix of blocks; None for other tensors."""
        return self._header.tensors[self._stored_names[name]].num_bytes if self._has_blocks(name) else None

    def quantised(self, name: str, device: torch.device) -> QuantisedWeight | None:
        """A matrix of blocks, with the order of Hugging Face; None for other tensors."""
        tensor, change = self._header.tensors[self._stored_names[name]], self._change(name)
        if not self._has_blocks(name):
            return None

        block_format = cast(BlockFormat, tensor.quantization.name)
        columns, num_bytes = BLOCK_FORMATS[block_format]
        blocks = self._parts.raw(tensor).reshape(tensor.shape[0], tensor.shape[1] // columns, num_bytes)
        ordered = torch.from_numpy(np.ascontiguousarray(self._in_order(name, blocks)))
        weight = BlockWeight(ordered.to(device), block_format)
        if change.columns is None:
            return weight

        return TiledWeight(weight, change.columns.outer, change.columns.inner)

    def mxfp4(self, name: str) -> torch.Tensor:
        """The blocks of a tensor in MXFP4, [..., columns / 32, 17] uint8: a scale and the codes of each.
        Raises ModelLoadError for a tensor in another format."""
        tensor = self._header.tensors[self._stored_names[name]]
        found, expected = tensor.quantization, GGMLQuantizationType.MXFP4
        if found != expected:
            raise ModelLoadError(
                f"{self.file(name)}: tensor {name} is {found.name}, expected {expected.name}"
            )

        columns, num_bytes = GGML_QUANT_SIZES[expected]
        *rows, inner = tensor.shape
        blocks = self._parts.raw(tensor).reshape(*rows, inner // columns, num_bytes)
        return torch.from_numpy(blocks)

    def _change(self, name: str) -> GGUFChange:
        change = self._architecture.change
        return GGUFChange() if change is None else change(name, self.config)

    def _has_blocks(self, name: str) -> bool:
        """Whether a tensor is a matrix of blocks, with the numbers of Hugging Face."""
        tensor = self._header.tensors[self._stored_names[name]]
        return is_block_matrix(tensor) and self._change(name).numbers is None

    def _in_order(self, name: str, rows: npt.NDArray[T]) -> npt.NDArray[T]:
        """The rows of a tensor in the order of Hugging Face."""
        change = self._change(name)
        if change.rows is not None:
            kept, tiled = np.split(rows, [change.first_row])
            rows = np.concatenate((kept, _untile(tiled, 0, change.rows)))
        if self._architecture.is_permuted:
            for module, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".self_attn.{module}." in name:
                    return _unpermute(rows, self.config[heads])

        return rows

    def _dequantise(self, stored_name: str) -> npt.NDArray[np.float32]:
        """A tensor of the file, by the file's own name."""
        tensor = self._header.tensors[stored_name]
        raw = self._parts.raw(tensor)
        _, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
        row_bytes = ROW_BYTES // block_bytes * block_bytes
        num_whole = raw.size // row_bytes * row_bytes
        found = np.empty(tensor.shape, np.float32)
        flat, num_done = found.reshape(-1), 0
        try:
            for part in (raw[:num_whole].reshape(-1, row_bytes), raw[num_whole:]):
                if part.size:
                    numbers = _to_float32(part, tensor.quantization)
                    flat[num_done : num_done + len(numbers)] = numbers
                    num_done += len(numbers)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self._parts.file(tensor)}: tensor {stored_name} is stored as {tensor.quantization.name}, "
                "which cannot be dequantised"
            ) from error

        return found


def _untile(array: npt.NDArray[T], axis: int, tiles: Tiles) -> npt.NDArray[T]:
    """The rows or columns of a tensor in the order of Hugging Face."""
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    runs = array.reshape(*before, tiles.outer, tiles.inner, -1, *after)
    return runs.swapaxes(axis, axis + 1).reshape(array.shape)


def _unpermute(array: npt.NDArray[T], num_heads: int) -> npt.NDArray[T]:
    """Undo the permutation of a query or key projection's rows [num_heads * head_dim, ...].

    llama.cpp rotates pairs of neighbouring elements, so its files interleave the two halves of each head.
    """
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _to_float32(raw: npt.NDArray[np.uint8], quantization: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):  # numbers that are not finite are rejected later, with the tensor's name
        array: npt.NDArray[np.float32] = quants.dequantize(raw, quantization)
    return array.reshape(-1)
