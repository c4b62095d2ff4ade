"""The KV cache of plain torch: keys and values of tokens, in blocks."""

from __future__ import annotations

import torch

from drift_sdk.models.kv_numbers import decode, encode, stored_shape
from drift_sdk.models.kv_scales import KVScales

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers. In each layer, KV slot `block_id * block_size + offset` holds one
    token's.

    dtype: of the keys and values that are stored and read.
    keys, values: [num_layers, num_blocks * block_size, num_kv_heads, head_dim], not initialised: a slot must
    be written before it is read. They are of `dtype`, or with scales e4m3: what is read was rounded then. In
    NVFP4 they are uint8, and the last dimension has the bytes of a head.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        scales: KVScales | None = None,
    ) -> None:
        """shape: (num_layers, num_blocks, block_size, num_kv_heads, head_dim)."""
        num_layers, self.num_blocks, self.block_size, num_kv_heads, self._head_dim = shape
        self.dtype = dtype
        self._scales = scales
        stored, size = stored_shape(self._head_dim, dtype, scales.form if scales is not None else None)
        self.keys, self.values = (
            torch.empty(
                num_layers, self.num_blocks * self.block_size, num_kv_heads, size, dtype=stored, device=device
            )
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
        pairs = zip(self._layers[layer], (key, value), strict=True)
        if self._scales is None:
            for cache, x in pairs:
                cache.index_copy_(0, slots, x)
            return

        for (cache, x), scale in zip(pairs, self._scales_of(layer, self._scales), strict=True):
            cache.view(torch.uint8).index_copy_(0, slots, encode(x, scale, self._scales.form))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, num_kv_heads, head_dim] of one layer in slots [N] int64, in `dtype`."""
        keys, values = (cache.index_select(0, slots) for cache in self._layers[layer])
        if self._scales is None:
            return keys, values

        of_keys, of_values = self._scales_of(layer, self._scales)
        form = self._scales.form
        numbers = decode(keys, of_keys, form, self._head_dim), decode(values, of_values, form, self._head_dim)
        return numbers[0].to(self.dtype), numbers[1].to(self.dtype)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots [N] int64 to others in all layers, as they are. All are read before any is written."""
        for cache in (self.keys, self.values):
            bits = cache.view(torch.uint8)
            bits.index_copy_(1, targets, bits.index_select(1, sources))

    @staticmethod
    def _scales_of(layer: int, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a layer's keys and values, [num_kv_heads, 1] each."""
        return scales.keys[layer, :, None], scales.values[layer, :, None]
