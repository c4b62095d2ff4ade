"""Keys, their factors, and decays of the last rows of prompts, which are added to the rings of slots.

A launch of its own behind the one that computes the rows: its CTAs read the keys before a run from the ring,
in which these rows may take their places.

Grid: (runs, key heads). A program owns a key head of a run, and the decays of its value heads.

Bytes: at most BORDER - 1 rows of a run, read and written.

Dependent launch: the kernel waits first, then permits its dependents to start.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk.spec.model import GatedDelta
from drift_sdk.spec.states import BORDER

__all__ = ["keep_rows"]


@kernel
def _keep_rows(
    runs_ptr,  # [M, 4] int32
    mixed_ptr,  # [N, NUM_CHANNELS], storage type
    scales_ptr,  # [N, 2 * NUM_KEY_HEADS] fp32
    gates_ptr,  # [N, 2 * NUM_VALUE_HEADS] fp32
    keys_ptr,  # [S, NUM_KEY_HEADS, RING, KEY_DIM], storage type, written
    key_scales_ptr,  # [S, NUM_KEY_HEADS, RING] fp32, written
    decays_ptr,  # [S, NUM_VALUE_HEADS, RING] fp32, written
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    RING: tl.constexpr,
    BORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (run, key head)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    run, key_head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(runs_ptr + run * 4)
    start = tl.load(runs_ptr + run * 4 + 1)
    first_row = tl.load(runs_ptr + run * 4 + 2)
    end = start + tl.load(runs_ptr + run * 4 + 3)
    position = end // BORDER * BORDER + tl.arange(0, BORDER)
    slots = tl.where(position >= start, slot, -1).to(tl.int64)
    is_row = (slots >= 0) & (position < end)
    row = tl.where(is_row, first_row + position - start, 0).to(tl.int64)
    place = tl.where(is_row, position, 0) % RING
    column = tl.arange(0, PADDED_DIM)
    mask = is_row[:, None] & (column < KEY_DIM)[None, :]
    channel = (NUM_KEY_HEADS + key_head) * KEY_DIM + column
    keys = tl.load(mixed_ptr + (row[:, None] * NUM_CHANNELS + channel[None, :]), mask=mask, other=0.0)
    ring = (slots * NUM_KEY_HEADS + key_head) * RING + place
    tl.store(keys_ptr + (ring[:, None] * KEY_DIM + column[None, :]), keys, mask=mask)
    scale_ptrs = scales_ptr + (row * (2 * NUM_KEY_HEADS) + NUM_KEY_HEADS + key_head)
    tl.store(key_scales_ptr + ring, tl.load(scale_ptrs, mask=is_row, other=0.0), mask=is_row)
    member = tl.arange(0, PADDED_GROUP)
    head = key_head * GROUP + member
    is_decay = is_row[:, None] & (member < GROUP)[None, :]
    gate_ptrs = gates_ptr + (row[:, None] * (2 * NUM_VALUE_HEADS) + head[None, :])
    ring = (slots[:, None] * NUM_VALUE_HEADS + head[None, :]) * RING + place[:, None]
    tl.store(decays_ptr + ring, tl.load(gate_ptrs, mask=is_decay, other=0.0), mask=is_decay)


def keep_rows(
    spec: GatedDelta,
    runs: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    rings: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the rows of runs [M, 4] since the last border to the rings of their slots.

    rows: mixed, scales and gates of `MixedRows`. rings: keys, key_scales and decays of `LayerStates`. Their
    shapes, types and layouts were checked.
    """
    mixed, scales, gates = rows
    keys, key_scales, decays = rings
    _keep_rows[(runs.shape[0], spec.num_key_heads)](
        runs_ptr=runs,
        mixed_ptr=mixed,
        scales_ptr=scales,
        gates_ptr=gates,
        keys_ptr=keys,
        key_scales_ptr=key_scales,
        decays_ptr=decays,
        NUM_KEY_HEADS=spec.num_key_heads,
        NUM_VALUE_HEADS=spec.num_value_heads,
        NUM_CHANNELS=spec.num_channels,
        KEY_DIM=spec.key_dim,
        PADDED_DIM=next_power_of_2(spec.key_dim),
        GROUP=spec.group,
        PADDED_GROUP=next_power_of_2(spec.group),
        RING=keys.shape[2],
        BORDER=BORDER,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
