"""The KV cache of plain torch: keys and values of tokens, in blocks; its stored numbers and their scales.

Numbers are of the model's dtype, e4m3, or NVFP4. In NVFP4, a head of a token is a row of bytes: its codes,
two in a byte, then the e4m3 scales of its groups of 16 dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk.loading.tensors import TensorSource
from drift_sdk.quantised.formats import E4M3, NVFP4_GROUP, nvfp4_numbers, quantise_e4m3, quantise_groups
from drift_sdk.spec.model import KVShape, ModelSpec

KVForm = Literal["fp8", "nvfp4"]


def stored_shape(head_dim: int, dtype: torch.dtype, form: KVForm | None) -> tuple[torch.dtype, int]:
    """The dtype of what is stored, and the number of elements of a head. form: None: numbers of `dtype`."""
    if form == "nvfp4":
        return torch.uint8, head_dim // 2 + -(-head_dim // NVFP4_GROUP)

    return dtype if form is None else E4M3, head_dim


def bytes_of_head(head_dim: int, dtype: torch.dtype, form: KVForm | None) -> int:
    """Bytes of a head of a token's keys, or of its values."""
    stored, size = stored_shape(head_dim, dtype, form)
    return stored.itemsize * size


def encode(x: Tensor, scale: Tensor, form: KVForm) -> Tensor:
    """Return the stored form of numbers [..., head_dim], as uint8. scale: float32, of a shape that
    broadcasts."""
    if form == "fp8":
        return quantise_e4m3(x, scale).view(torch.uint8)

    codes, scales = quantise_groups(x, scale)
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1)


def decode(stored: Tensor, scale: Tensor, form: KVForm, head_dim: int) -> Tensor:
    """Return the numbers [..., head_dim] of their stored form, as float32."""
    if form == "fp8":
        return stored.to(torch.float32) * scale

    codes, scales = stored.split((head_dim // 2, stored.shape[-1] - head_dim // 2), dim=-1)
    return nvfp4_numbers(codes, scales.contiguous().view(E4M3).to(torch.float32) * scale)


@runtime_checkable
class KVScaleSource(TensorSource, Protocol):
    """A TensorSource whose files may have scales of the KV cache.

    heads: KV heads of the layers that keep keys and values, by index. Both methods raise ModelLoadError
    naming file and tensor.
    """

    def check_kv_scales(self, heads: Mapping[int, int]) -> None:
        """Find out from headers whether `kv_scales` can read the scales."""

    def kv_scales(self, heads: Mapping[int, int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Scales of keys and of values of each layer, float32 [num_kv_heads] on the CPU; empty without."""


NVFP4_SCALE = 0.25
"""The static scale of a KV cache in NVFP4. Numbers up to 672 are stored, and groups whose largest number is
at least 0.024 have scales with all bits of e4m3."""


class KVScales(Struct, frozen=True):
    """Scales of keys and of values, float32 [num_layers, num_kv_heads] each. A layer with fewer KV heads than
    another one has the first of its row.

    form: "fp8": a number x is stored as the e4m3 number next to x / scale. "nvfp4": as a group of
    `quantise_groups`, with the scale as its global scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    form: KVForm = "fp8"


def load_kv_scales(tensors: TensorSource, form: KVForm, spec: ModelSpec, device: torch.device) -> KVScales:
    """The scales of a source for e4m3, 1 where its files have none and in layers without keys and values;
    fixed ones for NVFP4, whose groups have scales of their own. Raises ModelLoadError as KVScaleSource
    does."""
    heads = kv_heads(spec)
    ones = torch.ones(spec.num_layers, max(heads.values()), dtype=torch.float32, device=device)
    if form == "nvfp4":
        fixed = ones * NVFP4_SCALE
        return KVScales(fixed, fixed, form)

    keys, values = ones, ones.clone()
    found = tensors.kv_scales(heads) if isinstance(tensors, KVScaleSource) else {}
    for layer, scales in found.items():
        for row, own in zip((keys[layer], values[layer]), scales, strict=True):
            row[: len(own)] = own
    return KVScales(keys, values)


def kv_heads(spec: ModelSpec) -> dict[int, int]:
    """KV heads of the layers that keep keys and values, by index."""
    return {index: each.kv.num_kv_heads for index, each in enumerate(spec.layers) if each.kv is not None}


class KVCache:
    """Keys and values of all layers. In each layer, KV slot `block_id * block_size + offset` holds one
    token's.

    dtype: of the keys and values that are stored and read.
    tensors: keys, then values, of the layers of each shape and number of blocks: [layers, blocks *
    block_size, num_kv_heads, head_dim or value_dim], not initialised: a slot must be written before it is
    read. Of latents, there are no values. They are of `dtype`, or with scales e4m3: what is read was rounded
    then. In NVFP4 they are uint8, and the last dimension has the bytes of a head.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape | None],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: KVScales | None = None,
        *,
        num_blocks_of: Mapping[int, int] = {},
    ) -> None:
        """shapes: of each layer; None: it keeps none. num_blocks_of: of layers that have another number of
        blocks than `num_blocks`."""
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self._scales = scales
        self._shapes = {index: shape for index, shape in enumerate(shapes) if shape is not None}
        form = None if scales is None else scales.form
        self.tensors: list[torch.Tensor] = []
        by_layer: dict[int, list[torch.Tensor]] = {index: [] for index in self._shapes}
        groups: dict[tuple[KVShape, int], list[int]] = {}
        for index, shape in self._shapes.items():
            groups.setdefault((shape, num_blocks_of.get(index, num_blocks)), []).append(index)
        for (shape, number), layers in groups.items():
            for size in shape.stored_dims:
                stored, length = stored_shape(size, dtype, form)
                sizes = len(layers), number * block_size, shape.num_kv_heads, length
                self.tensors.append(torch.empty(sizes, dtype=stored, device=device))
                for index, tensor in zip(layers, self.tensors[-1].unbind(0), strict=True):
                    by_layer[index].append(tensor)
        self._layers = {index: tuple(tensors) for index, tensors in by_layer.items()}

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of one layer as stored, [num_blocks * block_size, num_kv_heads, dim] each; of
        latents, keys alone."""
        return self._layers[index]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [N, num_kv_heads, dim] of one layer to slots [N] int64. Of latents, values
        are the beginnings of keys, and not written again."""
        given = (key,) if self._shapes[layer].is_latent else (key, value)
        pairs = zip(self._layers[layer], given, strict=True)
        if self._scales is None:
            for cache, x in pairs:
                cache.index_copy_(0, slots, x)
            return

        for (cache, x), scale in zip(pairs, self._scales_of(layer, self._scales), strict=False):
            cache.view(torch.uint8).index_copy_(0, slots, encode(x, scale, self._scales.form))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, num_kv_heads, dim] of one layer in slots [N] int64, in `dtype`."""
        shape = self._shapes[layer]
        found = [cache.index_select(0, slots) for cache in self._layers[layer]]
        if self._scales is not None:
            scales, form = self._scales_of(layer, self._scales), self._scales.form
            parts = zip(found, scales, shape.stored_dims, strict=False)
            found = [decode(codes, scale, form, size).to(self.dtype) for codes, scale, size in parts]
        return found[0], found[0][..., : shape.value_dim] if shape.is_latent else found[1]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots [N] int64 to others in all layers, which have the same blocks, as they are. All are read
        before any is written."""
        for cache in self.tensors:
            bits = cache.view(torch.uint8)
            bits.index_copy_(1, targets, bits.index_select(1, sources))

    def _scales_of(self, layer: int, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a layer's keys and values, [num_kv_heads, 1] each."""
        number = self._shapes[layer].num_kv_heads
        return scales.keys[layer, :number, None], scales.values[layer, :number, None]
