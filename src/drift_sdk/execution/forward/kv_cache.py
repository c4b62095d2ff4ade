"""The target's KV cache in blocks, in the layout that the kernels read, and its rotation tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.mixers.attention import query_factors
from drift_sdk.models.rope import half_tables
from drift_sdk.spec.model import Attention, KVShape, QueryScaling
from drift_sdk.spec.rope import Rope
from drift_sdk.steps import ExecutorLimits

__all__ = ["KVTensors", "PagedKVCache", "Rotation"]


class KVTensors(NamedTuple):
    """Keys and values of the layers of a shape: [layers, num_blocks, num_kv_heads, block_size, dim] each."""

    keys: Tensor
    values: Tensor


class Rotation(NamedTuple):
    """Tables by position, [max_model_len + 1, ...] in the model's dtype, as the eager model computes them.

    cos, sin [..., rotary_dim / 2]: None without rotation. query_factors: None: queries are not scaled.
    """

    cos: Tensor | None
    sin: Tensor | None
    query_factors: Tensor | None


class PagedKVCache:
    """Keys and values of all sequences.

    groups: the tensors of each shape, of the decoder's `kv_dtype`, uninitialised. They have a single block
    until `allocate` is called, which is enough for steps whose rows are all padding. Behind these blocks
    there are more, for nodes of trees.
    first_tree_slot: the first cache slot behind the blocks.
    """

    groups: list[KVTensors]

    def __init__(self, decoder: Decoder, limits: ExecutorLimits, num_tree_rows: int = 0) -> None:
        """num_tree_rows: most rows of trees in a step."""
        self._decoder, self.block_size = decoder, limits.block_size
        self._num_tree_blocks = -(-num_tree_rows // limits.block_size)
        self._positions = torch.arange(limits.max_model_len + 1, dtype=torch.float32, device=decoder.device)
        self._rotations: dict[tuple[Rope | None, QueryScaling | None], Rotation] = {}
        self._places = {
            layer: (group, place)
            for group, layers in enumerate(decoder.spec.kv_groups.values())
            for place, layer in enumerate(layers)
        }
        self.allocate(1)

    def allocate(self, num_blocks: int) -> None:
        """Replace keys and values. Graphs that were captured before still use the old ones."""
        self.groups = []  # the old ones are freed before the new ones are allocated
        self.first_tree_slot = num_blocks * self.block_size
        num_all = num_blocks + self._num_tree_blocks
        for shape, layers in self._decoder.spec.kv_groups.items():
            self.groups.append(self._tensors(shape, len(layers), num_all))

    def _tensors(self, shape: KVShape, num_layers: int, num_blocks: int) -> KVTensors:
        decoder = self._decoder

        def empty(size: int) -> Tensor:
            sizes = num_layers, num_blocks, shape.num_kv_heads, self.block_size, size
            return torch.empty(sizes, dtype=decoder.kv_dtype, device=decoder.device)

        return KVTensors(empty(shape.head_dim), empty(shape.value_dim))

    def layer(self, index: int) -> LayerKV:
        """Keys and values of a layer."""
        group, place = self._places[index]
        keys, values = (tensor[place] for tensor in self.groups[group])
        scales = self._decoder.weights.kv_scales
        if scales is None:
            return LayerKV(keys, values)

        return LayerKV(keys, values, scales.keys[index], scales.values[index])

    def rotation(self, spec: Attention) -> Rotation:
        """The tables of a layer. Layers with the same rotation share them."""
        key = spec.rope, spec.query_scaling
        if key not in self._rotations:
            self._rotations[key] = self._rotation(*key)
        return self._rotations[key]

    def _rotation(self, rope: Rope | None, scaling: QueryScaling | None) -> Rotation:
        dtype = self._decoder.dtype
        cos, sin = (None, None) if rope is None else half_tables(rope, self._positions, dtype)
        factors = None if scaling is None else query_factors(scaling, self._positions, dtype)
        return Rotation(cos, sin, factors)
