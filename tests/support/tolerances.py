"""How far two correct computations of a tensor may lie apart, on any CPU and with any number of threads.

They round differently because their sums have another order: another BLAS, vector width, blocking or batch.
By the usual model (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3) each operation has a
relative error of at most the unit roundoff u. Independent errors of a sum of n terms grow as sqrt(n) u times
the size of its partial sums (Higham and Mary 2019), which is about the largest value that such sums take. A
stack of layers adds up its layers' errors. So for values of magnitude m

    |found - expected| <= GROWTH * u * sqrt(n) * depth * m

with u of the type that is accumulated in, float32. What is kept in a shorter type in between is rounded once
more, and a sum on the border of two values may go to either of them, which lie eps of that type apart.
GROWTH covers the several roundings of one step, the largest of many errors, and norms, which pass on an error
relative to a smaller value.
"""

from __future__ import annotations

import math

import torch

__all__ = ["assert_near", "bound", "tie_gap"]

GROWTH = 12.0
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


def bound(magnitude: float, *, inner: int, depth: int = 1) -> float:
    """Of values up to `magnitude` that come of sums of `inner` terms, in `depth` layers one on another."""
    return GROWTH * UNIT_ROUNDOFF * math.sqrt(inner) * depth * magnitude


def tie_gap(logits: torch.Tensor, *, inner: int, depth: int) -> float:
    """Logits closer than this are a near tie: each of the two may be off by the bound."""
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
    """Equal up to rounding; what is NaN or infinite must be so in both.

    magnitude:      of the terms, where sums of them may be far smaller; the largest expected value otherwise.
    num_roundings:  to `found`'s own type, where it is shorter than float32.
    """
    assert found.shape == expected.shape, f"{name}: {list(found.shape)} != {list(expected.shape)}"
    found, expected, dtype = found.double(), expected.double().to(found.device), found.dtype
    is_finite = expected.isfinite()
    odd, expected_odd = found[~is_finite], expected[~is_finite]
    is_same = (odd == expected_odd) | (odd.isnan() & expected_odd.isnan())
    assert is_same.all(), f"{name} differ by what is not finite"
    found, expected = found[is_finite], expected[is_finite]
    if not found.numel():
        return

    scale = expected.abs() if magnitude is None else torch.full_like(expected, magnitude)
    allowed = bound(scale.max().item(), inner=inner, depth=depth)
    allowed = allowed + num_roundings * torch.finfo(dtype).eps * scale
    difference = (found - expected).abs()
    most = difference.max().item()
    # NaN and what is allowed no difference at all count as infinitely far.
    share = (difference / allowed).nan_to_num(nan=math.inf).max().item() if most != 0.0 else 0.0
    assert share <= 1.0, f"{name} differ by {most:.2e}, {share:.3g} times what rounding explains"
