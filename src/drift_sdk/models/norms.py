"""Norms in plain torch. RMSNorm: arXiv 1910.07467."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drift_sdk.spec.model import Norm

__all__ = ["normalise", "offset_rms_norm", "rms_norm", "wide_rms_norm"]


def normalise(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x [..., D], normalised with `weight` [D]."""
    functions = {"rounded": rms_norm, "offset": offset_rms_norm, "wide": wide_rms_norm}
    return functions[norm.kind](x, weight, norm.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] divided by its root mean square over the last dimension, times weight [D].

    The division is computed in float32, the product in x's dtype.
    """
    return weight * F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps).to(x.dtype)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] divided by its root mean square over the last dimension, times 1 + weight [D], all in
    float32."""
    normed = F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps)
    return (normed * (1.0 + weight.to(torch.float32))).to(x.dtype)


def wide_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] divided by its root mean square over the last dimension, times weight [D], in float32."""
    normed = F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps)
    return (normed * weight.to(torch.float32)).to(x.dtype)
