"""`add_norm` for a delta whose partial sums lie on several GPUs: each adds all of them, in the same order.

    total[r] = sum over ranks, in ascending order, of their slices, in ascending order, + bias

and then as in residual_norm.py. Every rank computes all rows, so the residual stream is the same on all.

Grid: (rows). A program owns one row, in registers. The program of row 0 tells the peers that this rank's
partial sums are there; every program waits for the flags of all peers.

Order of summation: the inner dimension of the weight is cut at borders of slices, rank 0 having the first
ones. So the slices are added in the order in which one GPU adds them, and the bits are those of `add_norm`
over all slices.

Bytes: as `add_norm`, and NUM_SLICES rows of fp32 from each peer for each row.

Dependent launch: as `add_norm`. The epoch is read before the wait, and flags are raised and awaited after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows, check_tensor, check_tensors
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.exchange.peer_memory import (
    PeerTensor,
    await_flag,
    check_peer_tensor,
    is_compiled,
    peer_pointer,
    raise_flags,
)
from drift_sdk._kernels.layers.residual_norm import add_norm_reference, add_total, normalise
from drift_sdk._kernels.layers.rms_norm import NormKind, norm_warps

__all__ = ["add_norm_across", "add_norm_across_reference"]


@triton.jit(do_not_specialize=["flag", "rank", "num_flags"])
def _add_norm_across(
    hidden_ptr,  # [R, SIZE], storage type; updated in place
    bases,  # NUM_RANKS addresses of blocks
    flags_ptr,  # [NUM_RANKS, num_flags] int32: this rank's
    epoch_ptr,  # [1] int32
    limit_ptr,  # [1] int64
    report_ptr,  # [1] int32, pinned
    bias_ptr,  # [SIZE], storage type, or None
    delta_norm_ptr,  # [SIZE], storage type, or None
    weight_ptr,  # [SIZE], storage type
    normed_ptr,  # [R, SIZE], storage type
    aux_hidden_ptr,  # [R, SIZE], storage type: a copy of the updated hidden; or None
    eps,
    hidden_stride,
    delta_offset,  # bytes from a block's beginning to [NUM_SLICES, R, SIZE] fp32
    delta_slice_stride,
    normed_stride,
    aux_hidden_stride,
    flag,
    rank,
    num_flags,
    SIZE: tl.constexpr,  # hidden size
    PADDED_SIZE: tl.constexpr,  # SIZE, rounded up to a power of two
    NUM_RANKS: tl.constexpr,
    NUM_SLICES: tl.constexpr,  # of each rank
    DELTA_MULTIPLIER: tl.constexpr,
    NORMED_MULTIPLIER: tl.constexpr,
    NORM_KIND: tl.constexpr,  # see rms_norm.py
    IS_COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): one row. Longer than other kernels by its signature."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    column_mask = column < SIZE
    hidden_ptrs = hidden_ptr + (row * hidden_stride + column)
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    delta_weight, bias = weight, weight
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
    if delta_norm_ptr is not None:
        delta_weight = tl.load(delta_norm_ptr + column, mask=column_mask, other=0.0)
    start_dependents(PDL)
    x = tl.load(hidden_ptrs, mask=column_mask, other=0.0, cache_modifier=".cg")
    # Set when the step began.
    epoch = tl.load(epoch_ptr, cache_modifier=".cg")
    limit = tl.load(limit_ptr, cache_modifier=".cg")
    wait_for_producers(PDL)
    if row == 0:
        raise_flags(bases, epoch, flag, rank, num_flags, NUM_RANKS, IS_COMPILED)
    for peer in tl.static_range(NUM_RANKS):
        if peer != rank:
            await_flag(flags_ptr, limit_ptr, report_ptr, epoch, flag, peer, num_flags, limit, IS_COMPILED)
    tl.debug_barrier()
    row_offset = row * SIZE + column
    delta_ptrs = peer_pointer(bases[0], delta_offset, tl.float32) + row_offset
    total = tl.load(delta_ptrs, mask=column_mask, other=0.0)
    for peer in tl.static_range(NUM_RANKS):
        delta_ptrs = peer_pointer(bases[peer], delta_offset, tl.float32) + row_offset
        for slice_index in tl.static_range(NUM_SLICES):
            if peer + slice_index > 0:
                slice_ptrs = delta_ptrs + slice_index * delta_slice_stride
                total += tl.load(slice_ptrs, mask=column_mask, other=0.0)

    x = add_total(
        x, total, bias_ptr, bias, delta_norm_ptr, delta_weight, eps,
        SIZE, DELTA_MULTIPLIER, NORM_KIND,
    )  # fmt: skip
    tl.store(hidden_ptrs, x, mask=column_mask)
    if aux_hidden_ptr is not None:
        tl.store(aux_hidden_ptr + row * aux_hidden_stride + column, x, mask=column_mask)

    normed = normalise(x, weight, eps, SIZE, NORMED_MULTIPLIER, NORM_KIND)
    tl.store(normed_ptr + row * normed_stride + column, normed, mask=column_mask)


def add_norm_across(
    hidden: Tensor,
    delta: PeerTensor,
    weight: Tensor,
    normed: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    aux_hidden: Tensor | None = None,
    delta_norm: Tensor | None = None,
    delta_multiplier: float = 1.0,
    normed_multiplier: float = 1.0,
    norm_kind: NormKind = "rounded",
) -> None:
    """`add_norm` with a delta of partial sums [num_slices, R, H] float32 on each rank.

    A product has made this rank's right before. All ranks launch it, with equal arguments otherwise.
    Raises ValueError for another shape, type or layout, and for a delta that is not in the exchange memory.
    Longer than other wrappers by its arguments.
    """
    num_rows, size = hidden.shape
    dtype, memory = hidden.dtype, delta.memory
    num_slices = delta.own.shape[0]
    check_rows("hidden", hidden, (num_rows, size), dtype)
    check_tensor("weight", weight, (size,), dtype)
    check_rows("normed", normed, (num_rows, size), dtype)
    check_tensor("delta", delta.own, (num_slices, num_rows, size), torch.float32)
    check_peer_tensor("delta", delta)
    check_tensors((size,), dtype, bias=bias, delta_norm=delta_norm)
    if aux_hidden is not None:
        check_rows("aux_hidden", aux_hidden, (num_rows, size), dtype)

    _add_norm_across[(num_rows,)](
        hidden_ptr=hidden,
        bases=memory.bases,
        flags_ptr=memory.flags,
        epoch_ptr=memory.epoch,
        limit_ptr=memory.limit,
        report_ptr=memory.report,
        bias_ptr=bias,
        delta_norm_ptr=delta_norm,
        weight_ptr=weight,
        normed_ptr=normed,
        aux_hidden_ptr=aux_hidden,
        eps=eps,
        hidden_stride=hidden.stride(0),
        delta_offset=memory.offset(delta.own),
        delta_slice_stride=num_rows * size,
        normed_stride=normed.stride(0),
        aux_hidden_stride=0 if aux_hidden is None else aux_hidden.stride(0),
        flag=delta.flag,
        rank=memory.rank,
        num_flags=memory.flags.shape[1],
        SIZE=size,
        PADDED_SIZE=triton.next_power_of_2(size),
        NUM_RANKS=memory.num_ranks,
        NUM_SLICES=num_slices,
        DELTA_MULTIPLIER=delta_multiplier,
        NORMED_MULTIPLIER=normed_multiplier,
        NORM_KIND=norm_kind,
        IS_COMPILED=is_compiled(),
        PDL=uses_pdl(),
        num_warps=norm_warps(size),
        **launch_options(),
    )


def add_norm_across_reference(
    hidden: Tensor,
    deltas: list[Tensor],
    weight: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    delta_norm: Tensor | None = None,
    delta_multiplier: float = 1.0,
    norm_kind: NormKind = "rounded",
) -> tuple[Tensor, Tensor]:
    """Return (hidden, normed) as `add_norm_across` writes them on every rank, in new tensors.

    deltas: the partial sums [num_slices, R, H] of all ranks.
    """
    return add_norm_reference(
        hidden,
        torch.cat(deltas),
        weight,
        eps=eps,
        bias=bias,
        delta_norm=delta_norm,
        delta_multiplier=delta_multiplier,
        norm_kind=norm_kind,
    )
