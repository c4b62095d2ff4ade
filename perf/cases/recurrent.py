"""Cases of the gated delta rule: rows of sequences, and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.recurrent.gated_delta import (
    LayerStates,
    MixedRows,
    PromptRuns,
    advance_prompts,
    advance_rows,
    state_shape,
)
from drift_sdk.spec.model import BORDER, GatedDelta, num_ring_rows
from perf.cases.case import Case, Prepared, num_copies
from perf.harness.shapes import Model

__all__ = ["recurrent_cases"]

ROWS_PER_SLOT = (1, 4, 8)
PROMPTS = (512, 2_048, 8_192)
"""Rows of a prompt."""
PRODUCTS = 3
"""Products of a row with the matrix of a state: key, query, and the update."""


def recurrent_cases(
    model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str
) -> Iterator[Case]:
    """Yield cases for as many sequences as `row_counts` say, and of a prompt; none without recurrent layers.

    Bytes: the states, and what half of BORDER rows have added to them. Operations: the products with states.
    """
    mixers = [layer.mixer for layer in model.spec.layers]
    spec = next((mixer for mixer in mixers if isinstance(mixer, GatedDelta)), None)
    if spec is None:
        return

    shape = f"{spec.num_value_heads} x {spec.key_dim} x {spec.value_dim}"
    state_bytes = 4 * spec.state_size + BORDER // 2 * 4 * spec.output_size
    for rows_per_slot in ROWS_PER_SLOT:
        for num_slots in row_counts:
            num_rows = num_slots * rows_per_slot
            yield Case(
                kernel=f"gated delta, {rows_per_slot} rows",
                shape=shape,
                num_rows=num_rows,
                num_bytes=num_slots * state_bytes,
                num_flops=2 * PRODUCTS * num_rows * spec.state_size,
                prepare=partial(prepare_rows, spec, num_slots, rows_per_slot, device),
            )
    for num_rows in PROMPTS:
        yield Case(
            kernel="gated delta, prompt",
            shape=shape,
            num_rows=num_rows,
            num_bytes=2 * num_rows * (spec.num_channels + spec.output_size),
            num_flops=2 * PRODUCTS * num_rows * spec.state_size,
            prepare=partial(prepare_prompt, spec, num_rows, device),
        )


def prepare_rows(spec: GatedDelta, num_slots: int, rows_per_slot: int, device: str) -> Prepared:
    """Make the states of several layers. Sequences are at all distances from a border, in turn."""
    copies = num_copies(num_slots * 4 * spec.state_size)
    layers = [drawn_states(spec, num_slots, rows_per_slot, device) for _ in range(copies)]
    rows = drawn_rows(spec, num_slots * rows_per_slot, device)
    slot = torch.arange(num_slots, dtype=torch.int32, device=device)
    start = BORDER + (slot * 5 + BORDER // 2) % (BORDER - rows_per_slot + 1)
    position = start[:, None] + torch.arange(rows_per_slot, dtype=torch.int32, device=device)
    row_slot = slot.repeat_interleave(rows_per_slot).contiguous()
    row_position = position.flatten().to(torch.int32)
    borders = torch.full((num_slots,), BORDER, dtype=torch.int32, device=device)

    def step() -> None:
        for states in layers:
            advance_rows(spec, rows, states, borders, row_slot, row_position, rows_per_slot=rows_per_slot)

    return Prepared(step, copies, (rows.out,))


def prepare_prompt(spec: GatedDelta, num_rows: int, device: str) -> Prepared:
    """Make the rows of a prompt."""
    states, rows = drawn_states(spec, 1, 1, device), drawn_rows(spec, num_rows, device)
    runs = torch.tensor([[0, 0, 0, num_rows]], dtype=torch.int32, device=device)
    places = torch.full((num_rows // BORDER + 2,), -1, dtype=torch.int32, device=device)
    checkpoints = torch.empty(0, *state_shape(spec), device=device)

    def step() -> None:
        advance_prompts(spec, rows, states, PromptRuns(runs, places), checkpoints)

    return Prepared(step, 1, (rows.out,))


def drawn_states(spec: GatedDelta, num_slots: int, max_rows: int, device: str) -> LayerStates:
    """States of random numbers."""
    states = LayerStates.empty(spec, (num_slots,), num_ring_rows(max_rows), torch.device(device))
    for name in states.__struct_fields__:
        getattr(states, name).normal_(std=0.1)
    states.decays.abs_().neg_()
    return states


def drawn_rows(spec: GatedDelta, num_rows: int, device: str) -> MixedRows:
    """Rows of random numbers, with keys and queries of about unit length."""
    heads, size = spec.num_key_heads, spec.key_dim
    scales = torch.full((num_rows, 2 * heads), size**-0.5, device=device)
    scales[:, :heads] *= size**-0.5
    gates = torch.rand(num_rows, 2 * spec.num_value_heads, device=device)
    gates[:, : spec.num_value_heads] *= -0.2
    return MixedRows(
        mixed=torch.randn(num_rows, spec.num_channels, device=device).to(torch.bfloat16),
        scales=scales,
        gates=gates,
        out=torch.empty(num_rows, spec.output_size, dtype=torch.bfloat16, device=device),
    )
