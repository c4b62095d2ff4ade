"""Causal attention over a paged KV cache, in plain torch.

Of the rows of a step, of rounds that verify over a part of the cache, and of the nodes of token trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from msgspec import Struct

from drift_sdk.models.kv_cache import KVCache

MAX_PADDED_ROWS = 16
"""Sequences with more rows than this are computed alone: the chunk of a prompt uses the device well by
itself."""
MAX_PADDED_SLOTS = 32_768
"""Most key slots, padding included, of sequences that are computed as one padded batch."""
MIN_PADDING = 256
"""In a padded batch, a sequence is padded by at most this number of keys or, if it is longer, its own
length."""


SINK_PADDING = 8
"""Elements that sinks add to a head: one is needed, but widths are multiples of 8 where attention is fast."""


class SequenceRows(Struct, frozen=True):
    """The rows of one sequence in a step, at positions `start ... start + num_rows - 1`.

    block_ids: the sequence's KV blocks from position 0 on. They hold its context and receive the keys and
    values of the rows, all shifted by the batch's `slot_offset`.
    window_ids: blocks of layers with windows; blocks behind the window are not read. None: `block_ids` serve
    these layers too.
    """

    block_ids: Sequence[int]
    start: int
    num_rows: int
    window_ids: Sequence[int] | None = None

    @property
    def num_keys(self) -> int:
        """Keys that the last row sees."""
        return self.start + self.num_rows


class AttentionBatch:
    """The rows of a step and the keys that each of them sees. Built once a step from integers of the host,
    and used by all layers.

    Rows are ordered by sequence. Row j of a sequence sees its keys at positions 0 ... start + j, of which a
    layer with a window uses the last ones. The key of position p lies at index p + `slot_offset` of the
    slots of the sequence's blocks; slots at indices below `slot_offset` are never read.

    num_rows:      N, over all sequences.
    positions:     [N] int64, on the cache's device, without the offset.
    slot_mapping:  [N] int64, the cache slot that receives each row's key and value.
    window_slot_mapping: the same in layers with windows.

    Raises ValueError for rows or an offset below the allowed range, and for too few blocks.
    """

    def __init__(self, sequences: Sequence[SequenceRows], cache: KVCache, *, slot_offset: int = 0) -> None:
        for sequence in sequences:
            _check(sequence, cache, slot_offset)

        first_rows = list(accumulate((sequence.num_rows for sequence in sequences), initial=0))
        self.num_rows: int = first_rows[-1]
        self._groups = [
            _Group([sequences[i] for i in group], [first_rows[i] for i in group], cache, slot_offset)
            for group in _group_sequences(sequences)
        ]
        self.positions: torch.Tensor = torch.empty(self.num_rows, dtype=torch.int64, device=cache.device)
        self.slot_mapping: torch.Tensor = torch.empty(self.num_rows, dtype=torch.int64, device=cache.device)
        self.window_slot_mapping: torch.Tensor = self.slot_mapping
        if any(sequence.window_ids is not None for sequence in sequences):
            self.window_slot_mapping = torch.empty_like(self.slot_mapping)
        for group in self._groups:
            self.positions[group.rows] = group.positions
            self.window_slot_mapping[group.rows] = group.window_row_slots
            self.slot_mapping[group.rows] = group.row_slots

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: KVCache,
        layer: int,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values to the cache, then compute their attention in one layer.

        query:       [N, num_heads, head_dim].
        key:         [N, num_kv_heads, head_dim]; None: the layer of the cache has keys and values already.
        value:       [N, num_kv_heads, value_dim]; None with `key`.
        window:      number of keys that a row sees at most, its own included; None: all before it.
        scale:       factor of the products of queries and keys; None: 1 / sqrt(head_dim).
        sinks:       [num_heads], a logit of each head that takes part in the softmax and has no value.

        Returns [N, num_heads * value_dim].
        """
        if key is not None and value is not None:
            slots = self.slot_mapping if window is None else self.window_slot_mapping
            cache.store(layer, slots, key, value)
        if len(self._groups) == 1:
            return self._groups[0].attend(query, cache, layer, window, scale, sinks)

        found = [
            group.attend(query[group.rows], cache, layer, window, scale, sinks) for group in self._groups
        ]
        output = query.new_empty(query.shape[0], found[0].shape[1])
        for group, rows in zip(self._groups, found, strict=True):
            output[group.rows] = rows

        return output


class LastRows(Struct, frozen=True):
    """The rows of a step whose output is wanted: the last ones of some of its sequences.

    index: [M] int64, on the CPU: their places among the rows of the step, in order.
    sequences: these rows alone, of the sequences that have some.
    """

    index: torch.Tensor
    sequences: tuple[SequenceRows, ...]

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows], numbers: Sequence[int]) -> LastRows:
        """sequences: of the step. numbers: how many rows of each are wanted, 0 to all."""
        wanted, index, end = list[SequenceRows](), list[int](), 0
        for sequence, number in zip(sequences, numbers, strict=True):
            end += sequence.num_rows
            index += range(end - number, end)
            if number:
                start = sequence.num_keys - number
                wanted.append(SequenceRows(sequence.block_ids, start, number, sequence.window_ids))
        return cls(torch.tensor(index, dtype=torch.int64, device="cpu"), tuple(wanted))


class _Group:
    """Sequences with the same number of rows, computed as one padded batch."""

    def __init__(
        self,
        sequences: Sequence[SequenceRows],
        first_rows: Sequence[int],
        cache: KVCache,
        slot_offset: int,
    ) -> None:
        self.num_sequences = len(sequences)
        self.num_rows = sequences[0].num_rows
        self.rows = _rows(first_rows, self.num_rows, cache.device)
        max_keys = max(sequence.num_keys for sequence in sequences)
        self._starts = torch.tensor([[s.start] for s in sequences], dtype=torch.int64, device="cpu")
        self._positions = self._starts + torch.arange(self.num_rows, device="cpu")
        tables = [sequence.block_ids for sequence in sequences]
        self._slots = _slots(tables, max_keys, cache.block_size, slot_offset)
        self._window_slots = self._slots
        if any(sequence.window_ids is not None for sequence in sequences):
            tables = [each.block_ids if each.window_ids is None else each.window_ids for each in sequences]
            self._window_slots = _slots(tables, max_keys, cache.block_size, slot_offset)
        self._dtype, self._device = cache.dtype, cache.device
        self._keys: dict[tuple[int | None, bool], _Keys] = {}
        self.positions = self._positions.view(-1).to(cache.device)
        self.row_slots = self._slots.gather(1, self._positions).view(-1).to(cache.device)
        self.window_row_slots = self.row_slots
        if self._window_slots is not self._slots:
            self.window_row_slots = self._window_slots.gather(1, self._positions).view(-1).to(cache.device)

    def attend(
        self,
        query: torch.Tensor,
        cache: KVCache,
        layer: int,
        window: int | None,
        scale: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of the group's rows: query [M, num_heads, head_dim], in a layer of the cache.
        Returns [M, num_heads * value_dim]."""
        kind = window, sinks is not None
        if kind not in self._keys:
            self._keys[kind] = self._find_keys(*kind)

        found = self._keys[kind]
        batch, num_heads, head_dim = self.num_sequences, query.shape[1], query.shape[2]
        keys, values = cache.read(layer, found.slots)
        query = query.view(batch, self.num_rows, num_heads, head_dim).transpose(1, 2)
        key = keys.view(batch, -1, *keys.shape[1:]).transpose(1, 2)
        value = values.view(batch, -1, *values.shape[1:]).transpose(1, 2)
        if sinks is not None:
            scale = head_dim**-0.5 if scale is None else scale
            query, key, value = with_sinks(query, key, value, sinks / scale)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=found.mask,
            is_causal=found.is_causal,
            scale=scale,
            enable_gqa=True,
        )
        value_dim = values.shape[-1]
        output = output[..., :value_dim]
        return output.transpose(1, 2).reshape(batch * self.num_rows, num_heads * value_dim)

    def _find_keys(self, window: int | None, has_sinks: bool) -> _Keys:
        """The keys that the rows see in layers with this window: of each sequence, from the first that its
        first row sees to that of its last row.

        Padding keys are read from the slot of the first, which is always written: an unwritten slot may hold
        NaN, which remains NaN under a mask. With sinks, the mask has a column more, which every row sees.
        """
        ends = self._positions[:, -1:] + 1
        firsts = torch.zeros_like(ends) if window is None else (self._starts - window + 1).clamp_(min=0)
        num_keys = int((ends - firsts).max())
        key_positions = firsts + torch.arange(num_keys, device="cpu")
        all_slots = self._slots if window is None else self._window_slots
        slots = all_slots.gather(1, torch.where(key_positions < ends, key_positions, firsts))
        num_columns = num_keys + has_sinks
        reach = num_columns if window is None else window
        is_alone = self.num_sequences == 1
        is_causal = is_alone and num_keys == self.num_rows <= reach and not has_sinks
        mask = None
        if not is_alone:
            distances = self._positions[:, :, None] - key_positions[:, None]
            is_visible = (distances >= 0) & (distances < reach)
            mask = torch.zeros(is_visible.shape, dtype=self._dtype, device="cpu")
            mask = F.pad(mask.masked_fill_(~is_visible, float("-inf")), (0, int(has_sinks)))[:, None]
        elif self.num_rows > 1 and not is_causal:
            # The distance of row and key decides. With the keys in reverse order it is row plus column,
            # minus a constant, so a strided view of num_columns + num_rows - 1 numbers is the whole mask.
            # Without a window the sinks come as one more key before the first.
            slots = slots.flip(1)
            nearest = self.num_rows - 1
            diagonals = torch.full((num_columns + nearest,), float("-inf"), dtype=self._dtype, device="cpu")
            diagonals[nearest : nearest + reach] = 0.0
            mask = diagonals.to(self._device).as_strided((self.num_rows, num_columns), (1, 1))
            if window is not None and has_sinks:
                mask = mask.clone()
                mask[:, num_keys] = 0.0

        mask = None if mask is None else mask.to(self._device)
        return _Keys(slots=slots.reshape(-1).to(self._device), mask=mask, is_causal=is_causal)


class _Keys(Struct, frozen=True, kw_only=True):
    """The keys of a group's rows in a layer.

    slots:      [num_sequences * num_keys] int64.
    mask:       addends of the products of queries and keys; None: every row sees every key.
    is_causal:  the keys are those of the rows, and each row sees those up to its own.
    """

    slots: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, products: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [batch, heads, rows or keys, head_dim] with a last key, whose product with the
    queries of a head is products [num_heads] and whose value is zero.

    Heads become longer by SINK_PADDING elements, of which the first holds the product.
    """
    padding = (0, SINK_PADDING)
    query, key, value = F.pad(query, padding), F.pad(key, (*padding, 0, 1)), F.pad(value, (*padding, 0, 1))
    head_dim = query.shape[-1] - SINK_PADDING
    query[..., head_dim] = products[:, None]
    key[..., -1, head_dim] = 1.0
    return query, key, value


def _group_sequences(sequences: Sequence[SequenceRows]) -> list[list[int]]:
    """The indices of the sequences of each group, in ascending order within a group."""
    groups: list[list[int]] = []
    by_num_rows: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if sequence.num_rows > MAX_PADDED_ROWS:
            groups.append([index])
        else:
            by_num_rows.setdefault(sequence.num_rows, []).append(index)

    for indices in by_num_rows.values():
        group: list[int] = []
        longest = 0
        for index in sorted(indices, key=lambda i: sequences[i].num_keys, reverse=True):
            length = sequences[index].num_keys
            needs_much_padding = longest - length > max(MIN_PADDING, length)
            if not group or needs_much_padding or (len(group) + 1) * longest > MAX_PADDED_SLOTS:
                group, longest = [], length
                groups.append(group)

            group.append(index)

    return [sorted(group) for group in groups]


def _rows(first_rows: Sequence[int], num_rows: int, device: torch.device) -> slice | torch.Tensor:
    """The indices of a group's rows in the step: a slice if they are consecutive."""
    first = first_rows[0]
    if first_rows[-1] - first == num_rows * (len(first_rows) - 1):
        return slice(first, first_rows[-1] + num_rows)

    firsts = torch.tensor(first_rows, dtype=torch.int64, device="cpu")
    return (firsts[:, None] + torch.arange(num_rows, device="cpu")).view(-1).to(device)


def _slots(tables: Sequence[Sequence[int]], max_keys: int, block_size: int, slot_offset: int) -> torch.Tensor:
    """The cache slot of each position, [num_sequences, max_keys] int64 on the CPU. Slots beyond the end of a
    sequence's table are those of its first block."""
    max_blocks = -(-(max_keys + slot_offset) // block_size)
    padded = []
    for table in tables:
        block_ids = list(table[:max_blocks])
        padded.append(block_ids + block_ids[:1] * (max_blocks - len(block_ids)))

    first_slots = torch.tensor(padded, dtype=torch.int64, device="cpu") * block_size
    slots = first_slots[:, :, None] + torch.arange(block_size, device="cpu")
    return slots.view(len(tables), -1)[:, slot_offset : slot_offset + max_keys]


def _check(sequence: SequenceRows, cache: KVCache, slot_offset: int) -> None:
    """Raise ValueError for an invalid range of rows, or too few blocks for it."""
    if slot_offset < 0:
        raise ValueError(f"slot_offset={slot_offset}: expected 0 or more")

    if sequence.num_rows < 1 or sequence.start < 0:
        raise ValueError(
            f"rows {sequence.start} + {sequence.num_rows}: expected at least one, from 0 upwards"
        )

    num_slots = sequence.num_keys + slot_offset
    num_blocks = -(-num_slots // cache.block_size)
    tables = [sequence.block_ids, sequence.block_ids if sequence.window_ids is None else sequence.window_ids]
    found = min(map(len, tables))
    if found < num_blocks:
        raise ValueError(f"{found} blocks for {num_slots} tokens: expected {num_blocks} or more")


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
        key: torch.Tensor | None,
        value: torch.Tensor | None,
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
        if key is not None and value is not None:
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
        key: torch.Tensor | None,
        value: torch.Tensor | None,
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
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: KVCache,
        layer: int,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values to the cache, then compute their attention in one layer; arguments
        and result as of `AttentionBatch.attend`."""
        if key is not None and value is not None:
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


class ParallelAttentionBatch:
    """The rows of drafts that are computed in one pass, and the keys that each of them sees: those of its
    sequence before the draft, from the cache, and those of the draft's rows, which are kept nowhere.

    num_rows, positions: as of AttentionBatch.
    """

    def __init__(
        self, sequences: Sequence[SequenceRows], cache: KVCache, *, is_causal: Sequence[bool]
    ) -> None:
        """sequences: the drafts' rows, behind `start` keys in the cache. is_causal: of each layer, whether a
        row sees no rows after its own. Raises ValueError for too few blocks for the keys in the cache."""
        for sequence in sequences:
            _check(SequenceRows(sequence.block_ids, 0, max(sequence.start, 1)), cache, 0)

        self.num_rows: int = sum(sequence.num_rows for sequence in sequences)
        self._sequences, self._is_causal, self._size = sequences, is_causal, cache.block_size
        starts = [torch.arange(each.start, each.num_keys, device=cache.device) for each in sequences]
        self.positions: torch.Tensor = torch.cat(starts)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: KVCache,
        layer: int,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention in one layer; arguments and result as of `AttentionBatch.attend`, for layers with keys of
        their own and without sinks. A window counts keys up to a row's own."""
        assert key is not None and value is not None and sinks is None
        outputs, first = [], 0
        for each in self._sequences:
            rows = slice(first, first + each.num_rows)
            first = rows.stop
            begin = 0 if window is None else max(each.start - window + 1, 0)
            keys, values = cache.read(layer, self._slots(each, begin, cache.device))
            keys, values = torch.cat((keys, key[rows])), torch.cat((values, value[rows]))
            output = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                attn_mask=self._mask(each, begin, window, layer, cache.device),
                scale=scale,
                enable_gqa=True,
            )
            outputs.append(output.transpose(0, 1).reshape(each.num_rows, -1))
        return torch.cat(outputs)

    def _slots(self, sequence: SequenceRows, begin: int, device: torch.device) -> torch.Tensor:
        """The cache slots of the keys at positions from `begin` to the draft."""
        at = torch.arange(begin, sequence.start, device=device)
        blocks = torch.tensor(sequence.block_ids, dtype=torch.int64, device=device)
        return blocks[at // self._size] * self._size + at % self._size

    def _mask(
        self, sequence: SequenceRows, begin: int, window: int | None, layer: int, device: torch.device
    ) -> torch.Tensor:
        """Whether each row [num_rows, 1] sees the key of each position [from `begin` on]."""
        keys = torch.arange(begin, sequence.num_keys, device=device)
        distances = keys[sequence.start - begin :, None] - keys
        visible = torch.ones_like(distances, dtype=torch.bool)
        if self._is_causal[layer]:
            visible &= distances >= 0
        if window is not None:
            visible &= distances < window
        return visible


StepRows = AttentionBatch | TreeAttentionBatch | ViewAttentionBatch | ParallelAttentionBatch
"""The rows of a step and the keys that each of them sees."""


def prefix_slots(sequence: TreeRows, block_size: int, slot_offset: int) -> torch.Tensor:
    """The cache slots of a sequence's prefix, [num_prefix] int64 on the CPU."""
    num_slots = sequence.num_prefix + slot_offset
    blocks = torch.tensor(sequence.block_ids[: -(-num_slots // block_size)], dtype=torch.int64)
    slots = blocks[:, None] * block_size + torch.arange(block_size)
    return slots.view(-1)[slot_offset:num_slots]
