"""Products, norms and rotations of layers in plain torch. RMSNorm: arXiv 1910.07467."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import Norm
from drift_sdk.spec.rope import Rope

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


def half_tables(rope: Rope, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, rotary_dim / 2] of positions [N], on their device: the table of the kernels."""
    frequencies = rope.frequencies().to(positions.device)
    return _cos_sin(positions.to(torch.float32)[:, None] * frequencies, dtype, rope.magnitude)


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, 1, rotary_dim] for `rotate`, of positions [N] and frequencies [rotary_dim / 2],
    multiplied by `magnitude`.

    The first half of the sines is negated, as `rotate` needs them.
    """
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    cos, sin = _cos_sin(angles, dtype, magnitude)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _cos_sin(angles: torch.Tensor, dtype: torch.dtype, magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [N, num_heads, head_dim] with their first elements rotated by the angles of `rotary_tables`, as
    many as the tables have. Of these, element i forms a pair with element i + rotary_dim / 2."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)

    swapped = x.roll(rotary_dim // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))
