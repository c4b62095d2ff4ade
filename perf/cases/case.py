"""Cases of kernels to time: name, bytes and operations of a call, and how its inputs are made."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from torch import Tensor

__all__ = ["Case", "Prepared", "num_copies"]

WORKING_SET_BYTES = 300e6
"""Bytes of different inputs that a step reads: several times the 50 MB of an H200's L2 cache."""

MAX_COPIES = 64
"""Copies of an input at most, however small it is."""


class Prepared(Struct, frozen=True):
    """A case whose inputs are in the device's memory.

    step: makes `num_calls` calls, over more inputs than a cache holds.
    outputs: tensors that every step writes; they are filled with NaN before the first and checked after it.
    """

    step: Callable[[], None]
    num_calls: int
    outputs: tuple[Tensor, ...]


class Case(Struct, frozen=True, kw_only=True):
    """A kernel with a shape of its inputs.

    kernel, shape: names, for the table of results. num_rows: rows of the step.
    num_bytes, num_flops: what one call must move and compute at least.
    prepare: allocates the inputs on the device.
    """

    kernel: str
    shape: str
    num_rows: int
    num_bytes: float
    num_flops: float
    prepare: Callable[[], Prepared]


def num_copies(num_bytes: float) -> int:
    """Return how many copies of an input of `num_bytes` bytes no cache holds: 2 to MAX_COPIES."""
    return max(2, min(MAX_COPIES, int(WORKING_SET_BYTES / num_bytes)))
