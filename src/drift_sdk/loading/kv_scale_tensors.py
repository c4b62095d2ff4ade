"""Scales of the KV cache in the files of checkpoints, beside the weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.fp8_tensors import SCALE_DTYPES
from drift_sdk.loading.stored_tensors import StoredSource, StoredTensors

__all__ = ["ScaledTensors", "check_kv_scales", "has_kv_scales", "read_kv_scales"]

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


def check_kv_scales(tensors: StoredSource, layers: Sequence[int], num_kv_heads: int) -> None:
    """Raise ModelLoadError naming file and tensor if headers show that scales are missing for some layers or
    cannot be read, for scales of unknown names, and if scales of two pairs of names differ.

    layers: indices of the layers with attention.
    """
    for name in tensors.names():
        if name.rpartition(".")[2] in LAST_PARTS and not name.endswith(ENDS):
            raise ModelLoadError(
                f"{tensors.file(name)}: tensor {name} is a scale of the KV cache, expected one of "
                f"{', '.join(end.lstrip('.') for end in dict.fromkeys(ENDS))} in its layer"
            )

    pairs = _pairs(tensors, layers)
    for part in dict.fromkeys(pairs[0] if pairs else ()):
        for layer in layers:
            _check_layer(tensors, layer, part, num_kv_heads)
    for other in pairs[1:]:
        for layer in layers:
            _check_same(tensors, layer, pairs[0], other, num_kv_heads)


def read_kv_scales(
    tensors: StoredSource, layers: Sequence[int], num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales of keys and of values, float32 [len(layers), num_kv_heads] each; None without. Raises
    ModelLoadError naming file and tensor. layers: as of `check_kv_scales`."""
    pairs = _pairs(tensors, layers)
    if not pairs:
        return None

    keys, values = (
        torch.stack([_read_layer(tensors, layer, part, num_kv_heads) for layer in layers])
        for part in pairs[0]
    )
    return keys, values


def _pairs(tensors: StoredSource, layers: Sequence[int]) -> list[tuple[str, str]]:
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

    stored.check(part, [found], SCALE_DTYPES)
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

    def check_kv_scales(self, layers: Sequence[int], num_kv_heads: int) -> None:
        check_kv_scales(self._tensors, layers, num_kv_heads)

    def kv_scales(self, layers: Sequence[int], num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return read_kv_scales(self._tensors, layers, num_kv_heads)


def _attention(layer: int) -> str:
    """The name of a layer's attention."""
    return f"model.layers.{layer}.self_attn"
