"""Matrix multiplication by a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["linear"]

# Elements of the smallest weight that is multiplied by oneDNN. Smaller weights fit in a core's cache, where
# oneDNN's overhead of 15 us a call is more than it saves.
MIN_ONEDNN_ELEMENTS = 1 << 16

# The operator that torch.compile emits for a float32 linear layer on the CPU. F.linear calls BLAS instead,
# which took twice as long for one row and for 512 on the CPU where both were timed (an AMD CPU with AVX-512).
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product [N, out] of x [N, in] with the transposed weight [out, in], plus bias [out].

    Uses oneDNN for large float32 weights on the CPU, else torch's F.linear.
    """
    is_onednn_faster = weight.numel() >= MIN_ONEDNN_ELEMENTS and weight.dtype == torch.float32
    if _onednn_linear is not None and is_onednn_faster and weight.device.type == "cpu":
        product: torch.Tensor = _onednn_linear(x, weight, bias, "none", [], "")
        return product

    return F.linear(x, weight, bias)
