"""The second kernel of paged attention: the sums of a row's partitions, combined to its output.

    m = max over partitions p of maxima[p],  share[p] = exp2(maxima[p] - m)
    out = (sum over p of share[p] * sums[p]) / (sum over p of share[p] * weights[p])

With a window, p runs over the partitions that hold keys of the row's window. A sink is one more partition,
the last: the head's sink is its maximum, 1 its weight and 0 its sum.

The first kernel, `_attend` of paged_attention.py, writes sums, maxima and weights (see `AttentionScratch`).
The reference, `paged_attention_reference`, is that of both kernels.

Grid: (rows of a sequence times query heads of a group, KV heads, sequences). A program owns one row of one
query head of the output.

Order of summation: chunks of CHUNK_PARTITIONS partitions in ascending order; inside a chunk, the order of a
sum over one warp.

Bytes: the sums of all partitions of a row in, in fp32; a row out. Dependent launch: the kernel always follows
`_attend`, so it permits its dependents to start at once; before it waits, it reads the rows' slots and
positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import AttentionPlan, partition_of
from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["LOG2_E", "MIN_DOT_SIZE", "AttentionScratch", "add_partitions"]

LOG2_E = tl.constexpr(1.4426950408889634)
"""log2(e): exp(x) = exp2(x * LOG2_E), and GPUs have an instruction for exp2."""

MIN_DOT_SIZE = 16
"""The least rows and columns of a tile in a product: those of an MMA. Dimensions are padded to it."""

CHUNK_PARTITIONS = 32
"""Partitions that `_add_partitions` combines at a time: all their loads are under way at once. With head_dim
128 they take 32 * 128 fp32 = 128 registers of each of a warp's 32 threads, of the 255 that a thread may have.
Part of the result's bits, since sums are rescaled after each chunk."""

ADD_WARPS = 1
"""Warps of a program of `_add_partitions`. Part of the result's bits: the order of its sums depends on it."""


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


@triton.jit(do_not_specialize=["num_partitions"])
def _add_partitions(
    sums_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows, HEAD_DIM] fp32
    maxima_ptr,  # [num_sequences, NUM_KV_HEADS, num_partitions, query rows] fp32
    weights_ptr,  # as maxima
    row_slot_ptr,  # [R] int32; -1: padding row
    row_position_ptr,  # [R] int32
    sinks_ptr,  # [num_heads], storage type, or None
    out_ptr,  # [R, num_heads, HEAD_DIM], storage type
    num_partitions,  # for which sums have room, of each sequence
    ROWS_PER_SEQUENCE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK_PARTITIONS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: off
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query row, head, sequence): the partitions of one row and one query head of the group. Longer
    than other kernels by its signature."""
    start_dependents(PDL)
    query_row, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = sequence * ROWS_PER_SEQUENCE + query_row // GROUP_SIZE
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    slot = tl.load(row_slot_ptr + row, cache_modifier=".cg")
    position = tl.load(row_position_ptr + row, cache_modifier=".cg")
    # Padding rows see nothing, and get zeros.
    end = tl.where(slot >= 0, partition_of(position, NARROW, NARROW_END, WIDE) + 1, 0)
    begin = 0
    if WINDOW > 0:
        begin = partition_of(tl.maximum(position - (WINDOW - 1), 0), NARROW, NARROW_END, WIDE)
        first_position = tl.load(row_position_ptr + sequence * ROWS_PER_SEQUENCE, cache_modifier=".cg")
        first_place = partition_of(tl.maximum(first_position - (WINDOW - 1), 0), NARROW, NARROW_END, WIDE)
    wait_for_producers(PDL)
    first_sum = ((sequence * NUM_KV_HEADS + head) * num_partitions).to(tl.int64) * (
        ROWS_PER_SEQUENCE * GROUP_SIZE
    ) + query_row
    if WINDOW > 0:
        first_sum -= first_place * (ROWS_PER_SEQUENCE * GROUP_SIZE)
    maximum = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((), tl.float32)
    total = tl.zeros((PADDED_DIM,), tl.float32)
    for first in range(begin, end, CHUNK_PARTITIONS):
        partition = first + tl.arange(0, CHUNK_PARTITIONS)
        is_partition = partition < end
        sum_index = first_sum + partition * (ROWS_PER_SEQUENCE * GROUP_SIZE)
        part_maximum = tl.load(maxima_ptr + sum_index, mask=is_partition, other=float("-inf"))
        part_weight = tl.load(weights_ptr + sum_index, mask=is_partition, other=0.0)
        part_mask = is_partition[:, None] & is_dim[None, :]
        part = tl.load(sums_ptr + sum_index[:, None] * HEAD_DIM + dim[None, :], mask=part_mask, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        rescale = tl.exp2(maximum - new_maximum)
        share = tl.exp2(part_maximum - new_maximum)
        total = total * rescale + tl.sum(part * share[:, None], 0)
        weight = weight * rescale + tl.sum(part_weight * share, 0)
        maximum = new_maximum

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * GROUP_SIZE + query_row % GROUP_SIZE).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, sink)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale
        weight = weight * rescale + tl.exp2(sink - new_maximum)
    result = total / tl.where(end > 0, weight, 1.0)
    out_ptrs = out_ptr + ((row * NUM_KV_HEADS + head) * GROUP_SIZE + query_row % GROUP_SIZE) * HEAD_DIM + dim
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_dim)


def add_partitions(
    scratch: AttentionScratch,
    row_slot: Tensor,
    row_position: Tensor,
    out: Tensor,
    rows_per_sequence: int,
    num_kv_heads: int,
    *,
    sinks: Tensor | None = None,
) -> None:
    """Combine the partitions' sums in `scratch` to out [R, num_heads, head_dim], in the storage type.

    row_slot, row_position: [R] int32, `rows_per_sequence` consecutive rows a sequence; rows of slot -1 get
    zeros. sinks: [num_heads], see `paged_attention`. The sums must be those of the same rows and heads.
    Raises ValueError for another shape, type or layout.
    """
    plan = scratch.plan
    num_rows, num_heads, head_dim = out.shape
    group = num_heads // num_kv_heads
    check_tensor("out", out, out.shape, out.dtype)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensors((num_heads,), out.dtype, sinks=sinks)
    _add_partitions[(rows_per_sequence * group, num_kv_heads, num_rows // rows_per_sequence)](
        sums_ptr=scratch.sums,
        maxima_ptr=scratch.maxima,
        weights_ptr=scratch.weights,
        row_slot_ptr=row_slot,
        row_position_ptr=row_position,
        sinks_ptr=sinks,
        out_ptr=out,
        num_partitions=plan.max_num_partitions,
        ROWS_PER_SEQUENCE=rows_per_sequence,
        GROUP_SIZE=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim)),
        CHUNK_PARTITIONS=CHUNK_PARTITIONS,
        WINDOW=plan.window,
        NARROW=plan.partitions.narrow,
        NARROW_END=plan.partitions.narrow_end,
        WIDE=plan.partitions.wide,
        PDL=uses_pdl(),
        num_warps=ADD_WARPS,
        **launch_options(),
    )
