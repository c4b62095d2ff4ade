"""Experts in GGUF files, which have one tensor for a projection of all experts of a layer: as a matrix of
each, or as Hugging Face's tensors of MXFP4.

A block of MXFP4 in these files is a scale and 16 bytes, with the first half of the 32 numbers in their low
bits, the second half in their high ones. Gate and up projections are apart.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from msgspec import structs

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.gguf_header import GGUFTensor
from drift_sdk.loading.mxfp4 import BLOCK_BYTES, BLOCK_SIZE
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.tensors import InPlaceSource, check_dtype
from drift_sdk.quantised.weight import QuantisedWeight

__all__ = ["Mxfp4Experts", "cut_by_expert"]

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
        shape = num_experts, rows * len(parts), *(columns // BLOCK_SIZE for columns in inner)
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
