"""The buffers through which the GPUs of a tensor-parallel model exchange sums, and their flags."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.exchange import (
    EMPTY,
    NUM_COLUMNS,
    PeerMemory,
    PeerSums,
    PeerTensor,
    begin_exchange,
    share_drafts,
)
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.device import Device
from drift_sdk.models.shard import Shard

ALIGNMENT = 512
"""Bytes at multiples of which buffers begin, as torch's allocations do."""

OTHERS = ("logits", "beginning", "drafts")
"""Exchanges of a step besides its sums, which have flags."""


class ExchangeSizes(Struct, frozen=True, kw_only=True):
    """Sizes of what is exchanged in a step.

    num_sums:    sums that a step exchanges: two in each layer.
    sum_size:    most numbers of a sum: slices of a GPU times rows times columns.
    logits_size: most numbers of a GPU's part of the logits.
    num_drafts:  most rows of a step with drafts.
    """

    num_sums: int
    sum_size: int
    logits_size: int
    num_drafts: int = 0

    @property
    def part_size(self) -> int:
        """Numbers from the partial sums of one GPU to those of the next one."""
        return -(-4 * self.sum_size // ALIGNMENT) * ALIGNMENT // 4

    def lengths(self, num_ranks: int) -> tuple[int, ...]:
        """Numbers of 4 bytes in the two buffers of sums, that of logits and that of drafts."""
        sums = num_ranks * self.part_size
        return sums, sums, self.logits_size, NUM_COLUMNS * self.num_drafts

    def places(self, num_ranks: int) -> list[int]:
        """The bytes of a block before each buffer, and of the whole block."""
        ends = [4 * num_ranks * len(OTHERS)]
        for size in self.lengths(num_ranks):
            ends.append(-(-ends[-1] // ALIGNMENT) * ALIGNMENT + 4 * size)
        return [-(-end // ALIGNMENT) * ALIGNMENT for end in ends]


class Exchange:
    """The exchange of one GPU with its peers.

    Successive sums of a step use two buffers in turn. Nothing waits for peers until `arm` was called: steps
    can be run on one GPU after the other, with undefined results, to be compiled and captured.

    shard: the part of the model that the GPU has.
    """

    def __init__(
        self, shard: Shard, memory: PeerMemory, sizes: ExchangeSizes, blocks: Sequence[Tensor]
    ) -> None:
        """blocks: [num_bytes] uint8 of each GPU; memory.flags is the beginning of this one's. All are kept,
        because kernels of this GPU write into those of its peers."""
        self.shard = shard
        self._memory, self._num_sums = memory, sizes.num_sums
        self._blocks = tuple(blocks)
        block = blocks[shard.rank]
        *places, _ = sizes.places(shard.size)
        first, second, self._logits, self._drafts = (
            block[place : place + 4 * length].view(torch.float32)
            for place, length in zip(places, sizes.lengths(shard.size), strict=True)
        )
        self._sums = first.view(shard.size, -1), second.view(shard.size, -1)

    def begin(self) -> None:
        """Record the kernel that waits until all GPUs have come to this place of the step: before its first
        sum, and before logits without sums."""
        begin_exchange(self._memory, self._flag("beginning"))

    def sums(self, index: int, shape: tuple[int, int, int]) -> PeerSums:
        """The buffer for the partial sums [num_slices, R, N] of the step's sum number `index`."""
        parts = self._sums[index % 2][:, : math.prod(shape)].view(-1, *shape)
        return PeerSums(memory=self._memory, parts=parts, flag=self._sum(index))

    def logits(self, shape: tuple[int, int]) -> PeerTensor:
        """The buffer for this GPU's part [R, N] of the logits."""
        own = self._logits[: math.prod(shape)].view(shape)
        return PeerTensor(memory=self._memory, own=own, flag=self._flag("logits"))

    def share_drafts(self, columns: Sequence[Tensor]) -> None:
        """Record the kernel that replaces columns [R] int32 of drafted rows by those of the first GPU.

        `begin` has to follow.
        """
        num_rows = columns[0].shape[0]
        own = self._drafts[: NUM_COLUMNS * num_rows].view(torch.int32).view(NUM_COLUMNS, num_rows)
        share_drafts(PeerTensor(memory=self._memory, own=own, flag=self._flag("drafts")), columns)

    def arm(self, timeout_s: float) -> None:
        """Have every wait for a peer take at most `timeout_s` seconds from now on. All GPUs have to be idle,
        and armed before the next step starts on any."""
        memory = self._memory
        for parts in self._sums:
            parts.view(torch.int32).fill_(EMPTY.value)
        memory.flags.zero_()
        memory.epoch.fill_(1)
        memory.report.zero_()
        memory.limit.fill_(max(int(timeout_s * 1e9), 1))  # with 0 nothing waits

    def disarm(self) -> None:
        """Have nothing wait for peers, as before `arm`. All GPUs have to be idle."""
        self._memory.limit.zero_()

    def check(self) -> None:
        """Raise ExecutorError if a wait for a peer has taken too long in a step that has ended."""
        flag = int(self._memory.report[0]) - 1
        if flag < 0:
            return

        place = OTHERS[flag] if flag < len(OTHERS) else f"sum {flag - len(OTHERS)} of {self._num_sums}"
        raise ExecutorError(
            f"GPU {self.shard.rank} of a tensor-parallel model has waited too long for another one "
            f"({place} of a step)"
        )

    def _flag(self, other: str) -> int:
        return OTHERS.index(other)

    def _sum(self, index: int) -> int:
        """The number of a sum among all exchanges of a step."""
        return len(OTHERS) + index


def open_exchanges(devices: Sequence[Device], sizes: ExchangeSizes) -> list[Exchange]:
    """The exchange of each GPU, in order of rank. The memory of all is freed with the last of them."""
    blocks = []
    for device in devices:
        peers = [other.torch_device for other in devices if other is not device]
        blocks.append(device.mapped_memory(sizes.places(len(devices))[-1], peers))
    addresses = tuple(block.data_ptr() for block in blocks)
    exchanges = []
    for rank, (device, block) in enumerate(zip(devices, blocks, strict=True)):
        is_gpu = device.torch_device.type == "cuda"
        with device.work():
            memory = PeerMemory(
                rank=rank,
                num_bytes=block.nbytes,
                bases=addresses,
                flags=block[: 4 * len(devices) * len(OTHERS)].view(torch.int32).view(len(devices), -1),
                epoch=torch.zeros(1, dtype=torch.int32, device=device.torch_device),
                limit=torch.zeros(1, dtype=torch.int64, device=device.torch_device),
                report=torch.zeros(1, dtype=torch.int32, pin_memory=is_gpu),
            )
            exchanges.append(Exchange(Shard(rank=rank, size=len(devices)), memory, sizes, blocks))
    return exchanges
