"""Attention of the nodes of token trees over a paged KV cache, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from msgspec import Struct

from drift_sdk.models.attention import AttentionBatch, with_sinks
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.view_attention import ViewAttentionBatch

__all__ = ["StepRows", "TreeAttentionBatch", "TreeRows"]


class TreeRows(Struct, frozen=True):
    """The rows of one sequence in a step: nodes of a tree.

    block_ids:  the sequence's KV blocks, with its prefix at positions 0 ... num_prefix - 1 (shifted by the
                batch's `slot_offset`), which all rows see.
    positions:  of each row.
    key_slots:  cache slots of the tree's nodes that any row may see. The last ones are those of the rows, in
                order, and receive their keys and values.
    seen:       for each row, the indices in `key_slots` of the nodes on its path, in order, its own included:
                the first of them has position `num_prefix`.
    """

    block_ids: Sequence[int]
    num_prefix: int
    positions: Sequence[int]
    key_slots: Sequence[int]
    seen: Sequence[Sequence[int]]

    @property
    def num_rows(self) -> int:
        return len(self.positions)


class TreeAttentionBatch:
    """The rows of a step, each of which sees the prefix of its sequence and some nodes of its tree. Built
    once a step, and used by all layers in the place of an `AttentionBatch`.

    num_rows, positions, slot_mapping: as of AttentionBatch.
    visible: for each sequence, [its rows, prefix and nodes] bool: what each row sees.
    """

    def __init__(self, sequences: Sequence[TreeRows], cache: KVCache, *, slot_offset: int = 0) -> None:
        device = cache.device
        first_rows = list(accumulate((sequence.num_rows for sequence in sequences), initial=0))
        self.num_rows: int = first_rows[-1]
        num_keys = [sequence.num_prefix + len(sequence.key_slots) for sequence in sequences]
        self._most_rows = max(sequence.num_rows for sequence in sequences)
        key_slots = torch.zeros(len(sequences), max(num_keys), dtype=torch.int64)
        visible = torch.zeros(len(sequences), self._most_rows, max(num_keys), dtype=torch.bool)
        # For each row, the position of each key that it sees.
        key_positions = torch.arange(max(num_keys)).repeat(len(sequences), self._most_rows, 1)
        padded_rows: list[int] = []
        for index, sequence in enumerate(sequences):
            nodes = torch.tensor(sequence.key_slots, dtype=torch.int64)
            slots = torch.cat((prefix_slots(sequence, cache.block_size, slot_offset), nodes))
            # Padding keys are read from a slot that is written: an unwritten one may hold NaN, which remains
            # NaN under a mask.
            key_slots[index] = slots[0]
            key_slots[index, : len(slots)] = slots
            visible[index, :, : sequence.num_prefix] = True
            for row, seen in enumerate(sequence.seen):
                on_path = [sequence.num_prefix + each for each in seen]
                visible[index, row, on_path] = True
                key_positions[index, row, on_path] = sequence.num_prefix + torch.arange(len(seen))
            visible[index, sequence.num_rows :, 0] = True  # padding rows see something, so they are not NaN
            padded_rows += range(index * self._most_rows, index * self._most_rows + sequence.num_rows)

        positions = [position for sequence in sequences for position in sequence.positions]
        row_slots = [slot for sequence in sequences for slot in sequence.key_slots[-sequence.num_rows :]]
        self.positions: torch.Tensor = torch.tensor(positions, dtype=torch.int64, device=device)
        self.slot_mapping: torch.Tensor = torch.tensor(row_slots, dtype=torch.int64, device=device)
        self.visible: list[torch.Tensor] = [
            visible[index, : sequence.num_rows, : num_keys[index]] for index, sequence in enumerate(sequences)
        ]
        self._dtype, self._device = cache.dtype, device
        self._visible, self._key_positions = visible, key_positions
        self._masks: dict[int | None, torch.Tensor] = {}  # by window
        self._key_slots = key_slots.view(-1).to(device)
        self._padded_rows = torch.tensor(padded_rows, dtype=torch.int64, device=device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        layer: int,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values to the cache, then compute their attention in one layer; arguments
        and result as of `AttentionBatch.attend`."""
        cache.store(layer, self.slot_mapping, key, value)
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        batch, (num_heads, head_dim) = self._visible.shape[0], query.shape[1:]
        padded = query.new_zeros(batch * self._most_rows, num_heads, head_dim)
        padded.index_copy_(0, self._padded_rows, query)
        queries = padded.view(batch, self._most_rows, num_heads, head_dim).transpose(1, 2)
        keys, values = cache.read(layer, self._key_slots)
        gathered_keys = keys.view(batch, -1, *keys.shape[1:]).transpose(1, 2)
        gathered_values = values.view(batch, -1, *values.shape[1:]).transpose(1, 2)
        value_dim = values.shape[-1]
        mask = self._masks[window]
        if sinks is not None:
            scale = head_dim**-0.5 if scale is None else scale
            queries, gathered_keys, gathered_values = with_sinks(
                queries, gathered_keys, gathered_values, sinks / scale
            )
            mask = F.pad(mask, (0, 1))
        output = F.scaled_dot_product_attention(
            queries, gathered_keys, gathered_values, attn_mask=mask, scale=scale, enable_gqa=True
        )[..., :value_dim]
        rows = output.transpose(1, 2).reshape(batch * self._most_rows, num_heads * value_dim)
        return rows.index_select(0, self._padded_rows)

    def _mask(self, window: int | None) -> torch.Tensor:
        """Addends of scores, [sequences, 1, rows, keys]: 0 for keys that a row sees, else -inf."""
        visible = self._visible
        if window is not None:
            # A row's own position is the highest that it sees.
            seen_positions = self._key_positions.masked_fill(~visible, -1)
            visible = visible & (seen_positions > seen_positions.amax(dim=-1, keepdim=True) - window)
        mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, float("-inf"))
        return mask[:, None].to(self._device)


StepRows = AttentionBatch | TreeAttentionBatch | ViewAttentionBatch
"""The rows of a step and the keys that each of them sees."""


def prefix_slots(sequence: TreeRows, block_size: int, slot_offset: int) -> torch.Tensor:
    """The cache slots of a sequence's prefix, [num_prefix] int64 on the CPU."""
    num_slots = sequence.num_prefix + slot_offset
    blocks = torch.tensor(sequence.block_ids[: -(-num_slots // block_size)], dtype=torch.int64)
    slots = blocks[:, None] * block_size + torch.arange(block_size)
    return slots.view(-1)[slot_offset:num_slots]
