"""Rotation of queries and keys in plain torch."""

from __future__ import annotations

import torch

from drift_sdk.spec.rope import Rope

__all__ = ["half_tables", "rotary_tables", "rotate"]


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
