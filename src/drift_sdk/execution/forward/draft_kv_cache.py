"""The KV cache of a draft head, its rotation tables, and the features and outputs kept beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.rope import half_tables
from drift_sdk.steps import ExecutorLimits

__all__ = ["DraftKVCache"]


class DraftKVCache:
    """The draft's state on the device.

    Draft row i is computed from the feature of position i and token i + 1. Its keys and values lie at the
    place of token i + 1 in its slot's blocks, so place 0 of a slot is unused.

    keys, values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim], uninitialised. They and
    `block_features` have a single block until `allocate` is called. Behind the blocks of keys and values
    there are more, for nodes of trees while these grow.
    first_tree_slot: the first cache slot behind the blocks.
    cos, sin: [max_model_len + 2, head_dim / 2] by place, so each holds the rotation of the position before;
    the entry of place 0 is never used.
    block_features: [num_blocks, hidden], the feature of each block's last token.
    outputs: [num_slots, hidden], the output of each slot's newest row.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self, draft: DraftDecoder, limits: ExecutorLimits, num_slots: int, num_tree_rows: int = 0
    ) -> None:
        """num_tree_rows: most rows that are computed while trees grow."""
        config, dtype, device = draft.config, draft.dtype, draft.device
        self._draft = draft
        self._num_tree_blocks = -(-num_tree_rows // limits.block_size)
        self.num_places = limits.max_model_len + 2
        self.block_size = limits.block_size
        self.outputs = torch.empty(num_slots, config.hidden_size, dtype=dtype, device=device)
        positions = torch.arange(self.num_places, dtype=torch.float32, device=device) - DRAFT_KV_OFFSET
        rope = config.attention.rope
        assert rope is not None
        self.cos, self.sin = half_tables(rope, positions, dtype)
        self.allocate(1)

    def allocate(self, num_blocks: int) -> None:
        """Replace keys, values and block features. Graphs captured before still use the old ones."""
        config, dtype, device = self._draft.config, self._draft.dtype, self._draft.device
        num_all = num_blocks + self._num_tree_blocks
        kv = config.attention.kv
        shape = (config.num_layers, num_all, kv.num_kv_heads, self.block_size, kv.head_dim)
        # The old ones are freed before the new ones are allocated.
        self.keys = self.values = torch.empty(0, dtype=dtype)
        self.first_tree_slot = num_blocks * self.block_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.block_features = torch.empty(num_blocks, config.hidden_size, dtype=dtype, device=device)

    def layer(self, index: int) -> LayerKV:
        """Keys and values of a layer."""
        return LayerKV(self.keys[index], self.values[index])
