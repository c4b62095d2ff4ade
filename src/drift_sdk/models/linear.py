"""Matrix multiplication by a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["linear"]

# A weight below this fits in a core's cache, where oneDNN's 15 us a call cost more than they save.
MIN_ONEDNN_ELEMENTS = 1 << 16

# What torch.compile emits for a float32 linear on the CPU. F.linear goes to BLAS instead, which took twice as
# long for one row and for 512 where both were timed (an AMD CPU with AVX-512).
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, in] times weight [out, in] transposed, plus bias [out]: [N, out]."""
    is_onednn_faster = weight.numel() >= MIN_ONEDNN_ELEMENTS and weight.dtype == torch.float32
    if _onednn_linear is not None and is_onednn_faster and weight.device.type == "cpu":
        product: torch.Tensor = _onednn_linear(x, weight, bias, "none", [], "")
        return product

    return F.linear(x, weight, bias)
