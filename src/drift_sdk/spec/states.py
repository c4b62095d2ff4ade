"""Sizes of the states of recurrent layers. `models.states` and the kernels say what they hold."""

from __future__ import annotations

import torch

from drift_sdk.spec.model import GatedDelta, ModelSpec

__all__ = [
    "BORDER",
    "checkpoint_bytes",
    "graph_slot_bytes",
    "num_input_rows",
    "num_ring_rows",
    "slot_bytes",
]

BORDER = 32
"""Positions between borders, at which states are stored."""


def num_ring_rows(max_rows: int) -> int:
    """Rows since a border that kernels keep, if at most `max_rows` are verified at once: the stored border
    may be the last one up to the first row of the verification before, whose rows may all be accepted."""
    return -(-(BORDER - 1 + 2 * max_rows) // 8) * 8


def num_input_rows(spec: GatedDelta, max_rows: int) -> int:
    """Inputs of the convolution that kernels keep, if at most `max_rows` are verified at once: those are
    written while the rows before the first one are read."""
    return max_rows + spec.conv_width - 1


def checkpoint_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the states of all layers at a border."""
    return sum(
        4 * mixer.state_size + dtype.itemsize * (mixer.conv_width - 1) * mixer.num_channels
        for mixer in _mixers(spec)
    )


def slot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the states of a sequence that runs in plain torch, with the rows of two borders."""
    row = sum(
        4 * (mixer.num_key_heads * mixer.key_dim + mixer.output_size + mixer.num_value_heads)
        + dtype.itemsize * mixer.num_channels
        for mixer in _mixers(spec)
    )
    return checkpoint_bytes(spec, dtype) + 2 * BORDER * row


def graph_slot_bytes(spec: ModelSpec, dtype: torch.dtype, max_rows: int) -> int:
    """Bytes of the states of a sequence that runs in kernels, with at most `max_rows` rows verified at once:
    of each row a key of two bytes a number, what it adds, their factors, and the convolution's inputs."""
    return sum(
        4 * mixer.state_size
        + num_ring_rows(max_rows)
        * ((2 * mixer.key_dim + 4) * mixer.num_key_heads + 4 * (mixer.value_dim + 1) * mixer.num_value_heads)
        + dtype.itemsize * num_input_rows(mixer, max_rows) * mixer.num_channels
        for mixer in _mixers(spec)
    )


def _mixers(spec: ModelSpec) -> list[GatedDelta]:
    mixers = [layer.mixer for layer in spec.layers]
    return [mixer for mixer in mixers if isinstance(mixer, GatedDelta)]
