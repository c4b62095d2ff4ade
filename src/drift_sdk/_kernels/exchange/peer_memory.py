"""Memory through which the GPUs of a tensor-parallel model exchange sums, and waiting for each other.

Every GPU (rank) has one block of memory that the others can read and write. All blocks have the same layout:
a flag for each rank and each exchange of a step, then the buffers. Sums need no flags, see
exchanges.py. In the other exchanges a rank writes its own buffer. Then it stores the step's epoch into
its flag in the memory of each peer, waits until the peers' flags in its own memory have the epoch, and reads
the peers' buffers.

The epoch is a counter on each GPU, moved on by `begin_exchange`, the first exchange of a step. All ranks run
the same steps, so their epochs are equal. It is compared by its difference, so that it may wrap around.

A rank that has passed an exchange knows that its peers have ended everything before their flag of it:
`begin_exchange` thus frees all buffers.

Every wait is limited by the clock of the GPU. A rank whose peer does not answer in time stores the exchange's
flag number plus 1 in `report`, which the host reads, and sets its limit to 0: after that, and before the host
has set a limit, nothing waits, and results are undefined.

Memory order: a flag is stored and read on one thread. What peers read has been written by an earlier kernel,
which has ended when `wait_for_producers` returns, so that `st.relaxed.sys` is enough. A kernel that writes it
itself calls `publish` before. Flags are read by `ld.acquire.sys`, and a barrier of the CTA follows, which
lets the other threads read what the peer wrote before its flag.

In Triton's interpreter a wait ends at once, as if its time were over, if the flag is not there.
"""

from __future__ import annotations

import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.kernel import (
    device_function,
    is_interpreted,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)

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
