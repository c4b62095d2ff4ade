"""The KV cache of plain torch: keys and values of tokens, in blocks."""

from __future__ import annotations

import torch

from drift_sdk.models.kv_scales import KVScales
from drift_sdk.quantised.e4m3 import E4M3, quantise_e4m3

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers. In each layer, KV slot `block_id * block_size + offset` holds one
    token's.

    dtype: of the keys and values that are stored and read.
    keys, values: [num_layers, num_blocks * block_size, num_kv_heads, head_dim], not initialised: a slot must
    be written before it is read. They are of `dtype`, or with scales e4m3: what is read was rounded then.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        scales: KVScales | None = None,
    ) -> None:
        """shape: (num_layers, num_blocks, block_size, num_kv_heads, head_dim)."""
        num_layers, self.num_blocks, self.block_size, *heads = shape
        self.dtype = dtype
        self._scales = scales
        stored = dtype if scales is None else E4M3
        self.keys, self.values = (
            torch.empty(num_layers, self.num_blocks * self.block_size, *heads, dtype=stored, device=device)
            for _ in range(2)
        )
        self._layers = tuple(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer as stored, [num_blocks * block_size, num_kv_heads, head_dim] each."""
        return self._layers[index]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [N, num_kv_heads, head_dim] of one layer to slots [N] int64."""
        for cache, x, scale in zip(self._layers[layer], (key, value), self._scales_of(layer), strict=True):
            if scale is None:
                cache.index_copy_(0, slots, x)
            else:
                cache.view(torch.uint8).index_copy_(0, slots, quantise_e4m3(x, scale).view(torch.uint8))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, num_kv_heads, head_dim] of one layer in slots [N] int64, in `dtype`."""
        keys, values = (
            cache.index_select(0, slots)
            if scale is None
            else (cache.index_select(0, slots).to(torch.float32) * scale).to(self.dtype)
            for cache, scale in zip(self._layers[layer], self._scales_of(layer), strict=True)
        )
        return keys, values

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots [N] int64 to others in all layers, as they are. All are read before any is written."""
        for cache in (self.keys, self.values):
            bits = cache.view(torch.uint8)
            bits.index_copy_(1, targets, bits.index_select(1, sources))

    def _scales_of(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scales of keys and of values, [num_kv_heads, 1] each."""
        if self._scales is None:
            return None, None

        return self._scales.keys[layer, :, None], self._scales.values[layer, :, None]
