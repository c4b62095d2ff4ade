"""Scales of a KV cache of e4m3 numbers, or of NVFP4."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct

from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.kv_numbers import KVForm

__all__ = ["KVScaleSource", "KVScales", "load_kv_scales"]


@runtime_checkable
class KVScaleSource(TensorSource, Protocol):
    """A TensorSource whose files may have scales of the KV cache.

    Both methods raise ModelLoadError naming file and tensor.
    """

    def check_kv_scales(self, num_layers: int, num_kv_heads: int) -> None:
        """Find out from headers whether `kv_scales` can read the scales."""

    def kv_scales(self, num_layers: int, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of keys and of values, float32 [num_layers, num_kv_heads] each, on the CPU; None without."""


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


def load_kv_scales(
    tensors: TensorSource, form: KVForm, num_layers: int, num_kv_heads: int, device: torch.device
) -> KVScales:
    """The scales of a source for e4m3, 1 where its files have none; fixed ones for NVFP4, whose groups have
    scales of their own. Raises ModelLoadError as KVScaleSource does."""
    if form == "nvfp4":
        fixed = torch.full((num_layers, num_kv_heads), NVFP4_SCALE, dtype=torch.float32, device=device)
        return KVScales(fixed, fixed, form)

    found = tensors.kv_scales(num_layers, num_kv_heads) if isinstance(tensors, KVScaleSource) else None
    if found is None:
        ones = torch.ones(num_layers, num_kv_heads, dtype=torch.float32, device=device)
        return KVScales(ones, ones)

    keys, values = found
    return KVScales(keys.to(device), values.to(device))
