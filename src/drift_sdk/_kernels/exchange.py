"""Exchanges between the GPUs of a tensor-parallel model inside a step: sums with their norm, logits, drafts.

Every GPU (rank) has one block of memory that the others can read and write. All blocks have the same
layout: a flag for each rank and each exchange of a step, then the buffers. Sums need no flags, see
`add_norm_across`. In the other exchanges a rank writes its own buffer. Then it stores the step's epoch into
its flag in the memory of each peer, waits until the peers' flags in its own memory have the epoch, and
reads the peers' buffers.

The epoch is a counter on each GPU, moved on by `begin_exchange`, the first exchange of a step. All ranks
run the same steps, so their epochs are equal. It is compared by its difference, so that it may wrap around.

A rank that has passed an exchange knows that its peers have ended everything before their flag of it:
`begin_exchange` thus frees all buffers.

Every wait is limited by the clock of the GPU. A rank whose peer does not answer in time stores the
exchange's flag number plus 1 in `report`, which the host reads, and sets its limit to 0: after that, and
before the host has set a limit, nothing waits, and results are undefined.

Memory order: a flag is stored and read on one thread. What peers read has been written by an earlier
kernel, which has ended when `wait_for_producers` returns, so that `st.relaxed.sys` is enough. A kernel that
writes it itself calls `publish` before. Flags are read by `ld.acquire.sys`, and a barrier of the CTA
follows, which lets the other threads read what the peer wrote before its flag.

In Triton's interpreter a wait ends at once, as if its time were over, if the flag is not there.

Sums (`add_norm_across`), `add_norm` for a delta whose partial sums lie on several GPUs: each adds all of
them, in the same order.

    total[r] = sum over ranks, in ascending order, of their slices, in ascending order, + bias

and then as in norm.py. Every rank computes all rows, so the residual stream is the same on all. Grid:
(rows). A program owns one row, in registers. It stores this rank's partial sums into the memory of all
peers, waits until theirs are in its own, and clears their places: a place without a number has the bits
EMPTY. The inner dimension of the weight is cut at borders of slices, rank 0 having the first ones. So the
slices are added in the order in which one GPU adds them, and the bits are those of `add_norm` over all
slices. Places are used for every other sum of a step. When a peer's number of the next sum is there, the
peer has ended this one, and cleared what it got: so its places can be filled again in the sum after that.
That holds from the last sums of a step to the first of the next one too. Programs start in ascending order
of rows on all ranks, which thus wait for rows that have started or will. Bytes: as `add_norm`, and
NUM_SLICES rows of fp32 to each peer and from each for each row. Dependent launch: as `add_norm`; the limit
is read before the wait, since a kernel has set it before the step.

Logits (`gather_logits`) of a vocabulary that is divided between GPUs, gathered on each of them:

    logits[r, p * N + n] = part_p[r, n]    for the part [R, N] of each rank p

Grid: (rows, ranks times blocks of a part). A program copies a block of columns. The first one tells the
peers that this rank's part is there; each waits for the flag of the rank whose columns it copies. Bytes: 8
for each element, those of the peers over the link between the GPUs. Dependent launch: the kernel follows
the product that made the part, so it permits its dependents first.

Drafts (`share_drafts`) of the first GPU, taken over by all others, so that all verify the same rows:

    columns[c][r] = columns[c][r] of rank 0

Drafts are made on every GPU. Kernels give the same bits on all of them; this makes tokens independent of
whether a library does too. A rank that has no answer, because nothing waits or the time is over, keeps its
own columns: the memory of rank 0 has rows of another step then, and slots or tokens that do not exist would
be read as indices. Grid: (1,). Bytes: 4 for each row and column, twice. Dependent launch: the kernel waits
first, and lets its dependents start when it has written everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from drift_sdk._kernels.launch.arguments import cdiv, check_rows, check_tensor, check_tensors, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    is_interpreted,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.layers.norm import NormKind, add_total, norm_warps, normalise

EMPTY = tl.constexpr(-1)
"""The bits of a place for a number that has not come: a NaN that no operation of a GPU gives."""


class PeerMemory(Struct, frozen=True, kw_only=True):
    """The exchange memory as one rank sees it.

    rank:    this GPU's number.
    num_bytes: of a block.
    bases:   the address of each rank's block.
    flags:   [num_ranks, num_flags] int32, the beginning of this rank's block: peers store theirs here.
    epoch:   [1] int32.
    limit:   [1] int64, nanoseconds that a wait may take; 0: nothing waits.
    report:  [1] int32 in pinned memory: 0, or the number plus 1 of an exchange that a peer has missed.
    """

    rank: int
    num_bytes: int
    bases: tuple[int, ...]
    flags: Tensor
    epoch: Tensor
    limit: Tensor
    report: Tensor

    @property
    def num_ranks(self) -> int:
        return self.flags.shape[0]

    def offset(self, tensor: Tensor) -> int:
        """The bytes from the beginning of this rank's block to a tensor in it, as in the blocks of peers."""
        return tensor.data_ptr() - self.flags.data_ptr()


class PeerSums(Struct, frozen=True, kw_only=True):
    """The partial sums of all ranks in a rank's block, at the same place of each block.

    parts: [num_ranks, num_slices, R, N] float32, those of a rank side by side. Where no peer has stored a
    number, there is EMPTY. flag: the number of the sum in a step.
    """

    memory: PeerMemory
    parts: Tensor
    flag: int

    @property
    def own(self) -> Tensor:
        """This rank's, [num_slices, R, N]."""
        return self.parts[self.memory.rank]

    def check(self, name: str) -> None:
        """Raise ValueError for parts of other ranks than there are, or that do not lie in the block."""
        if self.parts.shape[0] != self.memory.num_ranks:
            raise ValueError(f"{name}: {self.parts.shape[0]} parts: expected {self.memory.num_ranks}")

        _check_place(name, self.memory, self.parts)


class PeerTensor(Struct, frozen=True, kw_only=True):
    """A tensor of each rank at the same place of its block, and the flag of its exchange.

    own: this rank's. flag: below num_flags; of one use in a step.
    """

    memory: PeerMemory
    own: Tensor
    flag: int


@device_function
def peer_pointer(
    base,  # the address of a rank's block
    offset,  # bytes, a multiple of 16
    DTYPE: tl.constexpr,
):
    """Return the address of a rank's buffer as a pointer."""
    return tl.multiple_of((tl.cast(base, tl.int64) + offset).to(tl.pointer_type(DTYPE)), 16)


@device_function
def publish(
    epoch,  # any number
    IS_COMPILED: tl.constexpr,
):
    """Have peers that see a flag raised after this also see what the CTA has stored before it."""
    tl.debug_barrier()
    if IS_COMPILED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1
        )


@device_function
def raise_flags(
    bases,  # the address of each rank's block
    epoch,
    flag,
    rank,
    num_flags,
    NUM_RANKS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Store the epoch into this rank's flag in the memory of all peers, on one thread."""
    for peer in tl.static_range(NUM_RANKS):
        if peer != rank:
            flag_ptr = peer_pointer(bases[peer], 0, tl.int32) + rank * num_flags + flag
            if IS_COMPILED:
                tl.inline_asm_elementwise(
                    """{
                    .reg .pred is_first;
                    .reg .u32 thread;
                    mov.u32 thread, %tid.x;
                    setp.eq.u32 is_first, thread, 0;
                    @is_first st.relaxed.sys.global.u32 [$1], $2;
                    mov.u32 $0, 0;
                    }""",
                    "=r,l,r",
                    [flag_ptr.to(tl.int64), epoch],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
            else:
                tl.store(flag_ptr, epoch)


@device_function
def await_flag(
    flags_ptr,  # [num_ranks, num_flags] int32: this rank's
    limit_ptr,  # [1] int64, written when the time is over
    report_ptr,  # [1] int32, pinned, written when the time is over
    epoch,
    flag,
    peer,
    num_flags,
    limit,
    IS_COMPILED: tl.constexpr,
):
    """Wait on one thread until a peer's flag in this rank's memory has the epoch, or until the time is over.

    A barrier of the CTA has to follow. Longer than other functions by its assembly.
    """
    flag_ptr = flags_ptr + peer * num_flags + flag
    if IS_COMPILED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_other, is_there, is_early;
            .reg .u32 thread, seen;
            .reg .s32 difference;
            .reg .u64 start, now, zero;
            mov.u32 $0, 0;
            mov.u32 thread, %tid.x;
            setp.ne.u32 is_other, thread, 0;
            @is_other bra PASSED;
            setp.eq.s64 is_other, $3, 0;
            @is_other bra PASSED;
            mov.u64 start, %globaltimer;
            AGAIN:
            ld.acquire.sys.global.u32 seen, [$1];
            sub.s32 difference, seen, $2;
            setp.ge.s32 is_there, difference, 0;
            @is_there bra PASSED;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.lt.u64 is_early, now, $3;
            @is_early bra AGAIN;
            mov.u64 zero, 0;
            st.relaxed.gpu.global.u64 [$4], zero;
            st.relaxed.sys.global.u32 [$5], $6;
            PASSED:
            }""",
            "=r,l,r,l,l,l,r",
            [
                flag_ptr.to(tl.int64),
                epoch,
                limit,
                limit_ptr.to(tl.int64),
                report_ptr.to(tl.int64),
                flag + 1,
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        if limit != 0:
            if tl.load(flag_ptr) - epoch < 0:
                tl.store(limit_ptr, 0)
                tl.store(report_ptr, flag + 1)


@kernel(do_not_specialize=["flag", "rank", "num_flags"])
def _begin_exchange(
    bases,  # NUM_RANKS addresses
    flags_ptr,  # [NUM_RANKS, num_flags] int32
    epoch_ptr,  # [1] int32, moved on by 1
    limit_ptr,  # [1] int64
    report_ptr,  # [1] int32, pinned
    flag,
    rank,
    num_flags,
    NUM_RANKS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,)."""
    wait_for_producers(PDL)
    epoch = tl.load(epoch_ptr) + 1
    limit = tl.load(limit_ptr)
    raise_flags(bases, epoch, flag, rank, num_flags, NUM_RANKS, IS_COMPILED)
    for peer in tl.static_range(NUM_RANKS):
        if peer != rank:
            await_flag(flags_ptr, limit_ptr, report_ptr, epoch, flag, peer, num_flags, limit, IS_COMPILED)
    tl.debug_barrier()
    tl.store(epoch_ptr, epoch)
    start_dependents(PDL)


def begin_exchange(memory: PeerMemory, flag: int) -> None:
    """Move the epoch on and wait until the peers have come as far: all buffers may then be written again.

    flag: of this exchange alone. The first kernel of a part of a step in which ranks exchange anything.
    """
    _begin_exchange[(1,)](
        bases=memory.bases,
        flags_ptr=memory.flags,
        epoch_ptr=memory.epoch,
        limit_ptr=memory.limit,
        report_ptr=memory.report,
        flag=flag,
        rank=memory.rank,
        num_flags=memory.flags.shape[1],
        NUM_RANKS=memory.num_ranks,
        IS_COMPILED=is_compiled(),
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def is_compiled() -> bool:
    """True if kernels wait for flags, which they do not in the interpreter."""
    return not is_interpreted()


def check_peer_tensor(name: str, tensor: PeerTensor) -> None:
    """Raise ValueError for a flag or a place that the block does not have."""
    num_flags = tensor.memory.flags.shape[1]
    if not 0 <= tensor.flag < num_flags:
        raise ValueError(f"{name}: flag {tensor.flag}: expected 0 to {num_flags - 1}")

    _check_place(name, tensor.memory, tensor.own)


def _check_place(name: str, memory: PeerMemory, tensor: Tensor) -> None:
    offset = memory.offset(tensor)
    size = (
        sum((number - 1) * stride for number, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    )
    end = offset + size * tensor.element_size()
    if not memory.flags.nbytes <= offset <= end <= memory.num_bytes or offset % 16:
        raise ValueError(f"{name}: {offset} bytes from the block's beginning: expected a buffer of the block")


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


NAN_BITS = tl.constexpr(0x7FFFFFFF)
"""The bits of a NaN that is sent in place of a number with the bits EMPTY, which mark a missing number."""

LATE = tl.constexpr(1 << 20)
"""Added to the number of missing partial sums, which is less, when the time is over."""


@device_function
def _await_part(
    part_ptrs,  # [PADDED_SIZE] int32
    column,  # [PADDED_SIZE]
    column_mask,
    limit_ptr,  # [1] int64, written when the time is over
    report_ptr,  # [1] int32, pinned, written when the time is over
    flag,
    limit,
    PADDED_SIZE: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    """Return a row of partial sums from a peer, fp32, once it is there; zeros for what is missing when the
    time is over."""
    values = tl.zeros((PADDED_SIZE,), tl.int32)
    num_missing = tl.full((), 1, tl.int32)
    start = tl.full((), 0, tl.int64)
    if IS_COMPILED:
        start = globaltimer()
    while (num_missing > 0) & (num_missing < LATE):
        values = tl.load(part_ptrs, mask=column_mask, other=0, volatile=True)
        is_late = column == 0
        if IS_COMPILED:
            # Each thread reads the clock for itself. What one of them finds goes into the sum, which all get.
            is_late &= globaltimer() - start >= limit
        num_missing = tl.sum((values == EMPTY).to(tl.int32) + is_late.to(tl.int32) * LATE, axis=0)
    if (num_missing > LATE) & (limit != 0):
        tl.store(limit_ptr, 0)
        tl.store(report_ptr, flag + 1)
    return tl.where(values == EMPTY, 0, values).to(tl.float32, bitcast=True)


@kernel(do_not_specialize=["flag", "rank"])
def _add_norm_across(
    hidden_ptr,  # [R, SIZE], storage type; updated in place
    parts_ptr,  # [NUM_RANKS, NUM_SLICES, R, SIZE] int32, the bits of fp32: this rank's, and places for peers'
    bases,  # NUM_RANKS addresses of blocks
    limit_ptr,  # [1] int64
    report_ptr,  # [1] int32, pinned
    bias_ptr,  # [SIZE], storage type, or None
    delta_norm_ptr,  # [SIZE], storage type, or None
    weight_ptr,  # [SIZE], storage type
    normed_ptr,  # [R, SIZE], storage type
    aux_hidden_ptr,  # [R, SIZE], storage type: a copy of the updated hidden; or None
    eps,
    delta_eps,  # or None: eps
    hidden_stride,
    parts_offset,  # bytes from a block's beginning to parts
    parts_rank_stride,
    parts_slice_stride,
    normed_stride,
    aux_hidden_stride,
    flag,
    rank,
    SIZE: tl.constexpr,  # hidden size
    PADDED_SIZE: tl.constexpr,  # SIZE, rounded up to a power of two
    NUM_RANKS: tl.constexpr,
    NUM_SLICES: tl.constexpr,  # of each rank
    DELTA_MULTIPLIER: tl.constexpr,
    NORMED_MULTIPLIER: tl.constexpr,
    NORM_KIND: tl.constexpr,  # see norm.py
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
    limit = tl.load(limit_ptr, cache_modifier=".cg")
    wait_for_producers(PDL)
    own_place = rank * parts_rank_stride + row * SIZE
    for slice_index in tl.static_range(NUM_SLICES):
        place = own_place + slice_index * parts_slice_stride
        own = tl.load(parts_ptr + place + column, mask=column_mask, other=0)
        own = tl.where(own == EMPTY, NAN_BITS, own)
        for peer in tl.static_range(NUM_RANKS):
            if peer != rank:
                peer_ptr = peer_pointer(bases[peer], parts_offset, tl.int32)
                tl.store(peer_ptr + place + column, own, mask=column_mask)
    for peer in tl.static_range(NUM_RANKS):
        for slice_index in tl.static_range(NUM_SLICES):
            part_ptrs = parts_ptr + peer * parts_rank_stride + slice_index * parts_slice_stride
            part_ptrs += row * SIZE + column
            if peer == rank:
                part = tl.load(part_ptrs, mask=column_mask, other=0).to(tl.float32, bitcast=True)
            else:
                part = _await_part(
                    part_ptrs,
                    column,
                    column_mask,
                    limit_ptr,
                    report_ptr,
                    flag,
                    limit,
                    PADDED_SIZE,
                    IS_COMPILED,
                )
                tl.store(part_ptrs, EMPTY, mask=column_mask)
            if peer + slice_index == 0:
                total = part
            else:
                total += part

    x = add_total(
        x, total, bias_ptr, bias, delta_norm_ptr, delta_weight, eps if delta_eps is None else delta_eps,
        SIZE, DELTA_MULTIPLIER, NORM_KIND,
    )  # fmt: skip
    tl.store(hidden_ptrs, x, mask=column_mask)
    if aux_hidden_ptr is not None:
        tl.store(aux_hidden_ptr + row * aux_hidden_stride + column, x, mask=column_mask)

    normed = normalise(x, weight, eps, SIZE, NORMED_MULTIPLIER, NORM_KIND)
    tl.store(normed_ptr + row * normed_stride + column, normed, mask=column_mask)


def add_norm_across(
    hidden: Tensor,
    delta: PeerSums,
    weight: Tensor,
    normed: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    aux_hidden: Tensor | None = None,
    delta_norm: Tensor | None = None,
    delta_eps: float | None = None,
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
    dtype, memory, num_slices = hidden.dtype, delta.memory, delta.own.shape[0]
    check_rows("hidden", hidden, (num_rows, size), dtype)
    check_tensor("weight", weight, (size,), dtype)
    check_rows("normed", normed, (num_rows, size), dtype)
    check_tensor("delta", delta.own, (num_slices, num_rows, size), torch.float32)
    delta.check("delta")
    check_tensors((size,), dtype, bias=bias, delta_norm=delta_norm)
    if aux_hidden is not None:
        check_rows("aux_hidden", aux_hidden, (num_rows, size), dtype)

    _add_norm_across[(num_rows,)](
        hidden_ptr=hidden,
        parts_ptr=delta.parts.view(torch.int32),
        bases=memory.bases,
        limit_ptr=memory.limit,
        report_ptr=memory.report,
        bias_ptr=bias,
        delta_norm_ptr=delta_norm,
        weight_ptr=weight,
        normed_ptr=normed,
        aux_hidden_ptr=aux_hidden,
        eps=eps,
        delta_eps=delta_eps,
        hidden_stride=hidden.stride(0),
        parts_offset=memory.offset(delta.parts),
        parts_rank_stride=delta.parts.stride(0),
        parts_slice_stride=num_rows * size,
        normed_stride=normed.stride(0),
        aux_hidden_stride=0 if aux_hidden is None else aux_hidden.stride(0),
        flag=delta.flag,
        rank=memory.rank,
        SIZE=size,
        PADDED_SIZE=next_power_of_2(size),
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
