"""Numbers whose float32 sum tells in which groups, and in which order of groups, they were added.

With B = 2**24, float32 has no B + 1: it is rounded to B. The groups add up to B, 1 - B, B, 1 - B and so on.
Added in ascending order, their sums are B, 1, B, 1, ...: a 1 is lost with every other group. Added in
descending order, or as a binary tree, four groups lose none. A number at each side of every border is lost or
kept with its group, so a border that moves changes the sum as well. Inside a group, no order of its numbers
changes its sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BIG", "expected_sum", "probe_row"]

BIG = float(2**24)


def expected_sum(num_groups: int) -> float:
    """The sum of all groups in ascending order."""
    return BIG if num_groups % 2 else 1.0


def probe_row(size: int, borders: Sequence[int]) -> torch.Tensor:
    """Numbers [size] in groups that begin at 0 and at `borders`; all but a few are 0.

    A group has 32 numbers or more. Even ones are B and then, last, a 1 that is lost; odd ones begin with 1
    and end with -B.
    """
    row = torch.zeros(size)
    for index, (begin, end) in enumerate(zip((0, *borders), (*borders, size), strict=True)):
        if index % 2 == 0:
            row[begin], row[end - 1] = BIG, 1.0
        else:
            row[begin], row[end - 1] = 1.0, -BIG
    return row
