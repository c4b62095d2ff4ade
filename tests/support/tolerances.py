"""Bounds on the difference between two correct computations of a tensor, for any CPU and number of threads.

The computations round differently because they sum in different orders: another BLAS, vector width, blocking
or batch. In the usual model (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3) each
operation has a relative error of at most the unit roundoff u. Independent errors of a sum of n terms grow as
sqrt(n) u times the size of its partial sums (Higham and Mary 2019), which is about the largest value of such
sums. The errors of consecutive layers add up. So for values of magnitude m

    |found - expected| <= GROWTH * u * sqrt(n) * depth * m

with u of the accumulator's type, float32. Intermediate values in a shorter type are rounded once more: a sum
between two such values may be rounded to either of them, and they differ by eps of that type. GROWTH covers
several roundings per step, the largest of many errors, and norms, after which an error is relative to a
smaller value.
"""

from __future__ import annotations

import math

import torch

__all__ = ["assert_near", "bound", "tie_gap"]

GROWTH = 12.0
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def bound(magnitude: float, *, inner: int, depth: int = 1) -> float:
    """The bound for values computed by sums in consecutive layers.

    magnitude:  largest absolute value.
    inner:      number of terms of a sum.
    depth:      number of layers.
    """
    return GROWTH * UNIT_ROUNDOFF * math.sqrt(inner) * depth * magnitude


def tie_gap(logits: torch.Tensor, *, inner: int, depth: int) -> float:
    """The difference below which two logits are a near tie: each of them may be off by the bound."""
    return 2 * bound(logits.abs().max().item(), inner=inner, depth=depth)


def assert_near(
    found: torch.Tensor,
    expected: torch.Tensor,
    *,
    inner: int,
    depth: int = 1,
    magnitude: float | None = None,
    num_roundings: int = 0,
    name: str = "values",
) -> None:
    """Assert that tensors are equal up to rounding. NaN and infinite values must be the same in both.

    inner, depth:   as for `bound`.
    magnitude:      of the terms of the sums, if the sums may be far smaller; None for the largest expected
                    value.
    num_roundings:  number of roundings to the type of `found`, if it is shorter than float32.
    """
    assert found.shape == expected.shape, f"{name}: {list(found.shape)} != {list(expected.shape)}"
    found, expected, dtype = found.double(), expected.double().to(found.device), found.dtype
    is_finite = expected.isfinite()
    odd, expected_odd = found[~is_finite], expected[~is_finite]
    is_same = (odd == expected_odd) | (odd.isnan() & expected_odd.isnan())
    assert is_same.all(), f"{name} differ in values that are not finite"
    found, expected = found[is_finite], expected[is_finite]
    if not found.numel():
        return

    scale = expected.abs() if magnitude is None else torch.full_like(expected, magnitude)
    allowed = bound(scale.max().item(), inner=inner, depth=depth)
    allowed = allowed + num_roundings * torch.finfo(dtype).eps * scale
    difference = (found - expected).abs()
    most = difference.max().item()
    # NaN counts as an infinite difference, and so does any difference if none is allowed.
    share = (difference / allowed).nan_to_num(nan=math.inf).max().item() if most != 0.0 else 0.0
    assert share <= 1.0, f"{name} differ by {most:.2e}, {share:.3g} times the bound for rounding"
