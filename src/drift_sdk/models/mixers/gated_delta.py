"""The gated delta rule in plain torch: weights and forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drift_sdk.models.allocation import Allocation
from drift_sdk.models.kv_cache import LayerState, StateRows
from drift_sdk.models.layers import linear, normalise
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import BORDER, GatedDelta, GatedDeltaNames

EPS = 1e-6
"""Addend of the squared length of queries and keys."""


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """The weights of one layer. Matrices may be quantised.

    qkvz:    [channels + num_value_heads * value_dim, hidden]: queries, keys, values, and the gate of the
             output.
    ba:      [2 * num_value_heads, hidden]: rates, then steps.
    conv:    [channels, 1, conv_width].
    decay:   [num_value_heads] float32, logarithms. step: [num_value_heads], addend of the steps.
    norm:    [value_dim].
    output:  [hidden, num_value_heads * value_dim].
    """

    qkvz: Matrix
    ba: Matrix
    conv: torch.Tensor
    decay: torch.Tensor
    step: torch.Tensor
    norm: torch.Tensor
    output: Matrix

    @property
    def matrices(self) -> dict[str, Matrix]:
        """All matrices, by name."""
        return {"qkvz": self.qkvz, "ba": self.ba, "output": self.output}


def allocate_gated_delta(
    spec: GatedDelta, names: GatedDeltaNames, layer: str, hidden: int, allocation: Allocation
) -> GatedDeltaWeights:
    """layer: prefix of the layer's tensors."""
    prefix, size, heads = f"{layer}.{names.module}", spec.output_size, spec.num_value_heads
    qkvz, ba = {names.qkv: spec.num_channels, names.z: size}, {names.b: heads, names.a: heads}
    if spec.has_fused_qkvz:
        qkvz = {names.qkvz: spec.num_channels + size}
    if spec.has_fused_ba:
        ba = {names.ba: 2 * heads}
    qkvz_order, ba_order = _fused_orders(spec)

    def projection(rows: dict[str, int], order: torch.Tensor | None) -> Matrix:
        whole = {f"{prefix}.{name}.weight": number for name, number in rows.items()}
        return allocation.projection(whole, hidden, order)

    return GatedDeltaWeights(
        qkvz=projection(qkvz, qkvz_order if spec.has_fused_qkvz else None),
        ba=projection(ba, ba_order if spec.has_fused_ba else None),
        conv=allocation.tensor(f"{prefix}.{names.conv}.weight", spec.num_channels, 1, spec.conv_width),
        decay=allocation.tensor(f"{prefix}.{names.decay}", heads, dtype=torch.float32),
        step=allocation.tensor(f"{prefix}.{names.step}", heads),
        norm=allocation.tensor(f"{prefix}.{names.norm}.weight", spec.value_dim),
        output=allocation.matrix(f"{prefix}.{names.output}.weight", hidden, size),
    )


def _fused_orders(spec: GatedDelta) -> tuple[torch.Tensor, torch.Tensor]:
    """The places in files of the rows of qkvz and of ba. In files, the rows of a key head and of its value
    heads are together."""
    values = spec.group * spec.value_dim
    sizes = (spec.key_dim, spec.key_dim, values, values)
    rows = torch.arange(spec.num_key_heads * sum(sizes), device="cpu").view(spec.num_key_heads, -1)
    parts = rows.split(sizes, dim=1)
    pairs = torch.arange(2 * spec.num_value_heads, device="cpu").view(spec.num_key_heads, 2, spec.group)
    return torch.cat([part.flatten() for part in parts]), pairs.transpose(0, 1).flatten()


def apply_gated_delta(
    x: torch.Tensor, weights: GatedDeltaWeights, spec: GatedDelta, rows: Sequence[StateRows], index: int
) -> torch.Tensor:
    """The output [N, hidden] of layer `index`, from its normalised input [N, hidden]. The states of the
    sequences, whose rows are one after the other, take up the rows."""
    qkv, z = linear(x, weights.qkvz).split((spec.num_channels, spec.output_size), dim=1)
    rates, steps = linear(x, weights.ba).chunk(2, dim=1)
    rates = rates.sigmoid().to(torch.float32)
    decays = -weights.decay.exp() * F.softplus(steps.to(torch.float32) + weights.step.to(torch.float32))
    outputs, first = [], 0
    for each in rows:
        part = slice(first, first + each.num_rows)
        outputs.append(_advance(qkv[part], rates[part], decays[part], weights, spec, each, index))
        first += each.num_rows
    output = torch.cat(outputs).to(x.dtype).view(-1, spec.value_dim)
    normed = normalise(output, weights.norm, spec.norm)
    gated = (normed * F.silu(z.reshape(-1, spec.value_dim).to(torch.float32))).to(x.dtype)
    return linear(gated.view(-1, spec.output_size), weights.output)


def _advance(
    qkv: torch.Tensor,
    rates: torch.Tensor,
    decays: torch.Tensor,
    weights: GatedDeltaWeights,
    spec: GatedDelta,
    rows: StateRows,
    index: int,
) -> torch.Tensor:
    """The outputs [N, num_value_heads, value_dim] of a sequence's rows, from qkv [N, channels], rates and
    decays [N, num_value_heads]."""
    own, num_past = rows.state.layers[index], spec.conv_width - 1
    window = torch.cat((own.inputs[own.inputs.shape[0] - num_past :], qkv))
    mixed = F.silu(F.conv1d(window.T[None], weights.conv, groups=spec.num_channels))[0].T
    keys_size = spec.num_key_heads * spec.key_dim
    queries, keys, values = mixed.split((keys_size, keys_size, spec.output_size), dim=1)
    queries = _unit(queries.unflatten(1, (spec.num_key_heads, spec.key_dim))) * spec.key_dim**-0.5
    keys = _unit(keys.unflatten(1, (spec.num_key_heads, spec.key_dim)))
    values = values.unflatten(1, (spec.num_value_heads, spec.value_dim)).to(torch.float32)
    # Folds of rows that may be rejected are not kept: the sequence's own state stays where it is.
    state = own if rows.is_final else own.copy()
    outputs, first = [], 0
    while first < rows.num_rows:
        last = min(rows.num_rows, first + BORDER - state.keys.shape[0])
        part = slice(first, last)
        inputs = queries[part], keys[part], values[part], rates[part], decays[part]
        updates, output = _solve(state, *inputs)
        outputs.append(output)
        state.inputs = torch.cat((state.inputs, qkv[part]))
        state.append(keys[part], updates, decays[part])
        if state is not own:
            own.inputs = torch.cat((own.inputs, qkv[part]))
            own.append(keys[part], updates, decays[part])
        if state.keys.shape[0] == BORDER:
            state.fold()
            if state.border in rows.saved:
                rows.saved[state.border].append((state.state, state.inputs.clone()))
        first = last
    return torch.cat(outputs)


def _solve(
    state: LayerState,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rates: torch.Tensor,
    decays: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Updates and outputs [N, num_value_heads, value_dim] of the next rows, up to the next border.

    queries and keys [N, num_key_heads, key_dim], values [N, num_value_heads, value_dim], rates and decays
    [N, num_value_heads].
    """
    group, num_rows, num_before = values.shape[1] // keys.shape[1], keys.shape[0], state.keys.shape[0]
    totals = torch.cat((state.decays, decays)).cumsum(0).T  # since the border, by head
    own = totals[:, num_before:]
    all_keys = _by_head(torch.cat((state.keys, keys)), group)
    queries, keys = _by_head(queries, group), all_keys[:, num_before:]
    seen = torch.ones(num_rows, num_before + num_rows, dtype=torch.bool, device=keys.device)
    seen = seen.tril(num_before)
    # Decays between rows that do not see each other may be too large for an exponential.
    between = torch.exp((own[:, :, None] - totals[:, None]).masked_fill(~seen, float("-inf")))
    from_border = own.exp()[:, :, None]
    past, by_rate = state.updates.transpose(0, 1), rates.T[:, :, None]
    keyed = (keys @ all_keys.transpose(1, 2)) * between
    known = from_border * (keys @ state.state) + keyed[:, :, :num_before] @ past
    system = (by_rate * keyed[:, :, num_before:]).tril(-1)
    system = system + torch.eye(num_rows, dtype=torch.float32, device=keys.device)
    updates = torch.linalg.solve_triangular(
        system, by_rate * (values.transpose(0, 1) - known), upper=False, unitriangular=True
    )
    asked = (queries @ all_keys.transpose(1, 2)) * between
    outputs = from_border * (queries @ state.state) + asked @ torch.cat((past, updates), dim=1)
    return updates.transpose(0, 1), outputs.transpose(0, 1)


def _by_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """Queries or keys [N, num_key_heads, key_dim] of each value head, [num_value_heads, N, key_dim]."""
    return x.transpose(0, 1).repeat_interleave(group, dim=0)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] of length 1, in float32."""
    wide = x.to(torch.float32)
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + EPS)
