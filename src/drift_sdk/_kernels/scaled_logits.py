"""Logits over the temperature, with the largest at zero: what filters and noise work on."""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.gumbel import LEAST_NOISE, MOST_NOISE

__all__ = ["HOPELESS", "scale"]

# So far below the best logit no noise lifts a token to the top: where in there a filter cuts is of no matter.
HOPELESS = tl.constexpr(LEAST_NOISE - MOST_NOISE - 0.1)


@triton.jit
def scale(logits, row_max, temperature):
    # A bounded factor: at no temperature is it 0 * inf.
    return (logits - row_max) * (1.0 / tl.maximum(temperature, 1e-30))
