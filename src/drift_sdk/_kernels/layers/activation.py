"""The function of an MLP's gate, as a part of other kernels.

silu(x) = x * sigmoid(x)
gelu_tanh(x) = x / 2 * (1 + tanh(u)) = x * sigmoid(2 * u),   u = sqrt(2 / pi) * (x + 0.044715 * x^3)
"""

from __future__ import annotations

from typing import Literal

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function

__all__ = ["Activation", "activate"]

Activation = Literal["silu", "gelu_tanh"]

GELU_SCALE = tl.constexpr(1.5957691216057308)
"""2 * sqrt(2 / pi)."""
GELU_CUBIC = tl.constexpr(0.044715)


@device_function
def activate(
    x,  # fp32, any shape
    ACTIVATION: tl.constexpr,
):
    """Return the activation of x in fp32."""
    if ACTIVATION == "gelu_tanh":
        # At 10 and beyond, the sigmoid is 0 or 1; nothing overflows.
        bounded = tl.minimum(tl.maximum(x, -10.0), 10.0)
        twice_u = (bounded + bounded * bounded * bounded * GELU_CUBIC) * GELU_SCALE
        return x / (1.0 + tl.exp(-twice_u))
    else:
        return x / (1.0 + tl.exp(-x))
