"""Scales of a KV cache of e4m3 numbers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct

from drift_sdk.loading.tensors import TensorSource

__all__ = ["KVScaleSource", "KVScales", "load_kv_scales"]


@runtime_checkable
class KVScaleSource(TensorSource, Protocol):
    """A TensorSource whose files may have scales of the KV cache."""

    def kv_scales(self, num_layers: int, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of keys and of values, float32 [num_layers, num_kv_heads] each, on the CPU; None without.

        Raises ModelLoadError naming file and tensor, or the setting that says how they were made.
        """


class KVScales(Struct, frozen=True):
    """Scales of keys and of values, float32 [num_layers, num_kv_heads] each: a number x is stored as the e4m3
    number next to x / scale."""

    keys: torch.Tensor
    values: torch.Tensor


def load_kv_scales(
    tensors: TensorSource, num_layers: int, num_kv_heads: int, device: torch.device
) -> KVScales:
    """The scales of a source; 1 where its files have none. Raises ModelLoadError as KVScaleSource does."""
    found = tensors.kv_scales(num_layers, num_kv_heads) if isinstance(tensors, KVScaleSource) else None
    if found is None:
        ones = torch.ones(num_layers, num_kv_heads, dtype=torch.float32, device=device)
        return KVScales(ones, ones)

    keys, values = found
    return KVScales(keys.to(device), values.to(device))
