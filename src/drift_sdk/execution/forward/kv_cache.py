"""The target's KV cache in blocks, in the layout that the kernels read, and its rotation tables."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk.models.decoder import Decoder
from drift_sdk.models.rope import half_tables
from drift_sdk.steps import ExecutorLimits

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """Keys and values of all sequences.

    keys, values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim], uninitialised. They have a
    single block until `allocate` is called, which is enough for steps whose rows are all padding.
    cos, sin: [max_model_len + 1, head_dim / 2], by position, in the model's dtype, as the eager model
    computes them.
    """

    def __init__(self, decoder: Decoder, limits: ExecutorLimits) -> None:
        self._decoder, self._block_size = decoder, limits.block_size
        self.cos, self.sin = _rotation_tables(decoder, limits.max_model_len + 1)
        self.allocate(1)

    def allocate(self, num_blocks: int) -> None:
        """Replace keys and values. Graphs that were captured before still use the old ones."""
        decoder, config = self._decoder, self._decoder.config
        shape = (config.num_layers, num_blocks, config.num_kv_heads, self._block_size, config.head_dim)
        self.keys = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)


def _rotation_tables(decoder: Decoder, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_positions, head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=decoder.device)
    return half_tables(decoder.config.ropes[0], positions, decoder.dtype)
