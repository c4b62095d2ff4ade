"""References of the kernels around the gated delta rule: gates, convolution, norm, borders.

Each computes in float32, and in float64 where its tensors are, without a step that rounds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drift_sdk._kernels.layers.norm import NormKind
from drift_sdk._kernels.recurrent.gated_delta import PromptRuns
from drift_sdk.spec.model import BORDER, GatedDelta

__all__ = [
    "fill_gates_reference",
    "keep_inputs_reference",
    "mix_rows_reference",
    "move_borders_of_prompts_reference",
    "move_borders_of_rows_reference",
    "norm_gated_reference",
    "scales_reference",
]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _total(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Partial sums [num_slices, R, W], added in ascending order, or a sum [R, W], in the storage type."""
    if sums.dim() == 2:
        return sums.to(dtype)

    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total.to(dtype)


def fill_gates_reference(product: Tensor, decay: Tensor, step: Tensor) -> Tensor:
    """Return gates [R, 2 * heads]."""
    b, a = _wide(_total(product, step.dtype)).chunk(2, dim=1)
    rates = _wide(b.sigmoid().to(step.dtype))
    softplus = F.softplus(a + _wide(step), threshold=80)
    return torch.cat((-decay.exp() * softplus / torch.tensor(2.0, dtype=decay.dtype).log(), rates), dim=1)


def mix_rows_reference(
    spec: GatedDelta,
    product: Tensor,
    weight: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    ring: Tensor,
    *,
    is_kept: bool,
) -> Tensor:
    """Return mixed [R, num_channels], row by row. With `is_kept`, the rows are added to the ring, which the
    rows before the first one of a slot must not have left."""
    inputs = _total(product, ring.dtype)[:, : spec.num_channels]
    weights = _wide(weight[:, 0])
    slots, positions = row_slot.tolist(), row_position.tolist()
    places = {place: row for row, place in enumerate(zip(slots, positions, strict=True))}
    mixed = torch.zeros(len(slots), spec.num_channels, dtype=ring.dtype, device=ring.device)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            continue

        x = torch.zeros_like(weights[:, 0])
        for tap in range(spec.conv_width):
            source = position - spec.conv_width + 1 + tap
            if (slot, source) in places:
                x = x + _wide(inputs[places[slot, source]]) * weights[:, tap]
            elif source >= 0:
                x = x + _wide(ring[slot, source % ring.shape[1]]) * weights[:, tap]
        mixed[row] = F.silu(_wide(x.to(ring.dtype))).to(ring.dtype)
    if is_kept:
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if slot >= 0:
                ring[slot, position % ring.shape[1]] = inputs[row]
    return mixed


def scales_reference(spec: GatedDelta, mixed: Tensor) -> Tensor:
    """Return scales [R, 2 * num_key_heads] of mixed rows."""
    size = 2 * spec.num_key_heads * spec.key_dim
    heads = _wide(mixed[:, :size]).unflatten(1, (2 * spec.num_key_heads, spec.key_dim))
    scales = torch.rsqrt(heads.square().sum(2) + 1e-6)
    scales[:, : spec.num_key_heads] *= spec.key_dim**-0.5
    return scales


def keep_inputs_reference(
    spec: GatedDelta, product: Tensor, runs: PromptRuns, ring: Tensor, checkpoints: Tensor
) -> None:
    """Write what `keep_inputs` writes, row by row."""
    inputs, num_kept = _total(product, ring.dtype)[:, : spec.num_channels], spec.conv_width - 1
    before = ring.clone()
    for number, (slot, start, first_row, count) in enumerate(runs.runs.tolist()):
        if slot < 0 or count == 0:
            continue

        entry = first_row // BORDER + number
        for border in range((start // BORDER + 1) * BORDER, start + count + 1, BORDER):
            place = int(runs.places[entry])
            entry += 1
            for kept in range(num_kept):
                position = border - num_kept + kept
                if place >= 0 and position >= start:
                    checkpoints[place, kept] = inputs[first_row + position - start]
                elif place >= 0:
                    checkpoints[place, kept] = before[slot, position % ring.shape[1]]
        for position in range(max(start, start + count - num_kept), start + count):
            ring[slot, position % ring.shape[1]] = inputs[first_row + position - start]


def norm_gated_reference(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, norm_kind: NormKind
) -> Tensor:
    """Return x [R, heads * D] normalised by heads, weighed and gated, in x's type."""
    wide = _wide(x).unflatten(1, (-1, weight.shape[0]))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if norm_kind == "rounded":
        weighed = normed.to(x.dtype) * weight
    else:
        factor = 1.0 + _wide(weight) if norm_kind == "offset" else _wide(weight)
        weighed = (normed * factor).to(x.dtype)
    return (_wide(weighed).flatten(1) * F.silu(_wide(_total(gate, x.dtype)))).to(x.dtype)


def move_borders_of_rows_reference(
    borders: Tensor, row_slot: Tensor, row_position: Tensor, rows_per_slot: int
) -> None:
    for slot, position in zip(
        row_slot[::rows_per_slot].tolist(), row_position[::rows_per_slot].tolist(), strict=True
    ):
        if slot >= 0:
            borders[slot] = position // BORDER * BORDER


def move_borders_of_prompts_reference(borders: Tensor, runs: Tensor) -> None:
    for slot, start, _, count in runs.tolist():
        if slot >= 0:
            borders[slot] = (start + count) // BORDER * BORDER
