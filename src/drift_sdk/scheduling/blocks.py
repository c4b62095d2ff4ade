from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """The blocks nobody holds. Blocks are numbered from 0; the one freed last is allocated first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        return bool(self._is_free[block_id])

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        split = len(self._free) - count
        block_ids = self._free[split:]
        del self._free[split:]
        for block_id in block_ids:
            self._is_free[block_id] = 0

        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert not self._is_free[block_id], f"block {block_id} is free already"
            self._is_free[block_id] = 1
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if the list and the flags disagree."""
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert sum(self._is_free) == len(self._free), "free flags and free list differ in number"
        assert all(self._is_free[block_id] for block_id in self._free), "a listed block is not flagged free"
