"""A model of barriers in shared memory, for models of kernels whose threads run in any order."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Barrier", "PipelineError"]


class PipelineError(AssertionError):
    """A step that is read before it has come or after it was replaced, or a pipeline that stands still."""


class Barrier(Struct):
    """An mbarrier: a phase ends when `count` threads have arrived and all copies expected have come."""

    count: int
    num_awaited: int
    num_copies: int = 0
    phase: int = 0

    def arrive(self, num_copies: int = 0) -> None:
        if self.num_awaited == 0:
            raise PipelineError("one arrival too many")
        self.num_awaited -= 1
        self.num_copies += num_copies
        self.settle()

    def settle(self) -> None:
        if self.num_awaited == self.num_copies == 0:
            self.phase += 1
            self.num_awaited = self.count

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of a parity counts as ended: all that an mbarrier tells."""
        return self.phase % 2 != parity
