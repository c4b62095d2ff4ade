"""Checkpoints with quantised weights, as tensors under the names of a model that is not quantised.

Also the scales of the KV cache in the files of checkpoints, beside the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.stored_formats import (
    FP8_SCALE_DTYPES,
    FP8_SCALES,
    Shape,
    StoredSource,
    StoredTensors,
    awq_bytes,
    awq_shape,
    compressed_nvfp4_bytes,
    compressed_nvfp4_shape,
    fp8_bytes,
    fp8_shape,
    gptq_bytes,
    gptq_shape,
    modelopt_nvfp4_bytes,
    modelopt_nvfp4_shape,
    packed_bytes,
    packed_shape,
    read_awq,
    read_compressed_nvfp4,
    read_fp8,
    read_gptq,
    read_modelopt_nvfp4,
    read_packed,
)
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.quantised.scheme import Scheme, Storage
from drift_sdk.quantised.weight import QuantisedWeight

CPU = torch.device("cpu")
KV_SCALES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Names of the scales of keys and values behind that of a layer's attention, by the tools that write them:
compressed-tensors and AutoFP8, ModelOpt, older releases of the first two."""
ENDS = tuple(f".self_attn.{part}" for pair in KV_SCALES for part in pair)
LAST_PARTS = ("k_scale", "v_scale", "kv_scale")
"""The last part of the names of tensors that are scales of the KV cache, and of nothing else."""

KV_SCALE_RANGE = (2.0**-64, 2.0**64)


def has_kv_scales(names: Collection[str]) -> bool:
    """Whether scales of the KV cache are among tensors of these names."""
    return any(name.endswith(ENDS) for name in names)


def check_kv_scales(tensors: StoredSource, heads: Mapping[int, int]) -> None:
    """Raise ModelLoadError naming file and tensor if headers show that scales are missing for some layers or
    cannot be read, for scales of unknown names, and if scales of two pairs of names differ.

    heads: KV heads of the layers that keep keys and values, by index.
    """
    for name in tensors.names():
        if name.rpartition(".")[2] in LAST_PARTS and not name.endswith(ENDS):
            raise ModelLoadError(
                f"{tensors.file(name)}: tensor {name} is a scale of the KV cache, expected one of "
                f"{', '.join(end.lstrip('.') for end in dict.fromkeys(ENDS))} in its layer"
            )

    pairs = _pairs(tensors, heads)
    for part in dict.fromkeys(pairs[0] if pairs else ()):
        for layer, num_kv_heads in heads.items():
            _check_layer(tensors, layer, part, num_kv_heads)
    for other in pairs[1:]:
        for layer, num_kv_heads in heads.items():
            _check_same(tensors, layer, pairs[0], other, num_kv_heads)


def read_kv_scales(
    tensors: StoredSource, heads: Mapping[int, int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Scales of keys and of values of each layer, float32 [num_kv_heads] each; empty without. Raises
    ModelLoadError naming file and tensor. heads: as of `check_kv_scales`."""
    found = {}
    for keys, values in _pairs(tensors, heads)[:1]:
        for layer, number in heads.items():
            found[layer] = (
                _read_layer(tensors, layer, keys, number),
                _read_layer(tensors, layer, values, number),
            )
    return found


def _pairs(tensors: StoredSource, layers: Iterable[int]) -> list[tuple[str, str]]:
    """The pairs of KV_SCALES that some layer has tensors of; the first is read."""
    names = tensors.names()
    return [
        pair
        for pair in KV_SCALES
        if any(f"{_attention(layer)}.{part}" in names for layer in layers for part in pair)
    ]


def _check_same(
    tensors: StoredSource, layer: int, pair: tuple[str, str], other: tuple[str, str], num_kv_heads: int
) -> None:
    """Raise ModelLoadError for scales of a layer in `other` that differ from those in `pair`."""
    stored = StoredTensors(tensors, _attention(layer), CPU)
    for part, repeated in zip(pair, other, strict=True):
        if stored.has(repeated) and not torch.equal(
            *(_read_layer(tensors, layer, each, num_kv_heads) for each in (part, repeated))
        ):
            raise ModelLoadError(
                f"{stored.place(repeated)} differs from tensor {stored.prefix}.{part}, expected equal scales"
            )


def _check_layer(tensors: StoredSource, layer: int, part: str, num_kv_heads: int) -> StoredTensors:
    """The tensors of a layer, of which the header of the scales is checked."""
    stored = StoredTensors(tensors, _attention(layer), CPU)
    found = stored.shape(part)
    num_scales = torch.Size(found).numel()
    if num_scales not in (1, num_kv_heads) or max(found, default=1) != num_scales:
        raise ModelLoadError(
            f"{stored.place(part)} has shape {list(found)}, expected [1] or [{num_kv_heads}]"
        )

    stored.check(part, [found], FP8_SCALE_DTYPES)
    return stored


def _read_layer(tensors: StoredSource, layer: int, part: str, num_kv_heads: int) -> torch.Tensor:
    """Scales of a layer, [num_kv_heads], from one for all heads or one for each."""
    stored = _check_layer(tensors, layer, part, num_kv_heads)
    scales = stored.read(part).to(torch.float32).reshape(-1)
    low, high = KV_SCALE_RANGE
    wrong = scales[~((scales >= low) & (scales <= high))]
    if len(wrong):
        raise ModelLoadError(f"{stored.place(part)} has {wrong[0]:g}, expected 2**-64 to 2**64")

    return scales.expand(num_kv_heads).contiguous()


class ScaledTensors:
    """The InPlaceSource of files whose weights are not quantised, and which have scales of the KV cache: a
    KVScaleSource.

    Scales belong to no weight: `names` leaves them out.
    """

    def __init__(self, tensors: StoredSource) -> None:
        self.location: str = tensors.location
        self.num_readers: int = tensors.num_readers
        self._tensors = tensors
        self._names = dict.fromkeys(name for name in tensors.names() if not name.endswith(ENDS))

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def file(self, name: str) -> str:
        return self._tensors.file(name)

    def check(self, name: str, place: torch.dtype) -> None:
        self._tensors.check(name, place)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors.get(name)

    def read_into(self, name: str, place: torch.Tensor) -> None:
        self._tensors.read_into(name, place)

    def check_kv_scales(self, heads: Mapping[int, int]) -> None:
        check_kv_scales(self._tensors, heads)

    def kv_scales(self, heads: Mapping[int, int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return read_kv_scales(self._tensors, heads)


def _attention(layer: int) -> str:
    """The name of a layer's attention."""
    return f"model.layers.{layer}.self_attn"


ACTIVATIONS = (
    *("activation_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale"),
    *("k_scale", "v_scale", "kv_scale"),
)
"""The last part of the names of scales of activations and of the KV cache, which belong to no weight."""


@runtime_checkable
class QuantisedSource(TensorSource, Protocol):
    """A TensorSource, some of whose weights can be had quantised."""

    def quantised_bytes(self, name: str) -> int | None:
        """Most bytes that a weight takes quantised; None if it is not. Reads little more than headers."""

    def quantised(self, name: str, device: torch.device) -> QuantisedWeight | None:
        """A weight as stored, copied to a device; None if it is not quantised."""


class _Kind(Struct, frozen=True):
    """The tensors of weights of one storage.

    codes:     the last part of the name of the codes, and their dtype.
    scales:    the same of the scales, which may have one of several names.
    beside:    of other tensors that belong to them.
    shape:     rows and columns of the weight, from the tensors' headers.
    num_bytes: most bytes that the weight takes. Raises ModelLoadError unless the headers of all its tensors
               are as they have to be.
    mark:      of `beside`, the tensor that other storages with such names lack; "" if there is none.
    """

    codes: str
    dtype: torch.dtype
    scales: tuple[str, ...]
    beside: tuple[str, ...]
    shape: Callable[[StoredTensors], Shape]
    num_bytes: Callable[[StoredTensors, Shape, Scheme], int]
    read: Callable[[StoredTensors, Shape, Scheme], QuantisedWeight]
    mark: str = ""


class QuantisedTensors:
    """The QuantisedSource of a folder whose config.json has a `quantization_config`.

    Weights have the names of a model that is not quantised; scales and zero points are part of them. `get`
    returns their numbers in float32. Raises ModelLoadError naming file and tensor, also for a weight whose
    scales are missing or misshapen.
    """

    def __init__(self, tensors: StoredSource, scheme: Scheme) -> None:
        self.location: str = tensors.location
        self.num_readers = 1  # numbers that are dequantised take memory for a while
        self._tensors = tensors
        self._scheme = scheme
        self._stored: dict[str, tuple[StoredTensors, _Kind]] = {}
        self._shapes: dict[str, Shape] = {}  # those that were asked for: they may be read from files
        used: set[str] = set()
        for name in tensors.names():
            prefix, _, part = name.rpartition(".")
            kind = _kind_of(scheme.storages, tensors, prefix, part)
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
        return self._shape(name) if name in self._stored else self._tensors.shape(name)

    def _shape(self, name: str) -> Shape:
        """Rows and columns of a quantised weight."""
        if name not in self._shapes:
            stored, kind = self._stored[name]
            self._shapes[name] = kind.shape(stored)
        return self._shapes[name]

    def file(self, name: str) -> str:
        if name not in self._stored:
            return self._tensors.file(name)

        stored, kind = self._stored[name]
        return self._tensors.file(f"{stored.prefix}.{kind.codes}")

    def check(self, name: str, place: torch.dtype) -> None:
        """Check headers, as in CheckedSource."""
        if name not in self._stored:
            self._tensors.check(name, place)
        else:
            self.quantised_bytes(name)

    def check_kv_scales(self, heads: Mapping[int, int]) -> None:
        """Check headers of scales of the KV cache, as in KVScaleSource."""
        check_kv_scales(self._tensors, heads)

    def kv_scales(self, heads: Mapping[int, int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Scales of the KV cache, as in KVScaleSource."""
        return read_kv_scales(self._tensors, heads)

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
        return kind.num_bytes(stored, self._shape(name), self._scheme)

    def quantised(self, name: str, device: torch.device) -> QuantisedWeight | None:
        if name not in self._stored:
            return None

        stored, kind = self._stored[name]
        place = StoredTensors(stored.tensors, stored.prefix, device)
        return kind.read(place, self._shape(name), self._scheme)


def _kind_of(storages: Sequence[Storage], tensors: StoredSource, prefix: str, part: str) -> _Kind | None:
    """The storage of a module's codes, of those that a checkpoint has; None for other tensors.

    prefix, part: of the name of a tensor. It has codes if there are scales beside it, or if it has the dtype
    of codes: then the scales are missing.
    """
    names, name = tensors.names(), f"{prefix}.{part}"
    found = [
        kind
        for kind in map(KINDS.__getitem__, storages)
        if part == kind.codes
        and (
            any(f"{prefix}.{scales}" in names for scales in kind.scales) or tensors.dtype(name) == kind.dtype
        )
    ]
    # That with its mark, else one that needs none, else the one whose mark is missing.
    found.sort(key=lambda kind: 1 if not kind.mark else 0 if f"{prefix}.{kind.mark}" in names else 2)
    return found[0] if found else None


INT32, UINT8 = torch.int32, torch.uint8
KINDS: dict[Storage, _Kind] = {
    "fp8": _Kind("weight", torch.float8_e4m3fn, FP8_SCALES, (), fp8_shape, fp8_bytes, read_fp8),
    "awq": _Kind("qweight", INT32, ("scales",), ("qzeros",), awq_shape, awq_bytes, read_awq),
    "gptq": _Kind("qweight", INT32, ("scales",), ("qzeros", "g_idx"), gptq_shape, gptq_bytes, read_gptq),
    "packed": _Kind(
        "weight_packed",
        INT32,
        ("weight_scale",),
        ("weight_zero_point", "weight_shape", "weight_g_idx"),
        packed_shape,
        packed_bytes,
        read_packed,
    ),
    "compressed_nvfp4": _Kind(
        "weight_packed",
        UINT8,
        ("weight_scale",),
        ("weight_global_scale",),
        compressed_nvfp4_shape,
        compressed_nvfp4_bytes,
        read_compressed_nvfp4,
        mark="weight_global_scale",
    ),
    "modelopt_nvfp4": _Kind(
        "weight",
        UINT8,
        ("weight_scale",),
        ("weight_scale_2",),
        modelopt_nvfp4_shape,
        modelopt_nvfp4_bytes,
        read_modelopt_nvfp4,
        mark="weight_scale_2",
    ),
}
