"""States of recurrent layers in plain torch, for sequences that advance, are rewound, and start from
checkpoints.

Positions are cut at multiples of BORDER. A sequence has the state at a border, and of the rows since then
what each adds to the state. So rows that were rejected are dropped, and the state does not depend on how it
came about: neither on the division of a prompt, nor on drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct

from drift_sdk.spec.model import BORDER, GatedDelta, ModelSpec


class LayerState(Struct):
    """The state of one layer, float32 but for the inputs of the convolution.

    border:  position of the state; rows follow from it on.
    state:   at the border, [num_value_heads, key_dim, value_dim].
    keys:    of the rows since the border, of length 1, [rows, num_key_heads, key_dim].
    updates: what they add in the direction of their keys, [rows, num_value_heads, value_dim].
    decays:  logarithms of their decays, [rows, num_value_heads].
    inputs:  of the convolution, [conv_width - 1 + rows, channels], from the rows before the border on; zeros
             before the first row.
    """

    border: int
    state: torch.Tensor
    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor
    inputs: torch.Tensor

    @classmethod
    def empty(cls, spec: GatedDelta, dtype: torch.dtype, device: torch.device) -> LayerState:
        """Before the first row. dtype: of the model."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            border=0,
            state=zeros(spec.num_value_heads, spec.key_dim, spec.value_dim),
            keys=zeros(0, spec.num_key_heads, spec.key_dim),
            updates=zeros(0, spec.num_value_heads, spec.value_dim),
            decays=zeros(0, spec.num_value_heads),
            inputs=zeros(spec.conv_width - 1, spec.num_channels).to(dtype),
        )

    @property
    def position(self) -> int:
        """Of the next row."""
        return self.border + self.keys.shape[0]

    def begin(self, position: int) -> None:
        """Prepare for rows from `position` on: rows from there on were rejected, those before are kept."""
        assert self.border <= position <= self.position, f"rows from {position} on: the state is at {self}"
        num_rows = position - self.border
        num_before = self.inputs.shape[0] - self.keys.shape[0]
        self.keys, self.updates = self.keys[:num_rows], self.updates[:num_rows]
        self.decays, self.inputs = self.decays[:num_rows], self.inputs[: num_before + num_rows]
        while self.keys.shape[0] >= BORDER:
            self.fold()

    def append(self, keys: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor) -> None:
        """Add rows, whose inputs were added before."""
        self.keys, self.updates = torch.cat((self.keys, keys)), torch.cat((self.updates, updates))
        self.decays = torch.cat((self.decays, decays))

    def fold(self) -> None:
        """Advance by BORDER rows: the border's state takes up what these add."""
        totals = self.decays[:BORDER].cumsum(0)
        weighted = self.updates[:BORDER] * torch.exp(totals[-1] - totals)[:, :, None]
        keys = self.keys[:BORDER].repeat_interleave(weighted.shape[1] // self.keys.shape[1], dim=1)
        added = torch.einsum("shk,shv->hkv", keys, weighted)
        self.state = totals[-1].exp()[:, None, None] * self.state + added
        self.border += BORDER
        self.keys, self.updates = self.keys[BORDER:], self.updates[BORDER:]
        self.decays, self.inputs = self.decays[BORDER:], self.inputs[BORDER:]

    def copy(self) -> LayerState:
        """The state with the same tensors, which are never written in place."""
        return LayerState(self.border, self.state, self.keys, self.updates, self.decays, self.inputs)


class Checkpoint(Struct, frozen=True):
    """States of all layers at a border, and the inputs of their convolutions before it."""

    position: int
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class SequenceState:
    """The states of a sequence in all recurrent layers, by the numbers of these."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """checkpoint: where the sequence goes on; None: at its beginning."""
        self.layers: dict[int, LayerState] = {}
        for number, index in enumerate(spec.recurrent_layers):
            mixer = spec.layers[index].mixer
            assert isinstance(mixer, GatedDelta)
            layer = self.layers[index] = LayerState.empty(mixer, dtype, device)
            if checkpoint is not None:
                layer.border = checkpoint.position
                layer.state, layer.inputs = checkpoint.layers[number]


class StateRows(Struct, frozen=True):
    """The rows of a step of one sequence, from `start` on.

    is_final: none of them will be rejected.
    saved:    by position, the checkpoints that are taken within the rows: filled with the state and the
              inputs of each layer, in order. Positions are multiples of BORDER, above `start`.
    """

    state: SequenceState
    start: int
    num_rows: int
    is_final: bool
    saved: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]

    @classmethod
    def of(
        cls,
        state: SequenceState,
        start: int,
        num_rows: int,
        *,
        is_final: bool,
        positions: Sequence[int] = (),
    ) -> StateRows:
        """Drop what was rejected before. positions: where checkpoints are taken."""
        for layer in state.layers.values():
            layer.begin(start)
        return cls(state, start, num_rows, is_final, {position: [] for position in positions})

    def checkpoints(self) -> dict[int, Checkpoint]:
        """The checkpoints that were taken, by position."""
        return {position: Checkpoint(position, tuple(layers)) for position, layers in self.saved.items()}
