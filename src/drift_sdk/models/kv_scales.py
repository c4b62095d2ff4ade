"""Scales of a KV cache of e4m3 numbers, or of NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct

from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.kv_numbers import KVForm
from drift_sdk.spec.model import ModelSpec

__all__ = ["KVScaleSource", "KVScales", "load_kv_scales"]


@runtime_checkable
class KVScaleSource(TensorSource, Protocol):
    """A TensorSource whose files may have scales of the KV cache.

    layers: indices of the layers with attention. Both methods raise ModelLoadError naming file and tensor.
    """

    def check_kv_scales(self, layers: Sequence[int], num_kv_heads: int) -> None:
        """Find out from headers whether `kv_scales` can read the scales."""

    def kv_scales(self, layers: Sequence[int], num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of keys and of values, float32 [len(layers), num_kv_heads] on the CPU; None without."""


NVFP4_SCALE = 0.25
"""The static scale of a KV cache in NVFP4. Numbers up to 672 are stored, and groups whose largest number is
at least 0.024 have scales with all bits of e4m3."""


class KVScales(Struct, frozen=True):
    """Scales of keys and of values, float32 [num_layers, num_kv_heads] each.

    form: "fp8": a number x is stored as the e4m3 number next to x / scale. "nvfp4": as a group of
    `quantise_groups`, with the scale as its global scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    form: KVForm = "fp8"


def load_kv_scales(tensors: TensorSource, form: KVForm, spec: ModelSpec, device: torch.device) -> KVScales:
    """The scales of a source for e4m3, 1 where its files have none and in layers without attention; fixed
    ones for NVFP4, whose groups have scales of their own. Raises ModelLoadError as KVScaleSource does."""
    layers, num_kv_heads = spec.attention_layers, spec.attention.num_kv_heads
    ones = torch.ones(spec.num_layers, num_kv_heads, dtype=torch.float32, device=device)
    if form == "nvfp4":
        fixed = ones * NVFP4_SCALE
        return KVScales(fixed, fixed, form)

    found = tensors.kv_scales(layers, num_kv_heads) if isinstance(tensors, KVScaleSource) else None
    if found is None:
        return KVScales(ones, ones)

    places = torch.tensor(layers, dtype=torch.int64, device=device)
    keys, values = (ones.index_copy(0, places, scales.to(device)) for scales in found)
    return KVScales(keys, values)
