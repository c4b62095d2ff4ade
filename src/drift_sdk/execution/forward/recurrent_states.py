"""States of recurrent layers on the device: of slots, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.recurrent.gated_delta import LayerStates, state_shape
from drift_sdk.models.decoder import Decoder
from drift_sdk.spec.model import GatedDelta, ModelSpec
from drift_sdk.spec.states import num_input_rows, num_ring_rows
from drift_sdk.steps import PrefillChunk

__all__ = ["RecurrentLayer", "RecurrentStates"]


class RecurrentLayer(Struct, frozen=True):
    """The states of a layer.

    states: of slots. inputs [S, rows, num_channels]: rings of the convolution's inputs. checkpoints
    [P, *state_shape], checkpoint_inputs [P, conv_width - 1, num_channels]. All are views of larger tensors.
    """

    states: LayerStates
    inputs: Tensor
    checkpoints: Tensor
    checkpoint_inputs: Tensor


class _Group(Struct, frozen=True):
    """The layers of a spec: the tensors of `RecurrentLayer`, with the layers as first dimension."""

    layers: tuple[int, ...]
    states: LayerStates
    inputs: Tensor
    checkpoints: Tensor
    checkpoint_inputs: Tensor

    def each(self) -> Iterator[tuple[int, RecurrentLayer]]:
        """Each layer, by its number in the model."""
        for number, index in enumerate(self.layers):
            names = LayerStates.__struct_fields__
            states = LayerStates(*(getattr(self.states, name)[number] for name in names))
            yield (
                index,
                RecurrentLayer(
                    states,
                    self.inputs[number],
                    self.checkpoints[number],
                    self.checkpoint_inputs[number],
                ),
            )


class RecurrentStates:
    """States of all recurrent layers, uninitialised.

    borders [S] int32: the positions of the slots' stored states.
    """

    def __init__(self, decoder: Decoder, num_slots: int, max_rows: int, num_checkpoints: int) -> None:
        """max_rows: most rows of a slot that are verified at once."""
        self._groups = [
            _group(spec, layers, decoder, (num_slots, max_rows, num_checkpoints))
            for spec, layers in _layers_by_spec(decoder.spec).items()
        ]
        self._layers = {index: layer for group in self._groups for index, layer in group.each()}
        self._positions: dict[int, int] = {}  # of checkpoints, by place
        self.borders: Tensor = torch.zeros(num_slots, dtype=torch.int32, device=decoder.device)

    def layer(self, index: int) -> RecurrentLayer:
        """The states of a layer of the model."""
        return self._layers[index]

    def note(self, chunks: Sequence[PrefillChunk]) -> None:
        """Keep the positions of the checkpoints that chunks write, once they have been launched."""
        for chunk in chunks:
            self._positions |= {place: position for position, place in chunk.checkpoints}

    def restore(self, slot: int, place: int) -> None:
        """Copy a checkpoint to a slot, by work in the stream."""
        position = self._positions[place]
        for group in self._groups:
            group.states.state[:, slot].copy_(group.checkpoints[:, place])
            num_rows, num_kept = group.inputs.shape[2], group.checkpoint_inputs.shape[2]
            for number in range(num_kept):
                row = (position - num_kept + number) % num_rows
                group.inputs[:, slot, row].copy_(group.checkpoint_inputs[:, place, number])


def _layers_by_spec(spec: ModelSpec) -> dict[GatedDelta, tuple[int, ...]]:
    found: dict[GatedDelta, tuple[int, ...]] = {}
    for index in spec.recurrent_layers:
        mixer = spec.layers[index].mixer
        assert isinstance(mixer, GatedDelta)
        found[mixer] = (*found.get(mixer, ()), index)
    return found


def _group(
    spec: GatedDelta, layers: tuple[int, ...], decoder: Decoder, sizes: tuple[int, int, int]
) -> _Group:
    """sizes: slots, most rows verified at once, and checkpoints."""
    num_slots, max_rows, num_checkpoints = sizes
    num_rows, num_kept = num_ring_rows(max_rows), spec.conv_width - 1

    def take(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((len(layers), *shape), dtype=dtype, device=decoder.device)

    return _Group(
        layers=layers,
        states=LayerStates.empty(spec, (len(layers), num_slots), num_rows, decoder.device, decoder.dtype),
        inputs=take(num_slots, num_input_rows(spec, max_rows), spec.num_channels, dtype=decoder.dtype),
        checkpoints=take(num_checkpoints, *state_shape(spec)),
        checkpoint_inputs=take(num_checkpoints, num_kept, spec.num_channels, dtype=decoder.dtype),
    )
