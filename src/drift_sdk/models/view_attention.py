"""Attention of rounds that verify over a part of the KV cache, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from msgspec import Struct

from drift_sdk.models.attention import AttentionBatch, SequenceRows, with_sinks
from drift_sdk.models.kv_cache import KVCache

__all__ = ["RefreshBatch", "ViewAttentionBatch", "ViewRows", "attention_shares"]


class ViewRows(Struct, frozen=True):
    """The rows of one sequence in a step, at positions `start ... start + num_rows - 1`, and what they see.

    block_ids: the sequence's KV blocks. views: for each layer, the numbers of the blocks before the window
    that rows see, ascending; window_block: that of the window's first block, from which on they see all keys
    up to their own.
    """

    block_ids: Sequence[int]
    start: int
    num_rows: int
    views: Sequence[Sequence[int]]
    window_block: int


class ViewAttentionBatch:
    """The rows of a step, each of which sees a part of its sequence, another one in each layer. Used by all
    layers in the place of an `AttentionBatch`.

    num_rows, positions, slot_mapping: as of AttentionBatch.
    """

    def __init__(self, sequences: Sequence[ViewRows], cache: KVCache) -> None:
        self.num_rows: int = sum(sequence.num_rows for sequence in sequences)
        self._sequences, self._size = sequences, cache.block_size
        positions = [
            torch.arange(sequence.start, sequence.start + sequence.num_rows) for sequence in sequences
        ]
        slots = [self._slots(sequence, at) for sequence, at in zip(sequences, positions, strict=True)]
        self.positions: torch.Tensor = torch.cat(positions).to(cache.device)
        self.slot_mapping: torch.Tensor = torch.cat(slots).to(cache.device)

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
        and result as of `AttentionBatch.attend`. No layer has a window."""
        assert window is None, "layers with windows have no views"
        cache.store(layer, self.slot_mapping, key, value)
        outputs, first = [], 0
        for sequence in self._sequences:
            rows = slice(first, first + sequence.num_rows)
            outputs.append(self._attend(query[rows], sequence, cache, layer, scale, sinks))
            first = rows.stop

        return torch.cat(outputs)

    def _attend(
        self,
        query: torch.Tensor,
        sequence: ViewRows,
        cache: KVCache,
        layer: int,
        scale: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of a sequence's rows: query [M, num_heads, head_dim]."""
        num_rows, num_heads, head_dim = query.shape
        blocks = torch.tensor(sequence.views[layer], dtype=torch.int64)
        before = (blocks[:, None] * self._size + torch.arange(self._size)).flatten()
        end = sequence.start + num_rows
        seen = torch.cat((before, torch.arange(sequence.window_block * self._size, end)))
        rows = torch.arange(sequence.start, end)
        mask = torch.zeros(num_rows, len(seen), dtype=query.dtype)
        mask.masked_fill_(seen > rows[:, None], float("-inf"))
        mask = mask.to(cache.device)
        keys, values = cache.read(layer, self._slots(sequence, seen).to(cache.device))
        value_dim = values.shape[-1]
        query, keys, values = (each.transpose(0, 1)[None] for each in (query, keys, values))
        if sinks is not None:
            scale = head_dim**-0.5 if scale is None else scale
            query, keys, values = with_sinks(query, keys, values, sinks / scale)
            mask = F.pad(mask, (0, 1))
        output = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return output[0, ..., :value_dim].transpose(0, 1).reshape(num_rows, -1)

    def _slots(self, sequence: ViewRows, positions: torch.Tensor) -> torch.Tensor:
        """The cache slots of positions."""
        table = torch.tensor(sequence.block_ids, dtype=torch.int64)
        return table[positions // self._size] * self._size + positions % self._size


class RefreshBatch(AttentionBatch):
    """The rows of a step that see all keys of their sequences. The shares of attention that blocks get from
    the last rows of each sequence are kept.

    shares: of each layer attended so far, for each sequence [blocks] float32, see `attention_shares`.
    """

    def __init__(self, sequences: Sequence[SequenceRows], cache: KVCache, num_scored: Sequence[int]) -> None:
        """num_scored: rows of each sequence from which shares are taken, the last ones."""
        super().__init__(sequences, cache)
        self._sequences, self._num_scored = sequences, num_scored
        self.shares: list[list[torch.Tensor]] = []

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
        output = super().attend(query, key, value, cache, layer, window=window, scale=scale, sinks=sinks)
        found, last = [], 0
        for sequence, num_scored in zip(self._sequences, self._num_scored, strict=True):
            last += sequence.num_rows
            table = torch.tensor(sequence.block_ids, dtype=torch.int64, device=cache.device)
            position = torch.arange(sequence.num_keys, device=cache.device)
            slots = table[position // cache.block_size] * cache.block_size + position % cache.block_size
            keys, _ = cache.read(layer, slots)
            rows = query[last - num_scored : last]
            found.append(attention_shares(rows, keys, cache.block_size, scale))

        self.shares.append(found)
        return output


def attention_shares(
    query: torch.Tensor, keys: torch.Tensor, block_size: int, scale: float | None = None
) -> torch.Tensor:
    """The shares of attention that blocks get, added over rows and heads: [blocks] float32.

    query [M, num_heads, head_dim]: of the last M positions. keys [P, num_kv_heads, head_dim]: of all.
    """
    (num_rows, num_heads, head_dim), (num_keys, num_kv_heads, _) = query.shape, keys.shape
    grouped = query.float().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("mhgd,phd->mhgp", grouped, keys.float())
    scores *= head_dim**-0.5 if scale is None else scale
    position = torch.arange(num_keys, device=keys.device)
    is_later = position > position[-num_rows:, None]
    weights = scores.masked_fill(is_later[:, None, None], float("-inf")).softmax(-1).sum((0, 1, 2))
    return F.pad(weights, (0, -num_keys % block_size)).view(-1, block_size).sum(1)
