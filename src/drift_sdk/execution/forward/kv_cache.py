"""The target's KV cache in blocks, in the layout that the kernels read, and its rotation tables."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.rope import half_tables
from drift_sdk.steps import ExecutorLimits

__all__ = ["PagedKVCache", "Rotation"]

Rotation = tuple[Tensor, Tensor] | tuple[None, None]
"""Cosines and sines of a layer, or (None, None) without rotation."""


class PagedKVCache:
    """Keys and values of all sequences.

    keys, values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim], of the decoder's `kv_dtype`,
    uninitialised. They have a single block until `allocate` is called, which is enough for steps whose rows
    are all padding. Behind these blocks there are more, for nodes of trees.
    first_tree_slot: the first cache slot behind the blocks.
    rotations: for each layer, the cosines and sines [max_model_len + 1, rotary_dim / 2] by position, in the
    model's dtype, as the eager model computes them.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, decoder: Decoder, limits: ExecutorLimits, num_tree_rows: int = 0) -> None:
        """num_tree_rows: most rows of trees in a step."""
        self._decoder, self._block_size = decoder, limits.block_size
        self._num_tree_blocks = -(-num_tree_rows // limits.block_size)
        self.rotations = _rotations(decoder, limits.max_model_len + 1)
        self.allocate(1)

    def allocate(self, num_blocks: int) -> None:
        """Replace keys and values. Graphs that were captured before still use the old ones."""
        decoder, config = self._decoder, self._decoder.config
        num_all = num_blocks + self._num_tree_blocks
        shape = (config.num_layers, num_all, config.num_kv_heads, self._block_size, config.head_dim)
        # The old ones are freed before the new ones are allocated.
        self.keys = self.values = torch.empty(0, dtype=decoder.kv_dtype)
        self.first_tree_slot = num_blocks * self._block_size
        self.keys = torch.empty(shape, dtype=decoder.kv_dtype, device=decoder.device)
        self.values = torch.empty(shape, dtype=decoder.kv_dtype, device=decoder.device)

    def layer(self, index: int) -> LayerKV:
        """Keys and values of a layer."""
        scales = self._decoder.weights.kv_scales
        if scales is None:
            return LayerKV(self.keys[index], self.values[index])

        return LayerKV(self.keys[index], self.values[index], scales.keys[index], scales.values[index])


def _rotations(decoder: Decoder, num_positions: int) -> list[Rotation]:
    """The tables of each layer. Layers with the same rotation share them."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=decoder.device)
    tables = [half_tables(rope, positions, decoder.dtype) for rope in decoder.config.ropes]
    return [(None, None) if rope is None else tables[rope] for rope in decoder.config.layer_ropes]
