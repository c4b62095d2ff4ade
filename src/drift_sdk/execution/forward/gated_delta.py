"""Recurrent layers of a forward pass: projections, convolution, the gated delta rule, and the output."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.exchange import PeerSums
from drift_sdk._kernels.recurrent.gated_delta import (
    MixedRows,
    PromptRuns,
    advance_prompts,
    advance_rows,
    move_borders_of_prompts,
    move_borders_of_rows,
)
from drift_sdk._kernels.recurrent.rows import fill_gates, keep_inputs, mix_rows, norm_gated
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.caches import RecurrentStates
from drift_sdk.execution.forward.products import Products
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights
from drift_sdk.spec.model import GatedDelta


class RecurrentRows(Struct, frozen=True):
    """What recurrent layers have to know of a step's rows.

    runs: of the first `num_prompt_rows` rows, which are prompts'; None: there are none. rows_per_slot: of
    those behind them, which are decoded or verified; 0: there are none.
    """

    runs: PromptRuns | None = None
    num_prompt_rows: int = 0
    rows_per_slot: int = 0


class GatedDeltaForward:
    """Kernels that compute the gated delta rule of R rows in a layer."""

    def __init__(
        self,
        states: RecurrentStates,
        rows: Rows,
        recurrent: RecurrentRows,
        workspace: Workspace,
        products: Products,
    ) -> None:
        self._states, self._rows, self._recurrent = states, rows, recurrent
        self._workspace, self._products = workspace, products

    def begin(self) -> None:
        """Prepare for the rows; once a step, before any layer."""
        if self._recurrent.runs is not None:
            move_borders_of_prompts(self._states.borders, self._recurrent.runs.runs)

    def end(self) -> None:
        """Take up what all layers have stored."""
        if self._recurrent.rows_per_slot:
            slot, position = self._round_rows()
            move_borders_of_rows(self._states.borders, slot, position, self._recurrent.rows_per_slot)

    def run(
        self, x: Tensor, weights: GatedDeltaWeights, spec: GatedDelta, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """The output of layer `index` for x [R, hidden], normalised, as `Products` return it. States, rings
        and checkpoints are advanced."""
        rows, layer = self._take(x, spec), self._states.layer(index)
        product, _ = self._products.multiply(x, weights.ba, None)
        fill_gates(product, weights.decay, weights.step, rows.gates)
        product, _ = self._products.multiply(x, weights.qkvz, None)
        runs, first = self._recurrent.runs, self._recurrent.num_prompt_rows
        if runs is not None:
            part = slice(first)
            of_prompts, prompts = product[..., part, :], _part(rows, part)
            slot, position = self._rows.slot[part], self._rows.position[part]
            mix_rows(spec, of_prompts, weights.conv, slot, position, layer.inputs, prompts, is_kept=False)
            keep_inputs(spec, of_prompts, runs, layer.inputs, layer.checkpoint_inputs)
            advance_prompts(spec, prompts, layer.states, runs, layer.checkpoints)
        if rows_per_slot := self._recurrent.rows_per_slot:
            part = slice(first, None)
            of_round, decoded = product[..., part, :], _part(rows, part)
            slot, position = self._round_rows()
            mix_rows(spec, of_round, weights.conv, slot, position, layer.inputs, decoded, is_kept=True)
            advance_rows(
                spec,
                decoded,
                layer.states,
                self._states.borders,
                slot,
                position,
                rows_per_slot=rows_per_slot,
            )
        gate = product[..., spec.num_channels :]
        norm_gated(rows.out, gate, weights.norm, eps=spec.norm.eps, norm_kind=spec.norm.kind)
        return self._products.multiply_down(rows.out, weights.output, None, 2 * index)

    def _take(self, x: Tensor, spec: GatedDelta) -> MixedRows:
        """Buffers of a layer, which each layer overwrites."""
        num_rows, take = x.shape[0], self._workspace.take
        return MixedRows(
            mixed=take("delta_mixed", (num_rows, spec.num_channels), x.dtype),
            scales=take("delta_scales", (num_rows, 2 * spec.num_key_heads), torch.float32),
            gates=take("delta_gates", (num_rows, 2 * spec.num_value_heads), torch.float32),
            out=take("delta_out", (num_rows, spec.output_size), x.dtype),
        )

    def _round_rows(self) -> tuple[Tensor, Tensor]:
        first = self._recurrent.num_prompt_rows
        return self._rows.slot[first:], self._rows.position[first:]


def _part(rows: MixedRows, part: slice) -> MixedRows:
    return MixedRows(rows.mixed[part], rows.scales[part], rows.gates[part], rows.out[part])
