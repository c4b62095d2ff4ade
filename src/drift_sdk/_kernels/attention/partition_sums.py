"""The second kernel of paged attention: the sums of a row's partitions, combined to its output.

With a window, only the partitions that hold keys of the row's window are added. A sink is one more score,
added last (see `add_sink`).

The first kernel, `_attend` of paged_attention.py, writes sums, maxima and weights (see `AttentionScratch`).

Grid: (rows of a sequence times query heads of a group times tiles of dimensions, KV heads, sequences). A
program owns some dimensions of one row of one query head of the output.

Order of summation: that of online_softmax.py, one partition after the other in ascending order. What a
partition's sums are multiplied by depends on maxima alone. These factors are computed for many partitions at
once, one in each thread, so that adding a partition takes one multiplication and one fused addition.

Bytes: the sums of the partitions of a row in, in fp32; a row out.

Dependent launch: the kernel always follows `_attend`, so it permits its dependents to start at once; before
it waits, it reads the rows' slots and positions, the plan and the sinks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import AttentionPlan
from drift_sdk._kernels.attention.layer_attention import LayerAttention, padded_size
from drift_sdk._kernels.attention.online_softmax import add_sink
from drift_sdk._kernels.attention.partitions import partition_of
from drift_sdk._kernels.attention.planned_rows import PlannedRows
from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["AttentionScratch", "add_partitions"]

FEW_PARTITIONS = 8
"""Partitions that `_add_partitions` loads before it adds the first of them, if the row has no more: a load
from L2 takes longer than many additions. No result depends on it."""

LOADED_NUMBERS = 1024
"""Numbers that it loads first if the row has more partitions, 32 for each thread of a warp. Twice as many
gain little at 32K keys, and take several times as long to compile. No result depends on it."""

MIN_PROGRAMS = 1024
"""Programs of `_add_partitions` for which the dimensions of a row are not divided: about eight for each
multiprocessor of an H200."""

MIN_TILE_DIM = 32
"""Least dimensions of a program: one for each thread of a warp."""


class AttentionScratch(Struct, frozen=True):
    """A plan, and memory for the partitions' sums of its sequences, fp32, uninitialised.

    The first place of a sequence is that of its first partition, or with a window, of the first partition
    that its first row sees.
    sums: [plan.num_sequences, num_kv_heads, plan.max_num_partitions, rows * group, head_dim], the values
    weighted by exp2(score - maximum), where rows is the largest number of rows of a sequence. A step of fewer
    rows uses the beginning of the memory, laid out as if it were made for that number.
    maxima: the same without the last dimension, the highest score in a partition (times log2(e)).
    weights: like maxima, the sum of exp2(score - maximum).
    """

    plan: AttentionPlan
    sums: Tensor
    maxima: Tensor
    weights: Tensor

    @classmethod
    def allocate(
        cls, plan: AttentionPlan, *, num_kv_heads: int, num_rows: int, group: int, head_dim: int
    ) -> AttentionScratch:
        """Allocate memory for `num_rows` rows a sequence and `group` query heads a KV head."""
        shape = (plan.num_sequences, num_kv_heads, plan.max_num_partitions, num_rows * group)

        def empty(*last: int) -> Tensor:
            return torch.empty(*shape, *last, dtype=torch.float32, device=plan.tiles.device)

        return cls(plan, empty(head_dim), empty(), empty())

    def check(self, layer: LayerAttention, rows: PlannedRows) -> None:
        """Raise ValueError if plan and memory are not for these rows of the layer."""
        plan, num_rows, rows_each = self.plan, layer.query.shape[0], rows.rows_per_sequence
        if layer.window != plan.window:
            raise ValueError(f"window={layer.window}: expected {plan.window}, that of the plan")

        if num_rows % rows_each or num_rows > plan.num_sequences * rows_each:
            raise ValueError(
                f"query: {num_rows} rows: expected {rows_each} for each of at most {plan.num_sequences} "
                "sequences"
            )

        rows.check(num_rows)
        num_query_rows, room = rows_each * layer.group, self.maxima.shape[-1]
        if room < num_query_rows:
            raise ValueError(f"scratch: room for {room} query rows: expected {num_query_rows} or more")

        shape = (plan.num_sequences, layer.kv.num_heads, plan.max_num_partitions, room)
        check_tensor("scratch.sums", self.sums, (*shape, layer.head_dim), torch.float32)
        check_tensor("scratch.maxima", self.maxima, shape, torch.float32)
        check_tensor("scratch.weights", self.weights, shape, torch.float32)

    def kernel_arguments(self, rows: PlannedRows) -> dict[str, Any]:
        """Return the arguments by name of kernels that sum partitions or add their sums."""
        partitions = self.plan.partitions
        return {
            "row_slot_ptr": rows.slot,
            "row_position_ptr": rows.position,
            "sums_ptr": self.sums,
            "maxima_ptr": self.maxima,
            "weights_ptr": self.weights,
            "num_partitions": self.plan.max_num_partitions,
            "NARROW": partitions.narrow,
            "NARROW_END": partitions.narrow_end,
            "NUM_DOUBLINGS": partitions.num_doublings,
        }


@device_function
def _higher(one, other):
    return tl.maximum(one, other)


@device_function
def _add_several(
    maximum,  # [] fp32: of all partitions before; -inf before the first
    weight,  # [TILE_DIM] fp32, the same for all dimensions
    total,  # [TILE_DIM] fp32
    sums_ptr,  # of the row's partition 0 and the program's dimensions
    maxima_ptr,  # of the row's partition 0
    weights_ptr,  # as maxima
    first,  # the first partition to add
    end,  # the row's last partition, and one
    is_dim,  # [TILE_DIM]
    dim,  # [TILE_DIM]
    STRIDE: tl.constexpr,  # rows from a partition to the next
    HEAD_DIM: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """Return maximum, weight and total with partitions first ... first + NUMBER - 1 added, in this order.

    What `add_partition` of online_softmax.py computes for each of them, bit for bit.
    """
    partition = first + tl.arange(0, NUMBER)
    is_partition = partition < end
    maxima = tl.load(maxima_ptr + partition * STRIDE, mask=is_partition, other=float("-inf"))
    has_before = (partition > first) & (partition <= end)
    before = tl.load(maxima_ptr + (partition - 1) * STRIDE, mask=has_before, other=float("-inf"))
    zeros = tl.zeros_like(dim)
    weight_ptrs = weights_ptr + first * STRIDE + zeros
    sum_ptrs = sums_ptr + first * (STRIDE * HEAD_DIM) + dim
    part_weights, part_totals = (), ()
    for number in tl.static_range(NUMBER):
        is_part = number + zeros < end - first
        part_weight = tl.load(weight_ptrs + number * STRIDE, mask=is_part, other=0.0)
        part_total = tl.load(sum_ptrs + number * (STRIDE * HEAD_DIM), mask=is_part & is_dim, other=0.0)
        part_weights = part_weights + (part_weight,)  # type: ignore[assignment]  # longer tuples
        part_totals = part_totals + (part_total,)  # type: ignore[assignment]  # longer tuples

    # No load is moved behind a barrier, so all of them are under way from here on.
    tl.debug_barrier()
    # The highest score of the partitions up to each of them, and of those before it.
    highest = tl.maximum(tl.associative_scan(maxima, 0, _higher), maximum)
    highest_before = tl.maximum(tl.associative_scan(before, 0, _higher), maximum)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    rescale = tl.exp2(highest_before - reference)
    share = tl.exp2(maxima - reference)
    for number in tl.static_range(NUMBER):
        index = tl.full(dim.shape, number, tl.int32)
        part_rescale, part_share = tl.gather(rescale, index, 0), tl.gather(share, index, 0)
        weight = tl.fma(part_weights[number], part_share, weight * part_rescale)
        total = tl.fma(part_totals[number], part_share, total * part_rescale)
    return tl.max(highest, 0), weight, total


@kernel(
    do_not_specialize=["num_partitions"],
    do_not_specialize_on_alignment=["row_slot_ptr", "row_position_ptr"],
)
def _add_partitions(
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32
    sinks_ptr,  # [num_heads], storage type, or None
    value_scale_ptr,  # [NUM_KV_HEADS] fp32, or None
    out_ptr,  # [R, num_heads, HEAD_DIM], storage type
    num_partitions,  # for which sums have room, of each sequence
    ROWS_PER_SEQUENCE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,  # dimensions of a program
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query row and tile of dimensions, head, sequence): the partitions of one row and one query
    head of the group. Longer than other kernels by its signature."""
    start_dependents(PDL)
    NUM_QUERY_ROWS: tl.constexpr = ROWS_PER_SEQUENCE * GROUP_SIZE
    NUM_TILES: tl.constexpr = PADDED_DIM // TILE_DIM
    query_row, head, sequence = tl.program_id(0) // NUM_TILES, tl.program_id(1), tl.program_id(2)
    row = sequence * ROWS_PER_SEQUENCE + query_row // GROUP_SIZE
    dim = tl.program_id(0) % NUM_TILES * TILE_DIM + tl.arange(0, TILE_DIM)
    is_dim = dim < HEAD_DIM
    slot = tl.load(row_slot_ptr + row, cache_modifier=".cg")
    position = tl.load(row_position_ptr + row, cache_modifier=".cg")
    first = 0
    if WINDOW > 0:
        first = partition_of(tl.maximum(position - (WINDOW - 1), 0), NARROW, NARROW_END, NUM_DOUBLINGS)
        first_position = tl.load(row_position_ptr + sequence * ROWS_PER_SEQUENCE, cache_modifier=".cg")
        first_place = partition_of(
            tl.maximum(first_position - (WINDOW - 1), 0), NARROW, NARROW_END, NUM_DOUBLINGS
        )
    # Padding rows see nothing, and get zeros.
    end = tl.where(slot >= 0, partition_of(position, NARROW, NARROW_END, NUM_DOUBLINGS) + 1, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * GROUP_SIZE + query_row % GROUP_SIZE).to(tl.float32)
    wait_for_producers(PDL)
    first_sum = ((sequence * NUM_KV_HEADS + head) * num_partitions).to(tl.int64) * NUM_QUERY_ROWS + query_row
    if WINDOW > 0:  # as in `_attend`, for all rows of the sequence
        first_sum -= first_place * NUM_QUERY_ROWS
    sums_ptr += first_sum * HEAD_DIM
    maxima_ptr += first_sum
    weights_ptr += first_sum
    maximum = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((TILE_DIM,), tl.float32)
    total = tl.zeros((TILE_DIM,), tl.float32)
    if end - first <= FEW:
        maximum, weight, total = _add_several(
            maximum, weight, total, sums_ptr, maxima_ptr, weights_ptr, first, end, is_dim, dim,
            NUM_QUERY_ROWS, HEAD_DIM, FEW,
        )  # fmt: skip
    else:
        for begin in range(first, end, MANY):
            maximum, weight, total = _add_several(
                maximum, weight, total, sums_ptr, maxima_ptr, weights_ptr, begin, end, is_dim, dim,
                NUM_QUERY_ROWS, HEAD_DIM, MANY,
            )  # fmt: skip

    if sinks_ptr is not None:
        rescale, weight = add_sink(maximum, weight, sink)
        total = total * rescale
    if value_scale_ptr is not None:
        total = total * tl.load(value_scale_ptr + head)
    result = total / tl.where(end > 0, weight, 1.0)
    out_ptrs = out_ptr + ((row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE) * HEAD_DIM + dim
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_dim)


def add_partitions(layer: LayerAttention, rows: PlannedRows, scratch: AttentionScratch) -> None:
    """Combine the partitions' sums in `scratch`, which are those of the same rows, to `layer.out`.

    Rows of slot -1 get zeros.
    """
    num_rows = rows.slot.shape[0]
    num_heads, num_kv_heads, group = layer.num_heads, layer.kv.num_heads, layer.group
    padded_dim = padded_size(layer.head_dim)
    tile_dim = min(padded_dim, MIN_TILE_DIM) if num_rows * num_heads < MIN_PROGRAMS else padded_dim
    num_tiles = padded_dim // tile_dim
    _add_partitions[(rows.rows_per_sequence * group * num_tiles, num_kv_heads, rows.num_sequences)](
        sinks_ptr=layer.sinks,
        value_scale_ptr=layer.kv.value_scale,
        out_ptr=layer.out,
        ROWS_PER_SEQUENCE=rows.rows_per_sequence,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=layer.head_dim,
        PADDED_DIM=padded_dim,
        TILE_DIM=tile_dim,
        FEW=FEW_PARTITIONS,
        MANY=max(2, min(32, LOADED_NUMBERS // tile_dim)),
        WINDOW=layer.window,
        PDL=uses_pdl(),
        num_warps=1,
        **scratch.kernel_arguments(rows),
        **launch_options(),
    )
