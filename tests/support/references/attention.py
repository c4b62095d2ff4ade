"""References of the kernels of `drift_sdk._kernels.attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import (
    MAX_COMPANIONS,
    TILE_WORDS,
    BlockTable,
    PlannedRows,
    most_companions,
)
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk.quantised.formats import E4M3


def plan_attention_reference(
    rows: PlannedRows,
    partitions: Partitions,
    window: int = 0,
    blocks: BlockTable | None = None,
    group: int = 1,
) -> Tensor:
    """Return the tiles in use, [num_tiles, 8] int32, as `plan_attention` writes them."""
    tile, tiles = partitions.tile, list[tuple[int, ...]]()
    shared: list[tuple[int, tuple[int, ...]]] = [(0, (index,)) for index in range(rows.num_sequences)]
    if blocks is not None and most_companions(rows, group, window) > 1:
        shared = shared_prefixes_reference(rows, blocks, group, partitions)
    for sequence, (slot, live) in enumerate(_live_positions(rows)):
        if not live:
            continue

        num_keys, (num_shared, companions) = max(live) + 1, shared[sequence]
        first_seen = max(min(live) - window + 1, 0) if window else 0
        if companions[0] != sequence:
            first_seen = num_shared
        for first_key in range(first_seen // tile * tile, num_keys, tile):
            if first_key < num_shared:
                tiles.append((sequence, slot, num_shared, first_key, *companions))
            else:
                tiles.append((sequence, slot, num_keys, first_key, sequence, -1, -1, -1))
    return torch.tensor(tiles, dtype=torch.int32, device=rows.slot.device).view(-1, TILE_WORDS.value)


def pack_cache(codes: Tensor) -> Tensor:
    """Return e4m3 numbers [..., head_dim], in the order of dimensions, as they lie in a cache."""
    halves = codes.view(torch.uint8).reshape(*codes.shape[:-1], 2, -1)
    return halves.transpose(-1, -2).reshape(codes.shape).view(E4M3)


def unpack_cache(cache: Tensor) -> Tensor:
    """Return the e4m3 numbers [..., head_dim] of a cache in the order of dimensions."""
    pairs = cache.view(torch.uint8).reshape(*cache.shape[:-1], -1, 2)
    return pairs.transpose(-1, -2).reshape(cache.shape).view(E4M3)


def cache_numbers(cache: Tensor, scale: Tensor | None) -> Tensor:
    """Return the numbers of a cache [..., num_kv_heads, block_size, head_dim]: of one of e4m3 in float64,
    multiplied by the scales [num_kv_heads] and in the order of dimensions; any other as it is."""
    if scale is None:
        return cache

    return unpack_cache(cache).to(torch.float64) * scale.double()[:, None, None]


def paged_attention_reference(layer: LayerAttention, rows: PlannedRows) -> Tensor:
    """Return the attention of each row in float64, one row after the other: [R, num_heads, head_dim]."""
    kv, block_size = layer.kv, layer.kv.block_size
    keys, values = cache_numbers(kv.keys, kv.key_scale), cache_numbers(kv.values, kv.value_scale)
    out = torch.zeros(layer.query.shape, dtype=torch.float64, device=layer.query.device)
    for row, (slot, position) in enumerate(zip(rows.slot.tolist(), rows.position.tolist(), strict=True)):
        if slot < 0:
            continue

        blocks = layer.block_table[slot, : position // block_size + 1].long()
        first = layer.first_key
        if layer.window:
            first = max(first, position - layer.window + 1)
        seen = [
            cache[blocks].transpose(1, 2).flatten(0, 1)[first : position + 1].double()
            for cache in (keys, values)
        ]
        key, value = (tensor.repeat_interleave(layer.group, dim=1) for tensor in seen)
        scores = torch.einsum("hd,nhd->hn", layer.query[row].double(), key) * layer.score_scale
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.double()[:, None]), dim=1)
        shares = scores.softmax(-1)[:, : len(key)]
        out[row] = torch.einsum("hn,nhd->hd", shares, value)

    return out


def prefill_attention_reference(layer: LayerAttention, tiles: Tensor) -> None:
    """Write what `prefill_attention` writes: in float64, one tile after the other, rounded once."""
    kv, block_size, query = layer.kv, layer.kv.block_size, layer.query
    keys, values = cache_numbers(kv.keys, kv.key_scale), cache_numbers(kv.values, kv.value_scale)
    for slot, first_row, num_rows, start in tiles.tolist():
        if slot < 0:
            continue

        row_position = torch.arange(start, start + num_rows, device=query.device)[:, None]
        key_position = torch.arange(layer.first_key, start + num_rows, device=query.device)
        is_seen = key_position <= row_position
        if layer.window:
            is_seen &= key_position > row_position - layer.window

        # Keys that no row sees may hold anything.
        key_position = key_position[is_seen.any(dim=0)]
        is_seen = is_seen[:, is_seen.any(dim=0)]
        blocks = layer.block_table[slot].to(torch.int64)[key_position // block_size]
        key, value = (
            cache[blocks, :, key_position % block_size].double().repeat_interleave(layer.group, dim=1)
            for cache in (keys, values)
        )
        rows = slice(first_row, first_row + num_rows)
        scores = torch.einsum("rhd,khd->hrk", query[rows].double(), key) * layer.score_scale
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if layer.sinks is not None:
            sink = layer.sinks.double()[:, None, None].expand(-1, num_rows, 1)
            scores = torch.cat((scores, sink), dim=-1)

        shares = scores.softmax(dim=-1)[..., : len(key_position)]
        layer.out[rows] = torch.einsum("hrk,khd->rhd", shares, value).to(layer.out.dtype)


def shared_prefixes_reference(
    rows: PlannedRows, blocks: BlockTable, group: int, partitions: Partitions
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the keys of the shared prefix and the companions of each sequence, as `find_shared_prefixes`
    writes them."""
    most, size = most_companions(rows, group, window=0), blocks.block_size
    tables = [
        tuple(blocks.table[slot, : (max(live) + 1) // size].tolist()) if live else ()
        for slot, live in _live_positions(rows)
    ]
    first_blocks = -(-partitions.narrow // size)
    alike: dict[tuple[int, ...], list[int]] = {}
    for sequence, table in enumerate(tables):
        is_long = len(table) >= first_blocks
        alike.setdefault(table[:first_blocks] if is_long else (-1 - sequence,), []).append(sequence)
    found = dict[int, tuple[int, tuple[int, ...]]]()
    for sequences in alike.values():
        for first in range(0, len(sequences), most):
            companions = sequences[first : first + most]
            columns = zip(*(tables[sequence] for sequence in companions), strict=False)
            num_common = 0
            for column in columns if len(companions) > 1 else ():
                if len(set(column)) > 1:
                    break

                num_common += size
            num_keys = partitions.floor(num_common)
            row = (*companions, *[-1] * (MAX_COMPANIONS.value - len(companions)))
            found |= dict.fromkeys(companions, (num_keys, row))
    return [found[sequence] for sequence in range(rows.num_sequences)]


def _live_positions(rows: PlannedRows) -> list[tuple[int, list[int]]]:
    """Return the slot of each sequence, or -1, and the positions of its live rows."""
    slots = rows.slot.view(-1, rows.rows_per_sequence).tolist()
    positions = rows.position.view(-1, rows.rows_per_sequence).tolist()
    return [
        (max(own), [at for slot, at in zip(own, where, strict=True) if slot >= 0])
        for own, where in zip(slots, positions, strict=True)
    ]
