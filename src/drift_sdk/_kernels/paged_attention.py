"""Attention of a few query rows a sequence over a paged cache, for decoding and for verifying drafts.

The keys of a sequence are cut into partitions at fixed positions, each is summed by itself, and the
partitions' sums are added in ascending order. Keys stand on the M side of the MMA. So a row's bits depend on
its query and on the keys it sees: not on the rows beside it, other sequences, or who computes what.

Bytes: the keys and values that some row sees, once for all rows of a sequence and all heads of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention_plan import (
    TILE_WORDS,
    AttentionPlan,
    partition_of,
    partition_start,
)
from drift_sdk._kernels.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["AttentionConfig", "AttentionScratch", "paged_attention", "paged_attention_reference"]

LOG2_E = tl.constexpr(1.4426950408889634)
NUM_UNROLLED = tl.constexpr(8)


class AttentionConfig(Struct, frozen=True):
    """How the work is done; none of it is part of the result's bits. num_programs: over all heads."""

    num_programs: int = 264
    num_stages: int = 3
    num_warps: int = 4


class AttentionScratch:
    """Partitions' sums of a step: [num_sequences, num_kv_heads, num_partitions, rows * group, ...] fp32."""

    def __init__(
        self, plan: AttentionPlan, *, num_kv_heads: int, num_rows: int, group: int, head_dim: int
    ) -> None:
        self.plan = plan
        shape = (plan.num_sequences, num_kv_heads, plan.max_num_partitions, num_rows * group)
        device = plan.tiles.device
        self.sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(shape, dtype=torch.float32, device=device)
        self.weights = torch.empty(shape, dtype=torch.float32, device=device)


@triton.jit
def _whole_partition(
    tiles, index, num_tiles, TILE: tl.constexpr, NARROW: tl.constexpr, NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The first tile from `index` on at which a partition starts."""
    is_tile = index < num_tiles
    num_keys = tl.load(tiles + index * TILE_WORDS + 2, mask=is_tile, other=0)
    first = tl.load(tiles + index * TILE_WORDS + 3, mask=is_tile, other=0)
    partition = partition_of(first, NARROW, NARROW_END, WIDE)
    is_start = partition_start(partition, NARROW, NARROW_END, WIDE) == first
    next_start = partition_start(partition + 1, NARROW, NARROW_END, WIDE)
    num_skipped = (tl.minimum(next_start, num_keys) - first + TILE - 1) // TILE
    return tl.where(is_start, index, index + num_skipped)


@triton.jit(do_not_specialize=["num_partitions", "max_blocks"])
def _attend(
    query, keys, values, block_table, row_slot, row_position, tiles, num_tiles, sums, maxima, weights,
    scale, num_partitions, max_blocks,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TILE: tl.constexpr, NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    head = tl.program_id(0)
    row = tl.arange(0, TILE_ROWS)
    is_row = row < ROWS * GROUP
    dim = tl.arange(0, TILE_DIM)
    is_dim = dim < DIM
    total_tiles = tl.load(num_tiles)
    share = tl.program_id(1)
    begin = _whole_partition(
        tiles, total_tiles * share // tl.num_programs(1), total_tiles, TILE, NARROW, NARROW_END, WIDE
    )
    end = _whole_partition(
        tiles, total_tiles * (share + 1) // tl.num_programs(1), total_tiles, TILE, NARROW, NARROW_END, WIDE
    )
    maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_ROWS,), tl.float32)
    total = tl.zeros((TILE_DIM, TILE_ROWS), tl.float32)
    for index in tl.range(begin, end, num_stages=STAGES):
        sequence = tl.load(tiles + index * TILE_WORDS)
        slot = tl.load(tiles + index * TILE_WORDS + 1)
        num_keys = tl.load(tiles + index * TILE_WORDS + 2)
        first = tl.load(tiles + index * TILE_WORDS + 3)
        step_row = sequence * ROWS + row // GROUP
        slots = tl.load(row_slot + step_row, mask=is_row, other=-1)
        last = tl.load(row_position + step_row, mask=is_row, other=-1)
        last = tl.where(slots >= 0, last, -1)
        query_row = (step_row * HEADS + head) * GROUP + row % GROUP
        is_query = (slots >= 0)[:, None] & is_dim[None, :]
        queries = tl.load(query + query_row[:, None] * DIM + dim[None, :], mask=is_query, other=0.0)
        position = first + tl.arange(0, TILE)
        is_key = position < num_keys
        table = block_table + slot.to(tl.int64) * max_blocks
        block = tl.load(table + position // BLOCK, mask=is_key, other=0).to(tl.int64)
        place = ((block * HEADS + head) * BLOCK + position % BLOCK)[:, None] * DIM + dim[None, :]
        is_loaded = is_key[:, None] & is_dim[None, :]
        key = tl.load(keys + place, mask=is_loaded, other=0.0)
        value = tl.load(values + place, mask=is_loaded, other=0.0)
        score = tl.dot(key, queries.T, input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(position[:, None] <= last[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        # A row that has seen no key yet: nothing may become NaN.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        rescale = tl.exp2(maximum - reference)
        probability = tl.exp2(score - reference[None, :])
        weight = weight * rescale + tl.sum(probability, 0)
        total = tl.dot(value.T, probability.to(value.dtype), total * rescale[None, :], input_precision="ieee")
        maximum = new_maximum

        partition = partition_of(first, NARROW, NARROW_END, WIDE)
        next_start = partition_start(partition + 1, NARROW, NARROW_END, WIDE)
        is_last = (first + TILE >= next_start) | (first + TILE >= num_keys)
        out = ((sequence * HEADS + head) * num_partitions + partition) * (ROWS * GROUP) + row
        is_stored = row < tl.where(is_last, ROWS * GROUP, 0)
        place_sums = sums + out.to(tl.int64)[None, :] * DIM + dim[:, None]
        tl.store(place_sums, total, mask=is_stored[None, :] & is_dim[:, None])
        tl.store(maxima + out, maximum, mask=is_stored)
        tl.store(weights + out, weight, mask=is_stored)
        maximum = tl.where(is_last, float("-inf"), maximum)
        weight = tl.where(is_last, 0.0, weight)
        total = tl.where(is_last, 0.0, total)

    start_dependents(PDL)


@triton.jit(do_not_specialize=["num_partitions"])
def _add_partitions(
    sums, maxima, weights, row_slot, row_position, out, num_partitions,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TILE_DIM: tl.constexpr,
    NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    step_row = sequence * ROWS + row // GROUP
    dim = tl.arange(0, TILE_DIM)
    is_dim = dim < DIM
    slot = tl.load(row_slot + step_row)
    position = tl.load(row_position + step_row)
    maximum = float("-inf")
    weight = 0.0
    total = tl.zeros((TILE_DIM,), tl.float32)
    place = ((sequence * HEADS + head) * num_partitions).to(tl.int64) * (ROWS * GROUP) + row
    end = tl.where(slot >= 0, position + 1, 0)
    partition = tl.zeros((), tl.int32)
    while partition_start(partition, NARROW, NARROW_END, WIDE) < end:
        # Unrolled, so that many loads are under way at once.
        for step in tl.static_range(NUM_UNROLLED):
            index = partition + step
            start = partition_start(index, NARROW, NARROW_END, WIDE)
            is_there = start < end
            where = place + index * (ROWS * GROUP)
            part_maximum = tl.load(maxima + where, mask=is_there, other=float("-inf"))
            part_weight = tl.load(weights + where, mask=is_there, other=0.0)
            part = tl.load(sums + where * DIM + dim, mask=dim < tl.where(is_there, DIM, 0), other=0.0)
            new_maximum = tl.maximum(maximum, part_maximum)
            rescale = tl.exp2(maximum - new_maximum)
            share = tl.exp2(part_maximum - new_maximum)
            total = tl.fma(part, tl.zeros_like(part) + share, total * rescale)
            weight = weight * rescale + part_weight * share
            maximum = new_maximum
        partition += NUM_UNROLLED

    result = total / tl.where(end > 0, weight, 1.0)
    place_out = out + ((step_row * HEADS + head) * GROUP + row % GROUP) * DIM + dim
    tl.store(place_out, result.to(out.dtype.element_ty), mask=is_dim)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    config: AttentionConfig,
    rows_per_sequence: int,
) -> None:
    """out [R, num_heads, head_dim]: row r sees positions 0 ... row_position[r] of slot row_slot[r].

    query as out; keys, values [num_blocks, num_kv_heads, block_size, head_dim]; block_table [S, max_blocks],
    row_slot and row_position [R] int32, of which `scratch.plan` was made. A row of slot -1 gets zeros.
    """
    plan = scratch.plan
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    if query.shape != out.shape or keys.shape != values.shape or keys.shape[3] != head_dim:
        raise ValueError(
            f"query {list(query.shape)}, out {list(out.shape)}, keys {list(keys.shape)}, "
            f"values {list(values.shape)}: expected two and two alike, of one head_dim"
        )

    group = num_heads // num_kv_heads
    num_sequences = num_rows // rows_per_sequence
    tile_rows = max(16, 1 << (rows_per_sequence * group - 1).bit_length())  # an MMA has 16 at least
    tile_dim = max(16, triton.next_power_of_2(head_dim))
    partitions = (plan.partitions.narrow, plan.partitions.narrow_end, plan.partitions.wide)
    num_shares = max(1, config.num_programs // num_kv_heads)
    _attend[(num_kv_heads, num_shares)](
        query, keys, values, block_table, row_slot, row_position, plan.tiles, plan.num_tiles,
        scratch.sums, scratch.maxima, scratch.weights,
        head_dim**-0.5, plan.max_num_partitions, block_table.shape[1],
        rows_per_sequence, group, num_kv_heads, head_dim, tile_rows, tile_dim, block_size,
        config.num_stages, plan.partitions.tile, *partitions, uses_pdl(),
        num_warps=config.num_warps, **launch_options(),
    )  # fmt: skip
    _add_partitions[(rows_per_sequence * group, num_kv_heads, num_sequences)](
        scratch.sums, scratch.maxima, scratch.weights, row_slot, row_position, out,
        plan.max_num_partitions, rows_per_sequence, group, num_kv_heads, head_dim, tile_dim,
        *partitions, uses_pdl(),
        num_warps=4, **launch_options(),
    )  # fmt: skip


def paged_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, row_slot: Tensor, row_position: Tensor
) -> Tensor:
    """The same in float64, one row after the other."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=torch.float64, device=query.device)
    for row, (slot, position) in enumerate(zip(row_slot.tolist(), row_position.tolist(), strict=True)):
        if slot < 0:
            continue

        blocks = block_table[slot, : position // block_size + 1].long()
        seen = [
            cache[blocks].transpose(1, 2).flatten(0, 1)[: position + 1].double() for cache in (keys, values)
        ]
        key, value = (tensor.repeat_interleave(num_heads // num_kv_heads, dim=1) for tensor in seen)
        scores = torch.einsum("hd,nhd->hn", query[row].double(), key) * head_dim**-0.5
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)

    return out
