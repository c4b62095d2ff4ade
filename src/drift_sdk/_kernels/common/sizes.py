"""Sizes of grids and tiles, computed on the host before each launch.

Triton's functions of these names are made for kernels too: each call from the host takes many times as long,
and a start makes tens of thousands of them.
"""

from __future__ import annotations

__all__ = ["cdiv", "next_power_of_2"]


def cdiv(size: int, part: int) -> int:
    """The number of parts that a size is cut into: the quotient, rounded up."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is `size` or more, 1 or more; 0 for 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
