"""The gated delta rule row by row, in plain torch, on the states that kernels keep."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.recurrent.gated_delta import LayerStates, MixedRows, PromptRuns
from drift_sdk.spec.model import BORDER, GatedDelta

__all__ = ["advance_prompts_reference", "advance_rows_reference", "as_stored", "matrix_of"]


def matrix_of(stored: Tensor) -> Tensor:
    """The state [num_value_heads, key_dim, value_dim] of a slot as it is stored."""
    heads, value_tiles, key_tiles, _, _ = stored.shape
    parts = stored.view(heads, value_tiles, key_tiles, 8, 4, 2, 2)  # value % 8, pair of keys, value half, key
    return parts.permute(0, 2, 4, 6, 1, 5, 3).reshape(heads, key_tiles * 8, value_tiles * 16)


def as_stored(matrix: Tensor) -> Tensor:
    """The inverse of `matrix_of`."""
    heads, keys, values = matrix.shape
    parts = matrix.view(heads, keys // 8, 4, 2, values // 16, 2, 8)
    return parts.permute(0, 4, 1, 6, 2, 5, 3).reshape(heads, values // 16, keys // 8, 32, 4)


class _Sequence:
    """The state of a slot at a position, which advances row by row."""

    def __init__(self, spec: GatedDelta, states: LayerStates, slot: int, border: int, position: int) -> None:
        self._spec, self._states, self._slot = spec, states, slot
        self.border, self.position = border, border
        stored = states.state[slot] if border else torch.zeros_like(states.state[slot])
        self.matrix = matrix_of(stored).clone()
        while self.position < position:
            self._add(*self._row(self.position))

    def _row(self, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Key, update and decay of a row in the rings."""
        states, place = self._states, position % self._states.updates.shape[2]
        keys = states.keys[self._slot, :, place].float() * states.key_scales[self._slot, :, place, None]
        return self._by_head(keys), states.updates[self._slot, :, place], states.decays[self._slot, :, place]

    def _by_head(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self._spec.group, dim=0)

    def _add(self, key: Tensor, update: Tensor, decay: Tensor) -> None:
        self.matrix = self.matrix * torch.exp2(decay)[:, None, None] + key[:, :, None] * update[:, None]
        self.position += 1

    def store(self) -> None:
        """Store the state, which is at a border."""
        self._states.state[self._slot] = as_stored(self.matrix)

    def advance(self, rows: MixedRows, index: int) -> None:
        """Compute row `index` of the step, and add it to the rings."""
        spec, states, slot = self._spec, self._states, self._slot
        size = spec.num_key_heads * spec.key_dim
        queries, keys, values = rows.mixed[index].float().split((size, size, spec.output_size))
        query_scales, key_scales = rows.scales[index].chunk(2)
        decay, rate = rows.gates[index].chunk(2)
        raw = keys.view(spec.num_key_heads, spec.key_dim)
        query = self._by_head(queries.view_as(raw) * query_scales[:, None])
        key = self._by_head(raw * key_scales[:, None])
        decayed = self.matrix * torch.exp2(decay)[:, None, None]
        known = torch.einsum("hkv,hk->hv", decayed, key)
        update = rate[:, None] * (values.view(spec.num_value_heads, spec.value_dim) - known)
        place = self.position % states.updates.shape[2]
        states.keys[slot, :, place] = raw.to(states.keys.dtype)
        states.key_scales[slot, :, place] = key_scales
        states.updates[slot, :, place] = update
        states.decays[slot, :, place] = decay
        self._add(key, update, decay)
        rows.out[index] = torch.einsum("hkv,hk->hv", self.matrix, query).flatten().to(rows.out.dtype)


def advance_rows_reference(
    spec: GatedDelta,
    rows: MixedRows,
    states: LayerStates,
    borders: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    *,
    rows_per_slot: int,
) -> None:
    slots, positions = row_slot.view(-1, rows_per_slot), row_position.view(-1, rows_per_slot)
    for number, (group, places) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        count = (*group, -1).index(-1)
        if not count:
            continue

        border, start = int(borders[group[0]]), places[0]
        last_border = start // BORDER * BORDER
        assert border in (last_border, last_border - BORDER), f"row {start}: the state is at {border}"
        if last_border > border:
            _Sequence(spec, states, group[0], border, last_border).store()
        sequence = _Sequence(spec, states, group[0], last_border, start)
        for row in range(count):
            assert places[row] == start + row
            sequence.advance(rows, number * rows_per_slot + row)


def advance_prompts_reference(
    spec: GatedDelta, rows: MixedRows, states: LayerStates, runs: PromptRuns, checkpoints: Tensor
) -> None:
    for number, (slot, start, first_row, count) in enumerate(runs.runs.tolist()):
        if slot < 0 or count <= 0:
            continue

        sequence = _Sequence(spec, states, slot, start // BORDER * BORDER, start)
        for row in range(count):
            sequence.advance(rows, first_row + row)
            if sequence.position % BORDER:
                continue

            sequence.store()
            entry = first_row // BORDER + number + sequence.position // BORDER - start // BORDER - 1
            place = int(runs.places[entry])
            if place >= 0:
                checkpoints[place] = states.state[slot]
