"""Causal attention of prompt chunks over a paged cache, to which their own keys were written before.

A program has a tile of one chunk's rows for one head, and goes through the keys they see from position 0 on:
first those that all rows see, without any mask, then the few tiles along the diagonal. Keys are cut at
multiples of TILE_KEYS whatever the tile of rows, and keys that a row does not see leave its sums as they are:
a row's result does not depend on where its chunk began.

Flops: 4 * num_heads * head_dim for each pair of a row and a key it sees. Bytes: a program reads the keys and
values it sees once, TILE_ROWS flops for each byte of bfloat16. At 128 rows and 600 TFLOP/s that is 4.7 TB/s,
most of it from L2, because programs of one tile's heads are neighbours and walk along the same keys; 64 rows
would need twice that, more than L2 gives. Blocks of TILE_KEYS or more are the fast path: a tile of keys is
then one contiguous piece, found by one entry of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.prefill_tiles import TILE_FIELDS
from drift_sdk._kernels.common.arguments import check_rows, check_tensor
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = [
    "PrefillAttentionConfig",
    "prefill_attention",
    "prefill_attention_config",
    "prefill_attention_reference",
]

LOG2_E = tl.constexpr(1.4426950408889634)
NUM_FIELDS = tl.constexpr(TILE_FIELDS)
MIN_DOT_SIZE = 16


class PrefillAttentionConfig(Struct, frozen=True):
    """How the work is cut up: powers of two, tiles of 16 at least.

    Keys are found through the block table, so the stages serve two loads one after the other: five of them
    keep three tiles of keys in shared memory, three would wait for each tile just asked for.
    """

    tile_rows: int = 128
    tile_keys: int = 64
    num_warps: int = 8
    num_stages: int = 5


def prefill_attention_config(head_dim: int, dtype: torch.dtype) -> PrefillAttentionConfig:
    """For heads of this size: what fits in registers and shared memory without spilling."""
    if dtype == torch.float32:
        return PrefillAttentionConfig(tile_rows=16, tile_keys=32, num_stages=1)

    return PrefillAttentionConfig(tile_keys=64 if head_dim <= 128 else 32)


@triton.jit
def _attend_keys(
    maximum, weight, total, queries, keys, values, table, head, position, begin, end, first_key,
    num_keys, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Take in keys begin ... end - 1, begin a multiple of TILE_KEYS: the softmax's maximum, weight and sum.

    Keys before first_key or from num_keys on may never have been written: they are not loaded.
    """
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    for k in tl.range(begin, end, TILE_KEYS, num_stages=STAGES):
        key_position = k + tl.arange(0, TILE_KEYS)
        is_key = (key_position >= first_key) & (key_position < num_keys)
        if BLOCK_SIZE >= TILE_KEYS:
            block = tl.load(table + k // BLOCK_SIZE).to(tl.int64)
            first = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + k % BLOCK_SIZE) * HEAD_DIM
            places = (tl.arange(0, TILE_KEYS) * HEAD_DIM)[:, None] + dim[None, :]
        else:
            blocks = tl.load(table + key_position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            cache_row = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + key_position % BLOCK_SIZE
            first = 0
            places = (cache_row * HEAD_DIM)[:, None] + dim[None, :]

        if IS_MASKED:
            is_loaded = is_key[:, None] & is_dim[None, :]
            key = tl.load(keys + first + places, mask=is_loaded, other=0.0)
            value = tl.load(values + first + places, mask=is_loaded, other=0.0)
        elif HEAD_DIM < PADDED_DIM:
            key = tl.load(keys + first + places, mask=is_dim[None, :], other=0.0)
            value = tl.load(values + first + places, mask=is_dim[None, :], other=0.0)
        else:
            key = tl.load(keys + first + places)
            value = tl.load(values + first + places)

        score = tl.dot(queries, key.T, input_precision="ieee")
        if IS_MASKED:
            is_seen = (key_position[None, :] <= position[:, None]) & (key_position >= first_key)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (key_position[None, :] > position[:, None] - WINDOW)

            score = tl.where(is_seen, score, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(score, axis=1) * scale)
        reference = new_maximum
        if IS_MASKED and WINDOW > 0:
            # A row that has seen no key yet: nothing may become NaN.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)

        rescale = tl.exp2(maximum - reference)
        probability = tl.exp2(score * scale - reference[:, None])
        weight = weight * rescale + tl.sum(probability, axis=1)
        total = tl.dot(probability.to(value.dtype), value, total * rescale[:, None], input_precision="ieee")
        maximum = new_maximum

    return maximum, weight, total


@triton.jit
def _prefill_attention(
    query, keys, values, block_table, tiles, sinks, output, scale, query_stride, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    FIRST: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, tile): heads run first, so those that share keys run together."""
    wait_for_producers(PDL)
    head = tl.program_id(0)
    tiles += tl.program_id(1) * NUM_FIELDS
    slot = tl.load(tiles)
    if slot < 0:
        return

    first_row = tl.load(tiles + 1).to(tl.int64)
    num_rows = tl.load(tiles + 2)
    start = tl.load(tiles + 3)
    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_place = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    query += first_row * query_stride + head * HEAD_DIM
    queries = tl.load(query + row[:, None] * query_stride + dim[None, :], mask=is_place, other=0.0)

    if sinks is None:
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS,), tl.float32)
    else:
        # As if a key with this score and no value had been seen before all others.
        maximum = tl.zeros((TILE_ROWS,), tl.float32) + tl.load(sinks + head) * LOG2_E
        weight = tl.full((TILE_ROWS,), 1.0, tl.float32)

    total = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
    position = start + row
    num_keys = start + num_rows
    # The first row sees the earliest key, and its last one is the last that all rows see.
    diagonal = (start + 1) // TILE_KEYS * TILE_KEYS
    first_key = FIRST
    begin = 0
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    table = block_table + slot.to(tl.int64) * table_stride
    if WINDOW > 0 or FIRST > 0:
        last_edge = FIRST
        if WINDOW > 0:
            first_key = tl.maximum(start - WINDOW + 1, FIRST)
            last_edge = tl.maximum(num_keys - WINDOW, FIRST)

        edge = first_key // TILE_KEYS * TILE_KEYS
        begin = tl.minimum((last_edge + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS, diagonal)
        maximum, weight, total = _attend_keys(
            maximum, weight, total, queries, keys, values, table, kv_head, position,
            edge, begin, first_key, num_keys, scale,
            NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW, STAGES, True,
        )  # fmt: skip

    maximum, weight, total = _attend_keys(
        maximum, weight, total, queries, keys, values, table, kv_head, position,
        begin, diagonal, first_key, num_keys, scale,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW, STAGES, False,
    )  # fmt: skip
    maximum, weight, total = _attend_keys(
        maximum, weight, total, queries, keys, values, table, kv_head, position,
        diagonal, num_keys, first_key, num_keys, scale,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW, STAGES, True,
    )  # fmt: skip
    start_dependents(PDL)
    # Every row that exists has seen a key; what is divided by here for the others is not stored.
    result = total * (1.0 / tl.where(row < num_rows, weight, 1.0))[:, None]
    output += first_row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    output += row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :]
    tl.store(output, result.to(queries.dtype), mask=is_place)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    output: Tensor,
    config: PrefillAttentionConfig,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    first_key: int = 0,
) -> None:
    """output [N, num_heads * head_dim]: each row's attention to the keys it sees.

    query [N, num_heads, head_dim], whose rows may stand apart; keys, values [num_blocks, num_kv_heads,
    block_size, head_dim]; block_table [S, max_blocks] int32; all but the last in the storage type.
    tiles [num_tiles, 4] int32 as `prefill_tiles` fills it for config.tile_rows: (slot, or -1 for an unused
    tile; first row in query; number of rows; position of the first row). Row j of a tile sees positions
    0 ... position + j, with `window` only the last so many of them. Rows of no tile are left as they are.
    sinks [num_heads] fp32: a score each that takes its share of the softmax and adds nothing.
    first_key: what lies before it no row sees; at most 15, and at most any row's own position.
    Raises ValueError for another shape, type or layout.
    """
    num_rows, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, _ = keys.shape
    dtype = query.dtype
    if num_heads % num_kv_heads or block_size & (block_size - 1):
        raise ValueError(
            f"num_heads={num_heads}, block_size={block_size}: "
            f"expected a multiple of num_kv_heads={num_kv_heads} and a power of two"
        )

    if window < 0:
        raise ValueError(f"window={window}: expected 0 (off) or more")

    if not 0 <= first_key < MIN_DOT_SIZE:
        raise ValueError(f"first_key={first_key}: expected 0 to {MIN_DOT_SIZE - 1}")

    check_rows("query", query, query.shape, dtype)
    if query.stride(1) != head_dim:
        raise ValueError(f"query: strides {query.stride()}: expected a row's heads side by side")

    for name, cache in (("keys", keys), ("values", values)):
        check_tensor(name, cache, (num_blocks, num_kv_heads, block_size, head_dim), dtype)

    check_rows("block_table", block_table, block_table.shape, torch.int32)
    check_tensor("tiles", tiles, (tiles.shape[0], TILE_FIELDS), torch.int32)
    check_tensor("output", output, (num_rows, num_heads * head_dim), dtype)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), torch.float32)

    _prefill_attention[(num_heads, tiles.shape[0])](
        query, keys, values, block_table, tiles, sinks, output,
        head_dim**-0.5 * LOG2_E.value, query.stride(0), block_table.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PADDED_DIM=max(int(triton.next_power_of_2(head_dim)), MIN_DOT_SIZE), BLOCK_SIZE=block_size,
        TILE_ROWS=config.tile_rows, TILE_KEYS=config.tile_keys, WINDOW=window, FIRST=first_key,
        STAGES=config.num_stages, PDL=uses_pdl(),
        num_warps=config.num_warps,
        **launch_options(),
    )  # fmt: skip


def prefill_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    output: Tensor,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    first_key: int = 0,
) -> None:
    """The same in float64, one tile after the other, rounded once."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = keys.shape[1:3]
    for slot, first_row, num_rows, start in tiles.tolist():
        if slot < 0:
            continue

        row_position = torch.arange(start, start + num_rows, device=query.device)[:, None]
        key_position = torch.arange(first_key, start + num_rows, device=query.device)
        is_seen = key_position <= row_position
        if window:
            is_seen &= key_position > row_position - window

        # Keys that no row sees may hold anything.
        key_position = key_position[is_seen.any(dim=0)]
        is_seen = is_seen[:, is_seen.any(dim=0)]
        blocks = block_table[slot].to(torch.int64)[key_position // block_size]
        group = num_heads // num_kv_heads
        key, value = (
            cache[blocks, :, key_position % block_size].double().repeat_interleave(group, dim=1)
            for cache in (keys, values)
        )
        rows = slice(first_row, first_row + num_rows)
        scores = torch.einsum("rhd,khd->hrk", query[rows].double(), key) * head_dim**-0.5
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, num_rows, 1)
            scores = torch.cat((scores, sink), dim=-1)

        shares = scores.softmax(dim=-1)[..., : len(key_position)]
        output[rows] = torch.einsum("hrk,khd->rhd", shares, value).flatten(1).to(output.dtype)
