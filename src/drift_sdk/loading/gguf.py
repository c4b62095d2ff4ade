"""Models in GGUF files: their configuration, and their weights under Hugging Face names.

Format and names of metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A projection of all experts of a layer is one tensor there. It is read as a matrix of each expert, or as
Hugging Face's tensors of MXFP4. A block of MXFP4 in these files is a scale and 16 bytes, with the first half
of the 32 numbers in their low bits, the second half in their high ones. Gate and up projections are apart.

A matrix may be several tensors there, such as the matrix of keys and values of latent attention.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from msgspec import Struct, structs

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import gguf_architecture
from drift_sdk.loading.gguf_file import ROPE_FACTORS, GGUFParts, GGUFTensor, is_block_matrix, read_gguf_config
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.stored_formats import BLOCK_BYTES
from drift_sdk.loading.tensors import InPlaceSource, check_dtype
from drift_sdk.quantised.formats import BLOCK_FORMATS, MXFP4_BLOCK, BlockFormat, BlockWeight
from drift_sdk.quantised.weight import QuantisedWeight, TiledWeight
from drift_sdk.spec.family import GGUFChange, GGUFJoin, Tiles

STACKED = re.compile(r"(blk\.[0-9]+\.ffn_)(gate_up|gate|up|down)_exps\.weight")
CUT = re.compile(r"blk\.[0-9]+\.ffn_(?:gate|up|down)_exps\.[0-9]+\.weight")
MAX_EXPERTS, MAX_TENSORS = 1024, 2**18

PROJECTIONS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""Of Hugging Face, whose rows alternate between those of the file's."""
KINDS = {"blocks": "weight", "scales": "weight", "bias": "bias"}
OWN_NAME = re.compile(r"model\.layers\.([0-9]+)\.mlp\.experts\.(gate_up_proj|down_proj)_(blocks|scales|bias)")
STORED_NAME = re.compile(r"blk\.([0-9]+)\.ffn_(?:gate|up|down)_exps\.(?:weight|bias)")


def cut_by_expert(tensors: Mapping[str, GGUFTensor], location: str) -> dict[str, GGUFTensor]:
    """The tensors, with those of all experts cut into one for each: that of expert 3 in
    "blk.0.ffn_up_exps.weight" is "blk.0.ffn_up_exps.3.weight". "ffn_gate_up_exps" has the rows of both
    projections of each expert. Raises ModelLoadError with the location for none or too many, for a tensor
    that is of one expert already, and for a projection that is there twice."""
    found: dict[str, GGUFTensor] = {}
    for name in filter(CUT.fullmatch, tensors):
        raise ModelLoadError(f"{location}: tensor {name}, expected one of all experts")

    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None or len(tensor.shape) != 3:
            found[name] = tensor
            continue

        num_experts, rows, columns = tensor.shape
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ModelLoadError(
                f"{location}: tensor {name} has {num_experts} experts, expected 1 to {MAX_EXPERTS}"
            )

        parts = ("gate", "up") if match[2] == "gate_up" else (match[2],)
        if len(found) + len(parts) * num_experts > MAX_TENSORS:
            raise ModelLoadError(f"{location}: more than {MAX_TENSORS} matrices of experts")

        if rows % len(parts):
            raise ModelLoadError(f"{location}: tensor {name} has {rows} rows, expected an even number")

        num_bytes = tensor.num_bytes // num_experts // len(parts)  # of whole rows, which have whole blocks
        for index, (expert, part) in enumerate(itertools.product(range(num_experts), parts)):
            own = f"{match[1]}{part}_exps.{expert}.weight"
            if own in found:
                raise ModelLoadError(f"{location}: tensor {name} has a projection that another one has")

            found[own] = structs.replace(
                tensor,
                shape=(rows // len(parts), columns),
                offset=tensor.offset + index * num_bytes,
                num_bytes=num_bytes,
            )
    return found


class JoinedMatrix(Struct, frozen=True):
    """A matrix that a file has as several tensors, by their names."""

    parts: dict[str, GGUFTensor]
    join: GGUFJoin


def join_parts(
    tensors: Mapping[str, GGUFTensor], joins: Mapping[str, GGUFJoin], location: str
) -> tuple[dict[str, GGUFTensor], dict[str, JoinedMatrix]]:
    """The tensors, with matrices in place of their parts, and these matrices, both by the matrices' names. A
    matrix has the offset of its first part. Where a file has the whole too, parts are left out. Raises
    ModelLoadError with the location for parts that are missing or do not fit together."""
    found, joined = dict(tensors), dict[str, JoinedMatrix]()
    for module, join in joins.items():
        part = re.compile(rf"blk\.([0-9]+)\.(?:{'|'.join(join.modules)})\.weight")
        for layer in dict.fromkeys(match[1] for match in map(part.fullmatch, tensors) if match is not None):
            whole = f"blk.{layer}.{module}.weight"
            names = [f"blk.{layer}.{each}.weight" for each in join.modules]
            parts = {name: found.pop(name) for name in names if name in found}
            if whole in tensors:
                continue

            if missing := [name for name in names if name not in parts]:
                raise ModelLoadError(f"{location}: tensor {missing[0]} is missing beside {', '.join(parts)}")

            shape = join.shape([tensor.shape for tensor in parts.values()])
            if shape is None:
                each = " and ".join(f"{name} of shape {list(tensor.shape)}" for name, tensor in parts.items())
                raise ModelLoadError(f"{location}: tensors {each} do not fit together")

            joined[whole] = JoinedMatrix(parts, join)
            first = parts[names[0]]
            found[whole] = structs.replace(first, shape=shape, quantization=GGMLQuantizationType.F32)
    return found, joined


class ExpertBlocks(InPlaceSource, QuantisedSource, Protocol):
    """A GGUF file that may have experts in MXFP4."""

    def mxfp4(self, name: str) -> torch.Tensor:
        """The blocks of a tensor, [..., columns / 32, 17] uint8: a scale and the codes of each. Raises
        ModelLoadError for a tensor in another format."""


class Mxfp4Experts:
    """The QuantisedSource of a GGUF file with experts in MXFP4, as they are in memory. Other weights are
    numbers or blocks.

    Raises ModelLoadError for gate and up projections of different shapes, or without the other.
    """

    def __init__(self, file: ExpertBlocks) -> None:
        self.location: str = file.location
        self.num_readers: int = file.num_readers
        self._file = file
        self._names = {name for name in file.names() if not STORED_NAME.fullmatch(name)}
        for name in filter(OWN_NAME.fullmatch, self._names):
            raise ModelLoadError(f"{self.location}: tensor {name}, expected the names of GGUF files")

        layers = {match[1] for match in map(STORED_NAME.fullmatch, file.names()) if match is not None}
        for layer, projection, kind in itertools.product(layers, PROJECTIONS, KINDS):
            name = f"model.layers.{layer}.mlp.experts.{projection}_{kind}"
            if self._has(name):
                self._names.add(name)

    def _has(self, name: str) -> bool:
        """Whether the file has all parts of an expert's tensor, which are alike; False if it has none."""
        parts = self._stored_names(name)
        shapes = {self._file.shape(part) if part in self._file.names() else () for part in parts}
        if shapes == {()}:
            return False

        num_dimensions = {len(shape) for shape in shapes}
        if len(shapes) > 1 or num_dimensions != {2 if name.endswith("bias") else 3}:
            found = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise ModelLoadError(f"{self.location}: {', '.join(parts)}: shapes {found}, expected one")

        return True

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        match = OWN_NAME.fullmatch(name)
        if match is None:
            return self._file.shape(name)

        parts = self._stored_names(name)
        num_experts, rows, *inner = self._file.shape(parts[0])
        shape = num_experts, rows * len(parts), *(columns // MXFP4_BLOCK for columns in inner)
        return (*shape, BLOCK_BYTES) if match[3] == "blocks" else shape

    def file(self, name: str) -> str:
        return self._file.file(self._stored_names(name)[0])

    def get(self, name: str) -> torch.Tensor:
        if OWN_NAME.fullmatch(name):
            return self._arranged(name, torch.device("cpu"))

        return self._file.get(name)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Fill `place`, as in InPlaceSource."""
        if OWN_NAME.fullmatch(name):
            tensor = self._arranged(name, place.device)
            check_dtype(self, name, tensor.dtype, place.dtype)
            place.copy_(tensor)
        else:
            self._file.read_into(name, place)

    def quantised_bytes(self, name: str) -> int | None:
        return None if OWN_NAME.fullmatch(name) else self._file.quantised_bytes(name)

    def quantised(self, name: str, device: torch.device) -> QuantisedWeight | None:
        return None if OWN_NAME.fullmatch(name) else self._file.quantised(name, device)

    def _arranged(self, name: str, device: torch.device) -> torch.Tensor:
        """A tensor of experts, on a device."""
        kind = name.rpartition("_")[2]
        parts = [self._part(stored, kind, device) for stored in self._stored_names(name)]
        return parts[0] if len(parts) == 1 else torch.stack(parts, dim=2).flatten(1, 2)

    def _stored_names(self, name: str) -> list[str]:
        """The file's names of the parts of a tensor; the name itself if it is no expert's."""
        match = OWN_NAME.fullmatch(name)
        if match is None:
            return [name]

        layer, projection, kind = match.groups()
        return [f"blk.{layer}.ffn_{part}_exps.{KINDS[kind]}" for part in PROJECTIONS[projection]]

    def _part(self, stored: str, kind: str, device: torch.device) -> torch.Tensor:
        """The numbers of a bias, or the blocks or scales of a matrix, of all experts."""
        if kind == "bias":
            return self._file.get(stored).to(device)

        raw = self._file.mxfp4(stored)
        if kind == "scales":
            return raw[..., 0].contiguous().to(device)

        raw = raw.to(device)
        codes = torch.cat((raw[..., 1:] & 15, raw[..., 1:] >> 4), dim=-1)  # of the 32 numbers in order
        return codes[..., 0::2] | (codes[..., 1::2] << 4)


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
        tensors, self._joined = join_parts(header.tensors, self._architecture.joins, self.location)
        self._header = structs.replace(header, tensors=tensors)
        self.config = read_gguf_config(
            self._header,
            self._family,
            self._architecture,
            self.location,
            lambda name: self._dequantise(name).tolist(),
        )
        self._stored_names: dict[str, str] = {}
        for stored in self._header.tensors:
            name = self._architecture.tensor_name(stored, self.config["num_hidden_layers"])
            other = self._stored_names.setdefault(name, stored)
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
        """A tensor of the file, by the file's own name, or a matrix that it has in parts."""
        joined = self._joined.get(stored_name)
        if joined is None:
            return self._numbers(stored_name, self._header.tensors[stored_name])

        return joined.join.numbers([self._numbers(name, tensor) for name, tensor in joined.parts.items()])

    def _numbers(self, stored_name: str, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        """The numbers of a tensor of the file. stored_name: for messages."""
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
