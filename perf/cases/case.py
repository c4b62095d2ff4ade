"""A kernel to time: what it is called, what it must move and multiply, and how it is set up."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from torch import Tensor

__all__ = ["Case", "Prepared", "num_copies"]

WORKING_SET_BYTES = 300e6
MAX_COPIES = 64


class Prepared(Struct, frozen=True):
    """Inputs in place: `step` makes `num_calls` calls, over inputs too many for a cache to hold.

    `outputs` are written by every step; they are poisoned before the first and checked after it.
    """

    step: Callable[[], None]
    num_calls: int
    outputs: tuple[Tensor, ...]


class Case(Struct, frozen=True, kw_only=True):
    """`num_bytes`, `num_flops`: what a call must read and compute. `prepare` takes the device's memory."""

    kernel: str
    shape: str
    num_rows: int
    num_bytes: float
    num_flops: float
    prepare: Callable[[], Prepared]


def num_copies(num_bytes: float) -> int:
    """Of an input of so many bytes: too many for a cache to hold, and two at least."""
    return max(2, min(MAX_COPIES, int(WORKING_SET_BYTES / num_bytes)))
