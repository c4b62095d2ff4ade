"""A pool of torch's allocator for the memory of captured steps.

`torch.cuda.MemPool` waits for the GPU when it is destroyed, which torch refuses while any thread allocates to
any pool of that GPU; raised in a destructor, the refusal ends the process. One engine may be closed, or
collected as garbage, while another one captures, as may the caller's own graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import _C

__all__ = ["CapturePool"]


class CapturePool:
    """Memory of a GPU that only allocations inside `allocations` are taken from.

    It stays reserved until `release`, or until this object is collected, and is freed by the next
    `torch.cuda.empty_cache` after the tensors in it are.
    """

    def __init__(self, index: int) -> None:
        self._index, self._id = index, torch.cuda.graph_pool_handle()
        self._begin()  # makes the pool and a reference to it
        self._end()
        self._release = weakref.finalize(self, _C._cuda_releasePool, index, self._id)
        self._release.atexit = False  # torch may have ended before

    @contextmanager
    def allocations(self) -> Iterator[None]:
        """Have torch allocate from the pool in a `with` block, on this thread."""
        self._begin()
        try:
            yield
        finally:
            self._end()
            _C._cuda_releasePool(self._index, self._id)

    def release(self) -> None:
        """Let torch free the memory; idempotent. Nothing is allocated after it."""
        self._release()

    def _begin(self) -> None:
        """Take a reference, and begin to allocate from the pool on this thread."""
        _C._cuda_beginAllocateCurrentThreadToPool(self._index, self._id)

    def _end(self) -> None:
        _C._cuda_endAllocateToPool(self._index, self._id)
