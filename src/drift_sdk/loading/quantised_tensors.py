"""Checkpoints with quantised weights, as tensors under the names of a model that is not quantised."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.int4_codes import (
    awq_shape,
    gptq_shape,
    packed_shape,
    read_awq,
    read_gptq,
    read_packed,
)
from drift_sdk.loading.nvfp4_tensors import (
    compressed_nvfp4_shape,
    modelopt_nvfp4_shape,
    read_compressed_nvfp4,
    read_modelopt_nvfp4,
)
from drift_sdk.loading.stored_tensors import StoredSource, StoredTensors
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.quantised.fp8 import Fp8Weight
from drift_sdk.quantised.scheme import Scheme, Storage
from drift_sdk.quantised.weight import QuantisedWeight

__all__ = ["QuantisedSource", "QuantisedTensors"]

CPU = torch.device("cpu")
FP8_SCALES = ("weight_scale_inv", "weight_scale")
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
ACTIVATIONS = (
    *("activation_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale"),
    *("k_scale", "v_scale", "kv_scale"),
)
"""The last part of the names of scales of activations and of the KV cache, which belong to no weight."""

KV_SCALES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Names of the scales of keys and values behind that of a layer's attention, by the tools that write them:
compressed-tensors and AutoFP8, ModelOpt, older releases of the first two."""

KV_SCALE_RANGE = (2.0**-64, 2.0**64)


@runtime_checkable
class QuantisedSource(TensorSource, Protocol):
    """A TensorSource, some of whose weights can be had quantised."""

    def quantised_bytes(self, name: str) -> int | None:
        """Most bytes that a weight takes quantised; None if it is not. Reads little more than headers."""

    def quantised(self, name: str, device: torch.device) -> QuantisedWeight | None:
        """A weight as stored, copied to a device; None if it is not quantised."""


class _Kind(Struct, frozen=True):
    """The tensors of weights of one storage.

    codes:  the last part of the name of the codes.
    beside: the same of the tensors that belong to them; one of `scales` is always there.
    shape:  rows and columns of the weight, from the tensors' headers.
    mark:   of `beside`, the tensor that other storages with such names lack; "" if there is none.
    """

    codes: str
    scales: tuple[str, ...]
    beside: tuple[str, ...]
    shape: Callable[[StoredTensors], tuple[int, int]]
    read: Callable[[StoredTensors, Scheme], QuantisedWeight]
    mark: str = ""


class QuantisedTensors:
    """The QuantisedSource of a folder whose config.json has a `quantization_config`.

    Weights have the names of a model that is not quantised; scales and zero points are part of them. `get`
    returns their numbers in float32. Raises ModelLoadError naming file and tensor, also for a weight whose
    scales are missing or misshapen.
    """

    def __init__(self, tensors: StoredSource, scheme: Scheme) -> None:
        self.location = tensors.location
        self.num_readers = 1  # numbers that are dequantised take memory for a while
        self._tensors = tensors
        self._scheme = scheme
        self._stored: dict[str, tuple[StoredTensors, _Kind]] = {}
        used: set[str] = set()
        names = set(tensors.names())
        for name in tensors.names():
            prefix, _, part = name.rpartition(".")
            kind = _kind_of(scheme.storages, prefix, part, names)
            if kind is not None:
                self._stored[f"{prefix}.weight"] = StoredTensors(tensors, prefix, CPU), kind
                used |= {f"{prefix}.{other}" for other in (kind.codes, *kind.scales, *kind.beside)}

        plain = [
            name
            for name in tensors.names()
            if name not in used and name.rpartition(".")[2] not in ACTIVATIONS
        ]
        for name in self._stored.keys() & set(plain):
            codes = f"{name.removesuffix('.weight')}.{self._stored[name][1].codes}"
            raise ModelLoadError(f"{tensors.file(name)}: tensors {codes} and {name}, expected one")

        self._names = dict.fromkeys((*plain, *self._stored))

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stored:
            return self._tensors.shape(name)

        stored, kind = self._stored[name]
        return kind.shape(stored)

    def file(self, name: str) -> str:
        if name not in self._stored:
            return self._tensors.file(name)

        stored, kind = self._stored[name]
        return self._tensors.file(f"{stored.prefix}.{kind.codes}")

    def kv_scales(self, num_layers: int, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of the KV cache, as in KVScaleSource. Files have them for all layers, or for none."""
        names = set(self._tensors.names())
        for pair in KV_SCALES:
            if not any(f"{attention(layer)}.{part}" in names for layer in range(num_layers) for part in pair):
                continue

            if self._scheme.kv_obstacle:
                raise ModelLoadError(
                    f"{self.location}: quantization_config with {self._scheme.kv_obstacle} is not "
                    'implemented for kv_dtype="fp8": expected static scales of e4m3'
                )

            keys, values = (
                torch.stack([self._kv_scale(layer, part, num_kv_heads) for layer in range(num_layers)])
                for part in pair
            )
            return keys, values

        return None

    def _kv_scale(self, layer: int, part: str, num_kv_heads: int) -> torch.Tensor:
        """Scales of a layer, [num_kv_heads], from one for all heads or one for each."""
        stored = StoredTensors(self._tensors, attention(layer), CPU)
        found = stored.shape(part)
        if (
            torch.Size(found).numel() not in (1, num_kv_heads)
            or max(found, default=1) != torch.Size(found).numel()
        ):
            raise ModelLoadError(
                f"{stored.place(part)} has shape {list(found)}, expected [1] or [{num_kv_heads}]"
            )

        scales = stored.read(part, found, SCALE_DTYPES).to(torch.float32).reshape(-1)
        low, high = KV_SCALE_RANGE
        wrong = scales[~((scales >= low) & (scales <= high))]
        if len(wrong):
            raise ModelLoadError(f"{stored.place(part)} has {wrong[0]:g}, expected 2**-64 to 2**64")

        return scales.expand(num_kv_heads).contiguous()

    def get(self, name: str) -> torch.Tensor:
        weight = self.quantised(name, CPU)
        return self._tensors.get(name) if weight is None else weight.dequantise(torch.float32)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """Fill `place`, as in InPlaceSource."""
        weight = self.quantised(name, place.device)
        if weight is None:
            self._tensors.read_into(name, place)
        else:
            place.copy_(weight.dequantise(place.dtype))

    def quantised_bytes(self, name: str) -> int | None:
        if name not in self._stored:
            return None

        stored, kind = self._stored[name]
        rows, columns = self.shape(name)
        scales = next(part for part in kind.scales if stored.has(part))
        num_scales = torch.Size(stored.shape(scales)).numel()
        if kind is KINDS["fp8"]:
            return rows * columns + 4 * (rows if num_scales == 1 else num_scales)

        if kind.mark:
            return rows * columns // 2 + num_scales + 4 * rows

        return rows * columns // 2 + num_scales * (stored.dtype(scales).itemsize + 1)

    def quantised(self, name: str, device: torch.device) -> QuantisedWeight | None:
        if name not in self._stored:
            return None

        stored, kind = self._stored[name]
        self.shape(name)  # raises for codes that are no matrix
        return kind.read(StoredTensors(stored.tensors, stored.prefix, device), self._scheme)


def _kind_of(storages: Sequence[Storage], prefix: str, part: str, names: Collection[str]) -> _Kind | None:
    """The storage of a module's codes, of those that a checkpoint has; None for other tensors.

    part: the last part of a tensor's name. names: of all tensors.
    """
    found = [
        kind
        for kind in map(KINDS.__getitem__, storages)
        if part == kind.codes and any(f"{prefix}.{scales}" in names for scales in kind.scales)
    ]
    # That with its mark, else one that needs none, else the one whose mark is missing.
    found.sort(key=lambda kind: 1 if not kind.mark else 0 if f"{prefix}.{kind.mark}" in names else 2)
    return found[0] if found else None


def attention(layer: int) -> str:
    """The name of a layer's attention."""
    return f"model.layers.{layer}.self_attn"


def _fp8_shape(stored: StoredTensors) -> tuple[int, int]:
    return stored.matrix_shape("weight")


def _read_fp8(stored: StoredTensors, scheme: Scheme) -> Fp8Weight:
    """A weight of e4m3 numbers with scales for the tensor, for each row or for each block."""
    rows, columns = stored.shape("weight")
    values = stored.read("weight", (rows, columns), (torch.float8_e4m3fn,))
    part, *others = [part for part in FP8_SCALES if stored.has(part)]
    if others:
        raise ModelLoadError(f"{stored.place(part)} is beside {others[0]}, expected one of them")

    found = stored.shape(part)
    scales = stored.read(part, found, SCALE_DTYPES).to(torch.float32)
    if scales.numel() == 1:
        return Fp8Weight(values, scales.reshape(1, 1).expand(rows, 1).contiguous(), (1, columns))

    if found in ((rows,), (rows, 1)):
        return Fp8Weight(values, scales.reshape(rows, 1), (1, columns))

    counts = {
        (height, min(width, columns)): (-(-rows // height), -(-columns // width))
        for height, width in scheme.blocks
    }
    fitting = [block for block, count in counts.items() if count == found]
    if len({(min(height, rows), width) for height, width in fitting}) > 1:
        sizes = " and of ".join(f"{height}x{width}" for height, width in fitting)
        raise ModelLoadError(f"{stored.place(part)} fits blocks of {sizes}")

    if fitting:
        return Fp8Weight(values, scales, fitting[0])

    lists = " or ".join(map(str, ([1], [rows, 1], *map(list, counts.values()))))
    raise ModelLoadError(f"{stored.place(part)} has shape {list(found)}, expected {lists}")


KINDS: dict[Storage, _Kind] = {
    "fp8": _Kind("weight", FP8_SCALES, (), _fp8_shape, _read_fp8),
    "awq": _Kind("qweight", ("scales",), ("qzeros",), awq_shape, read_awq),
    "gptq": _Kind("qweight", ("scales",), ("qzeros", "g_idx"), gptq_shape, read_gptq),
    "packed": _Kind(
        "weight_packed",
        ("weight_scale",),
        ("weight_zero_point", "weight_shape", "weight_g_idx"),
        packed_shape,
        read_packed,
    ),
    "compressed_nvfp4": _Kind(
        "weight_packed",
        ("weight_scale",),
        ("weight_global_scale",),
        compressed_nvfp4_shape,
        read_compressed_nvfp4,
        mark="weight_global_scale",
    ),
    "modelopt_nvfp4": _Kind(
        "weight",
        ("weight_scale",),
        ("weight_scale_2",),
        modelopt_nvfp4_shape,
        read_modelopt_nvfp4,
        mark="weight_scale_2",
    ),
}
