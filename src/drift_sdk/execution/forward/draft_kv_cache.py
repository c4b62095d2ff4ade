"""What a draft remembers on the device: keys and values, the tables of its rotation, features, outputs."""

from __future__ import annotations

import torch

from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.rope import inverse_frequencies
from drift_sdk.steps import ExecutorLimits

__all__ = ["DraftKVCache"]


class DraftKVCache:
    """Row i, of (feature of position i, token i + 1), lies at the place of token i + 1 of its slot's blocks:
    place 0 of a slot means nothing.

    keys, values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim], uninitialised; of one block,
    as block_features, until `allocate`.
    cos, sin: [max_model_len + 2, head_dim / 2] by place, so of the position before; place 0 is never used.
    block_features: [num_blocks, hidden], the feature of each block's last token.
    outputs: [num_slots, hidden], what each slot's newest row gave.
    """

    def __init__(self, draft: DraftDecoder, limits: ExecutorLimits, num_slots: int) -> None:
        config, dtype, device = draft.config, draft.dtype, draft.device
        self._draft = draft
        self.num_places = limits.max_model_len + 2
        self.block_size = limits.block_size
        self.outputs = torch.empty(num_slots, config.hidden_size, dtype=dtype, device=device)
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        positions = torch.arange(self.num_places, dtype=torch.float32, device=device) - DRAFT_KV_OFFSET
        angles = positions[:, None] * frequencies.to(device)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.allocate(1)

    def allocate(self, num_blocks: int) -> None:
        """Replace keys, values and features; graphs that were captured before still use the old ones."""
        config, dtype, device = self._draft.config, self._draft.dtype, self._draft.device
        shape = (config.num_layers, num_blocks, config.num_kv_heads, self.block_size, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.block_features = torch.empty(num_blocks, config.hidden_size, dtype=dtype, device=device)
