"""Matrix multiplication by a weight, and rows of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drift_sdk.quantised.weight import Matrix

__all__ = ["embed", "linear"]

# Elements of the smallest weight that is multiplied by oneDNN. Smaller weights fit in a core's cache, where
# oneDNN's overhead for each call is more than it saves.
MIN_ONEDNN_ELEMENTS = 1 << 16

# The operator that torch.compile emits for a float32 linear layer on the CPU. F.linear calls BLAS instead,
# which is slower for one row and for 512 on the CPU where both were timed (an AMD CPU with AVX-512).
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product [N, out] of x [N, in] with the transposed weight [out, in], plus bias [out].

    Uses oneDNN for large float32 weights on the CPU, else torch's F.linear. A quantised weight is dequantised
    to x's dtype for this product alone.
    """
    if not isinstance(weight, torch.Tensor):
        weight = weight.dequantise(x.dtype)

    is_onednn_faster = weight.numel() >= MIN_ONEDNN_ELEMENTS and weight.dtype == torch.float32
    if _onednn_linear is not None and is_onednn_faster and weight.device.type == "cpu":
        product: torch.Tensor = _onednn_linear(x, weight, bias, "none", [], "")
        return product

    return F.linear(x, weight, bias)


def embed(token_ids: torch.Tensor, weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The rows [N, in] of a weight [out, in] for token ids [N] int64. Of a quantised weight, these rows alone
    are dequantised, to `dtype`."""
    if isinstance(weight, torch.Tensor):
        return F.embedding(token_ids, weight)

    return weight.rows(token_ids).dequantise(dtype)
