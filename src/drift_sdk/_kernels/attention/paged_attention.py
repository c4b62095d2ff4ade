"""Attention of a few query rows a sequence over a paged cache, for decoding and for verifying drafts.

The keys of a sequence are cut into partitions at fixed positions, each is summed by itself, and the
partitions' sums are added in a fixed order. A program has too few warps for wgmma, so the MMA is the same for
one row and for many; the softmax's denominator is a product with ones, so that its order is the MMA's too.
So a row's bits depend on its query and on the keys it sees: not on the rows beside it, other sequences, or
who computes what.

Bytes: the keys and values that some row sees, once for all rows of a sequence and all heads of a group. It
takes many programs on a multiprocessor to keep enough of them on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import (
    TILE_WORDS,
    AttentionPlan,
    partition_of,
    partition_start,
)
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["AttentionConfig", "AttentionScratch", "paged_attention", "paged_attention_reference"]

LOG2_E = tl.constexpr(1.4426950408889634)
CHUNK = 32
"""Partitions added at a time."""


class AttentionConfig(Struct, frozen=True):
    """How the work is done; within its limits none of it is part of the result's bits.

    num_programs: over all heads. num_warps: 1 or 2. From 4 warps on, Triton computes tiles of 64 rows and
    more by wgmma, which sums in another order than mma.sync: a row's bits would depend on the rows beside it.
    """

    num_programs: int = 528
    num_stages: int = 2
    num_warps: int = 2

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2):
            raise ValueError(f"num_warps={self.num_warps}: expected 1 or 2, or wgmma would change the bits")


class AttentionScratch(Struct, frozen=True):
    """A plan, and room for the partitions' sums of its sequences, fp32, uninitialised.

    sums [plan.num_sequences, num_kv_heads, plan.max_num_partitions, rows * group, head_dim]; maxima, weights
    alike without the last dimension.
    """

    plan: AttentionPlan
    sums: Tensor
    maxima: Tensor
    weights: Tensor

    @classmethod
    def allocate(
        cls, plan: AttentionPlan, *, num_kv_heads: int, num_rows: int, group: int, head_dim: int
    ) -> AttentionScratch:
        shape = (plan.num_sequences, num_kv_heads, plan.max_num_partitions, num_rows * group)

        def empty(*last: int) -> Tensor:
            return torch.empty(*shape, *last, dtype=torch.float32, device=plan.tiles.device)

        return cls(plan, empty(head_dim), empty(), empty())


@triton.jit
def _whole_partition(
    tiles, index, num_tiles, TILE: tl.constexpr, NARROW: tl.constexpr, NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The first tile from `index` on at which a partition starts."""
    is_tile = index < num_tiles
    num_keys = tl.load(tiles + index * TILE_WORDS + 2, mask=is_tile, other=0, cache_modifier=".cg")
    first = tl.load(tiles + index * TILE_WORDS + 3, mask=is_tile, other=0, cache_modifier=".cg")
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
    TILE_DIM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr,
    TILE: tl.constexpr, NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, share): a run of tiles, sequence after sequence."""
    # Plan, rows and block table are older than the two kernels before, which make queries and keys.
    head = tl.program_id(0)
    row = tl.arange(0, TILE_ROWS)
    is_row = row < ROWS * GROUP
    dim = tl.arange(0, TILE_DIM)
    is_dim = dim < DIM
    key = tl.arange(0, TILE)
    total_tiles = tl.load(num_tiles, cache_modifier=".cg")
    share = tl.program_id(1)
    index = _whole_partition(
        tiles, total_tiles * share // tl.num_programs(1), total_tiles, TILE, NARROW, NARROW_END, WIDE
    )
    end = _whole_partition(
        tiles, total_tiles * (share + 1) // tl.num_programs(1), total_tiles, TILE, NARROW, NARROW_END, WIDE
    )
    while index < end:
        sequence = tl.load(tiles + index * TILE_WORDS, cache_modifier=".cg")
        slot = tl.load(tiles + index * TILE_WORDS + 1, cache_modifier=".cg")
        num_keys = tl.load(tiles + index * TILE_WORDS + 2, cache_modifier=".cg")
        run_start = tl.load(tiles + index * TILE_WORDS + 3, cache_modifier=".cg")
        run = tl.minimum(end - index, (num_keys - run_start + TILE - 1) // TILE)
        step_row = sequence * ROWS + row // GROUP
        is_live = tl.load(row_slot + step_row, mask=is_row, other=-1, cache_modifier=".cg") >= 0
        last = tl.load(row_position + step_row, mask=is_live, other=-1, cache_modifier=".cg")
        query_row = (step_row * HEADS + head) * GROUP + row % GROUP
        is_query = is_live[:, None] & is_dim[None, :]
        wait_for_producers(PDL)
        queries = tl.load(query + query_row[:, None] * DIM + dim[None, :], mask=is_query, other=0.0)
        table = block_table + slot.to(tl.int64) * max_blocks
        record = (sequence * HEADS + head) * num_partitions * (ROWS * GROUP) + row
        maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((TILE_ROWS, 16), tl.float32)  # in each of 16 columns, as wide as an MMA is
        total = tl.zeros((TILE_ROWS, TILE_DIM), tl.float32)
        ones = tl.full((TILE, 16), 1.0, keys.dtype.element_ty)
        for tile in tl.range(0, run, num_stages=STAGES):
            first = run_start + tile * TILE
            position = first + key
            is_key = position < num_keys
            if FIRST > 0:
                is_key = is_key & (position >= FIRST)
            is_loaded = is_key[:, None] & is_dim[None, :]
            if BLOCK >= TILE:  # a whole tile lies in one block
                block = tl.load(table + first // BLOCK).to(tl.int64)
                place = ((block * HEADS + head) * BLOCK + first % BLOCK) * DIM + (
                    key[:, None] * DIM + dim[None, :]
                )
            else:
                block = tl.load(table + position // BLOCK, mask=position < num_keys, other=0).to(tl.int64)
                place = ((block * HEADS + head) * BLOCK + position % BLOCK)[:, None] * DIM + dim[None, :]
            keys_tile = tl.load(keys + place, mask=is_loaded, other=0.0)
            values_tile = tl.load(values + place, mask=is_loaded, other=0.0)
            score = tl.dot(queries, keys_tile.T, input_precision="ieee") * (scale * LOG2_E)
            is_seen = position[None, :] <= last[:, None]
            if FIRST > 0:
                is_seen = is_seen & (position >= FIRST)[None, :]
            score = tl.where(is_seen, score, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(score, 1))
            # A row that has seen no key yet: nothing may become NaN.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            rescale = tl.exp2(maximum - reference)
            probability = tl.exp2(score - reference[:, None])
            probability = probability.to(values_tile.dtype)
            weight = tl.dot(probability, ones, weight * rescale[:, None], input_precision="ieee")
            total = tl.dot(probability, values_tile, total * rescale[:, None], input_precision="ieee")
            maximum = new_maximum

            partition = partition_of(first, NARROW, NARROW_END, WIDE)
            next_start = partition_start(partition + 1, NARROW, NARROW_END, WIDE)
            if (first + TILE >= next_start) | (first + TILE >= num_keys):
                out = record + partition * (ROWS * GROUP)
                is_out = is_row[:, None] & is_dim[None, :]
                tl.store(sums + out.to(tl.int64)[:, None] * DIM + dim[None, :], total, mask=is_out)
                tl.store(maxima + out, maximum, mask=is_row)
                tl.store(weights + out, tl.max(weight, 1), mask=is_row)
                maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
                weight = tl.zeros((TILE_ROWS, 16), tl.float32)
                total = tl.zeros((TILE_ROWS, TILE_DIM), tl.float32)

        index += run

    wait_for_producers(PDL)  # without a tile too, see there
    start_dependents(PDL)


@triton.jit(do_not_specialize=["num_partitions"])
def _add_partitions(
    sums, maxima, weights, row_slot, row_position, out, num_partitions,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TILE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, NARROW: tl.constexpr, NARROW_END: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head, sequence). CHUNK partitions at a time: their loads are all under way at once."""
    start_dependents(PDL)
    row, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    step_row = sequence * ROWS + row // GROUP
    dim = tl.arange(0, TILE_DIM)
    is_dim = dim < DIM
    slot = tl.load(row_slot + step_row, cache_modifier=".cg")
    position = tl.load(row_position + step_row, cache_modifier=".cg")
    # Rows of slot -1 see nothing, and get zeros.
    end = tl.where(slot >= 0, partition_of(position, NARROW, NARROW_END, WIDE) + 1, 0)
    wait_for_producers(PDL)
    place = ((sequence * HEADS + head) * num_partitions).to(tl.int64) * (ROWS * GROUP) + row
    maximum = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((), tl.float32)
    total = tl.zeros((TILE_DIM,), tl.float32)
    for first in range(0, end, CHUNK):
        partition = first + tl.arange(0, CHUNK)
        is_there = partition < end
        where = place + partition * (ROWS * GROUP)
        part_maximum = tl.load(maxima + where, mask=is_there, other=float("-inf"))
        part_weight = tl.load(weights + where, mask=is_there, other=0.0)
        is_part = is_there[:, None] & is_dim[None, :]
        part = tl.load(sums + where[:, None] * DIM + dim[None, :], mask=is_part, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        rescale = tl.exp2(maximum - new_maximum)
        share = tl.exp2(part_maximum - new_maximum)
        total = total * rescale + tl.sum(part * share[:, None], 0)
        weight = weight * rescale + tl.sum(part_weight * share, 0)
        maximum = new_maximum

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
    *,
    first_key: int = 0,
) -> None:
    """out [R, num_heads, head_dim]: row r sees positions first_key ... row_position[r] of slot row_slot[r].

    query as out; keys, values [num_blocks, num_kv_heads, block_size, head_dim]; block_table [S, max_blocks],
    row_slot and row_position [R] int32, of which `scratch.plan` was made. A row of slot -1 gets zeros. What
    lies before first_key is not read; it is one of the first tile's keys.
    """
    plan = scratch.plan
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    if query.shape != out.shape or keys.shape != values.shape or keys.shape[3] != head_dim:
        raise ValueError(
            f"query {list(query.shape)}, out {list(out.shape)}, keys {list(keys.shape)}, "
            f"values {list(values.shape)}: expected two and two alike, of one head_dim"
        )

    if not 0 <= first_key < plan.partitions.tile:
        raise ValueError(f"first_key={first_key}: expected 0 to {plan.partitions.tile - 1}")

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
        config.num_stages, first_key, plan.partitions.tile, *partitions, uses_pdl(),
        num_warps=config.num_warps, **launch_options(),
    )  # fmt: skip
    _add_partitions[(rows_per_sequence * group, num_kv_heads, num_sequences)](
        scratch.sums, scratch.maxima, scratch.weights, row_slot, row_position, out,
        plan.max_num_partitions, rows_per_sequence, group, num_kv_heads, head_dim, tile_dim,
        CHUNK, *partitions, uses_pdl(),
        num_warps=1, **launch_options(),
    )  # fmt: skip


def paged_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    *,
    first_key: int = 0,
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
            cache[blocks].transpose(1, 2).flatten(0, 1)[first_key : position + 1].double()
            for cache in (keys, values)
        ]
        key, value = (tensor.repeat_interleave(num_heads // num_kv_heads, dim=1) for tensor in seen)
        scores = torch.einsum("hd,nhd->hn", query[row].double(), key) * head_dim**-0.5
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)

    return out
