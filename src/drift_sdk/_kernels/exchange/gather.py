"""What each GPU gets from the others besides sums: logits, and drafts.

Logits of a vocabulary that is divided between GPUs, gathered on each of them.

    logits[r, p * N + n] = part_p[r, n]    for the part [R, N] of each rank p

Grid: (rows, ranks times blocks of a part). A program copies a block of columns. The first one tells the peers
that this rank's part is there; each waits for the flag of the rank whose columns it copies.

Bytes: 8 for each element, those of the peers over the link between the GPUs.

Dependent launch: the kernel follows the product that made the part, so it permits its dependents first.

The drafts of the first GPU, taken over by all others, so that all verify the same rows.

    columns[c][r] = columns[c][r] of rank 0

Drafts are made on every GPU. Kernels give the same bits on all of them; this makes tokens independent of
whether a library does too.

A rank that has no answer, because nothing waits or the time is over, keeps its own columns: the memory of
rank 0 has rows of another step then, and slots or tokens that do not exist would be read as indices.

Grid (1,). Bytes: 4 for each row and column, twice.

Dependent launch: the kernel waits first. It lets its dependents start when it has written everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.exchange.peer_memory import (
    PeerTensor,
    await_flag,
    check_peer_tensor,
    is_compiled,
    peer_pointer,
    publish,
    raise_flags,
)
from drift_sdk._kernels.launch.arguments import cdiv, check_tensor
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

BLOCK_COLUMNS = 2048
"""Columns that a program copies: 16 fp32 a thread of 4 warps, four loads of 16 bytes."""


@kernel(do_not_specialize=["flag", "rank", "num_flags"])
def _gather_logits(
    logits_ptr,  # [R, NUM_RANKS * NUM_COLUMNS] fp32, written
    bases,  # NUM_RANKS addresses of blocks
    flags_ptr,  # [NUM_RANKS, num_flags] int32: this rank's
    epoch_ptr,  # [1] int32
    limit_ptr,  # [1] int64
    report_ptr,  # [1] int32, pinned
    part_offset,  # bytes from a block's beginning to [R, NUM_COLUMNS] fp32
    flag,
    rank,
    num_flags,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block): a block of the columns of one rank."""
    start_dependents(PDL)
    # Set when the step began.
    epoch = tl.load(epoch_ptr, cache_modifier=".cg")
    limit = tl.load(limit_ptr, cache_modifier=".cg")
    wait_for_producers(PDL)
    row = tl.program_id(0).to(tl.int64)
    NUM_BLOCKS: tl.constexpr = (NUM_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    peer = tl.program_id(1) // NUM_BLOCKS
    column = tl.program_id(1) % NUM_BLOCKS * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    if row + tl.program_id(1) == 0:
        raise_flags(bases, epoch, flag, rank, num_flags, NUM_RANKS, IS_COMPILED)
    if peer != rank:
        await_flag(flags_ptr, limit_ptr, report_ptr, epoch, flag, peer, num_flags, limit, IS_COMPILED)
    tl.debug_barrier()
    base = tl.cast(bases[0], tl.int64)
    for other in tl.static_range(1, NUM_RANKS):
        base = tl.where(peer == other, bases[other], base)
    part_ptrs = peer_pointer(base, part_offset, tl.float32) + (row * NUM_COLUMNS + column)
    column_mask = column < NUM_COLUMNS
    values = tl.load(part_ptrs, mask=column_mask, other=0.0)
    logits_ptrs = logits_ptr + row * (NUM_RANKS * NUM_COLUMNS) + peer * NUM_COLUMNS + column
    tl.store(logits_ptrs, values, mask=column_mask)


def gather_logits(part: PeerTensor, logits: Tensor) -> None:
    """Fill logits [R, num_ranks * N] float32 with the parts [R, N] float32 of all ranks, in their order.

    A product has made this rank's part right before. Raises ValueError for another shape, type or layout, and
    for a part that is not in the exchange memory.
    """
    memory = part.memory
    num_rows, num_columns = part.own.shape
    check_tensor("part", part.own, (num_rows, num_columns), torch.float32)
    check_peer_tensor("part", part)
    check_tensor("logits", logits, (num_rows, memory.num_ranks * num_columns), torch.float32)
    _gather_logits[(num_rows, memory.num_ranks * cdiv(num_columns, BLOCK_COLUMNS))](
        logits_ptr=logits,
        bases=memory.bases,
        flags_ptr=memory.flags,
        epoch_ptr=memory.epoch,
        limit_ptr=memory.limit,
        report_ptr=memory.report,
        part_offset=memory.offset(part.own),
        flag=part.flag,
        rank=memory.rank,
        num_flags=memory.flags.shape[1],
        NUM_COLUMNS=num_columns,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        NUM_RANKS=memory.num_ranks,
        IS_COMPILED=is_compiled(),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )


NUM_COLUMNS = 3
BLOCK_ROWS = 1024
"""Rows that are copied at a time: 8 a thread of 4 warps."""


@kernel(do_not_specialize=["flag", "rank", "num_flags", "num_rows"])
def _share_drafts(
    first_ptr,  # [R] int32, written
    second_ptr,  # [R] int32, written
    third_ptr,  # [R] int32, written
    bases,  # NUM_RANKS addresses of blocks
    flags_ptr,  # [NUM_RANKS, num_flags] int32: this rank's
    epoch_ptr,  # [1] int32
    limit_ptr,  # [1] int64
    report_ptr,  # [1] int32, pinned
    rows_offset,  # bytes from a block's beginning to [3, R] int32
    num_rows,
    flag,
    rank,
    num_flags,
    BLOCK_ROWS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    wait_for_producers(PDL)
    epoch = tl.load(epoch_ptr)
    limit = tl.load(limit_ptr)
    rows_ptr = peer_pointer(bases[0], rows_offset, tl.int32)
    if rank == 0:
        for first_row in range(0, num_rows, BLOCK_ROWS):
            row = first_row + tl.arange(0, BLOCK_ROWS)
            is_row = row < num_rows
            tl.store(rows_ptr + row, tl.load(first_ptr + row, mask=is_row), mask=is_row)
            tl.store(rows_ptr + num_rows + row, tl.load(second_ptr + row, mask=is_row), mask=is_row)
            tl.store(rows_ptr + 2 * num_rows + row, tl.load(third_ptr + row, mask=is_row), mask=is_row)
        publish(epoch, IS_COMPILED)
        raise_flags(bases, epoch, flag, rank, num_flags, NUM_RANKS, IS_COMPILED)
    else:
        await_flag(flags_ptr, limit_ptr, report_ptr, epoch, flag, 0, num_flags, limit, IS_COMPILED)
        tl.debug_barrier()
        if tl.load(limit_ptr, volatile=True) == 0:
            num_answered = 0
        else:
            num_answered = num_rows
        for first_row in range(0, num_answered, BLOCK_ROWS):
            row = first_row + tl.arange(0, BLOCK_ROWS)
            is_row = row < num_rows
            tl.store(first_ptr + row, tl.load(rows_ptr + row, mask=is_row), mask=is_row)
            tl.store(second_ptr + row, tl.load(rows_ptr + num_rows + row, mask=is_row), mask=is_row)
            tl.store(third_ptr + row, tl.load(rows_ptr + 2 * num_rows + row, mask=is_row), mask=is_row)
    start_dependents(PDL)


def share_drafts(rows: PeerTensor, columns: Sequence[Tensor]) -> None:
    """Replace three columns [R] int32 of rows by those of rank 0.

    rows: [3, R] int32 in the exchange memory. An exchange that frees all buffers has to follow before the
    next use of the same memory. Raises ValueError for another shape, type or layout, and for rows that are
    not in the exchange memory.
    """
    memory, num_rows = rows.memory, columns[0].shape[0]
    check_tensor("rows", rows.own, (NUM_COLUMNS, num_rows), torch.int32)
    check_peer_tensor("rows", rows)
    first, second, third = columns
    for index, column in enumerate(columns):
        check_tensor(f"columns[{index}]", column, (num_rows,), torch.int32)
    _share_drafts[(1,)](
        first_ptr=first,
        second_ptr=second,
        third_ptr=third,
        bases=memory.bases,
        flags_ptr=memory.flags,
        epoch_ptr=memory.epoch,
        limit_ptr=memory.limit,
        report_ptr=memory.report,
        rows_offset=memory.offset(rows.own),
        num_rows=num_rows,
        flag=rows.flag,
        rank=memory.rank,
        num_flags=memory.flags.shape[1],
        BLOCK_ROWS=BLOCK_ROWS,
        NUM_RANKS=memory.num_ranks,
        IS_COMPILED=is_compiled(),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
