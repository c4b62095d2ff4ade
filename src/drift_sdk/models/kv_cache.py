"""The KV cache of plain torch: keys and values of tokens, in blocks."""

from __future__ import annotations

import torch

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers. In each layer, KV slot `block_id * block_size + offset` holds one
    token's.

    keys, values: [num_layers, num_blocks * block_size, num_kv_heads, head_dim], not initialised: a slot must
    be written before it is read.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self._layers = tuple(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [num_blocks * block_size, num_kv_heads, head_dim] each."""
        return self._layers[index]
