"""A kernel to time: what it is called, what it must move and multiply, and how it is set up."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from torch import Tensor

__all__ = ["Case", "Prepared"]


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
