"""The KV cache of plain torch: keys and values of tokens, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drift_sdk.models.kv_numbers import decode, encode, stored_shape
from drift_sdk.models.kv_scales import KVScales
from drift_sdk.spec.model import KVShape

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers. In each layer, KV slot `block_id * block_size + offset` holds one
    token's.

    dtype: of the keys and values that are stored and read.
    tensors: keys, then values, of the layers of each shape: [layers, num_blocks * block_size, num_kv_heads,
    head_dim or value_dim], not initialised: a slot must be written before it is read. They are of `dtype`, or
    with scales e4m3: what is read was rounded then. In NVFP4 they are uint8, and the last dimension has the
    bytes of a head.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape | None],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: KVScales | None = None,
    ) -> None:
        """shapes: of each layer; None: it keeps none."""
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self._scales = scales
        self._shapes = {index: shape for index, shape in enumerate(shapes) if shape is not None}
        form = None if scales is None else scales.form
        self.tensors: list[torch.Tensor] = []
        by_layer: dict[int, list[torch.Tensor]] = {index: [] for index in self._shapes}
        for shape in dict.fromkeys(self._shapes.values()):
            layers = [index for index, each in self._shapes.items() if each == shape]
            for size in (shape.head_dim, shape.value_dim):
                stored, length = stored_shape(size, dtype, form)
                sizes = len(layers), num_blocks * block_size, shape.num_kv_heads, length
                self.tensors.append(torch.empty(sizes, dtype=stored, device=device))
                for index, tensor in zip(layers, self.tensors[-1].unbind(0), strict=True):
                    by_layer[index].append(tensor)
        self._layers = {index: (keys, values) for index, (keys, values) in by_layer.items()}

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer as stored, [num_blocks * block_size, num_kv_heads, dim] each."""
        return self._layers[index]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [N, num_kv_heads, dim] of one layer to slots [N] int64."""
        pairs = zip(self._layers[layer], (key, value), strict=True)
        if self._scales is None:
            for cache, x in pairs:
                cache.index_copy_(0, slots, x)
            return

        for (cache, x), scale in zip(pairs, self._scales_of(layer, self._scales), strict=True):
            cache.view(torch.uint8).index_copy_(0, slots, encode(x, scale, self._scales.form))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, num_kv_heads, dim] of one layer in slots [N] int64, in `dtype`."""
        keys, values = (cache.index_select(0, slots) for cache in self._layers[layer])
        if self._scales is None:
            return keys, values

        of_keys, of_values = self._scales_of(layer, self._scales)
        form, shape = self._scales.form, self._shapes[layer]
        numbers = (
            decode(keys, of_keys, form, shape.head_dim),
            decode(values, of_values, form, shape.value_dim),
        )
        return numbers[0].to(self.dtype), numbers[1].to(self.dtype)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots [N] int64 to others in all layers, as they are. All are read before any is written."""
        for cache in self.tensors:
            bits = cache.view(torch.uint8)
            bits.index_copy_(1, targets, bits.index_select(1, sources))

    @staticmethod
    def _scales_of(layer: int, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a layer's keys and values, [num_kv_heads, 1] each."""
        return scales.keys[layer, :, None], scales.values[layer, :, None]
