"""The rows of a step on the device, as all forward passes take them, and the buffers of a forward pass: views
of the workspace that several kinds of steps share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.models.decoder import Decoder
from drift_sdk.spec.model import AnyAttention


class Rows(Struct, frozen=True):
    """The rows of a step on the device, int32 [R] each: slot (-1: padding row), token, and its position.

    kv_slot [R] int64, path [R, PATH_ENTRIES] int32: of nodes of trees, where their keys and values lie and
    which nodes they see; see `tree_rows`.
    """

    slot: Tensor
    token: Tensor
    position: Tensor
    kv_slot: Tensor | None = None
    path: Tensor | None = None

    @classmethod
    def take(cls, workspace: Workspace, num_rows: int, owner: str = "") -> Rows:
        """Uninitialised rows in buffers of an owner, or in buffers that all rounds share."""

        def take(name: str) -> Tensor:
            return workspace.take(f"{owner}row_{name}", (num_rows,), torch.int32)

        return cls(slot=take("slot"), token=take("token"), position=take("position"))

    def planned(self, rows_per_sequence: int) -> PlannedRows:
        """The rows as attention takes them."""
        return PlannedRows(self.slot, self.position, rows_per_sequence)


class HiddenStates(Struct, frozen=True):
    """The residual stream of R rows, which is read after the forward pass has ended: by the sampling of first
    tokens, by prompt log-probabilities and by the drafter.

    final [R, hidden]: after the last layer, not normalised.
    aux_layers: the layer boundaries whose stream the drafter reads, low to high. A boundary may be named
    twice.
    by_layer: the stream [R, hidden] at each boundary of `aux_layers`, not normalised.
    """

    final: Tensor
    aux_layers: Sequence[int]
    by_layer: dict[int, Tensor]

    @classmethod
    def take(
        cls, workspace: Workspace, name: str, decoder: Decoder, num_rows: int, aux_layers: Sequence[int]
    ) -> HiddenStates:
        """name: of the group of steps that share these buffers."""
        shape, dtype = (num_rows, decoder.spec.hidden_size), decoder.dtype
        return cls(
            final=workspace.take(f"{name}_hidden", shape, dtype),
            aux_layers=aux_layers,
            by_layer={
                layer: workspace.take(f"{name}_aux_hidden_{layer}", shape, dtype) for layer in aux_layers
            },
        )

    def first(self, num_rows: int) -> HiddenStates:
        """The first `num_rows` rows."""
        return self.of_rows(slice(num_rows))

    def of_rows(self, rows: slice) -> HiddenStates:
        """Some of the rows."""
        by_layer = {layer: stream[rows] for layer, stream in self.by_layer.items()}
        return HiddenStates(self.final[rows], self.aux_layers, by_layer)

    @property
    def aux(self) -> list[Tensor]:
        """The stream [R, hidden] at each boundary, in the order of `aux_layers`."""
        return [self.by_layer[layer] for layer in self.aux_layers]


class LayerBuffers(Struct, frozen=True):
    """Intermediate values of one layer for R rows. Each layer overwrites those of the layer before.

    normed [R, hidden]. heads: by number and dimensions of a layer's heads, query [R, num_heads, head_dim] and
    attended [R, num_heads, value_dim].
    """

    normed: Tensor
    heads: dict[tuple[int, int], tuple[Tensor, Tensor]]

    @classmethod
    def take(cls, workspace: Workspace, decoder: Decoder, num_rows: int) -> LayerBuffers:
        mixers = [layer.mixer for layer in decoder.spec.layers]
        found = (each for each in mixers if isinstance(each, AnyAttention))
        sizes = {(each.num_heads, each.head_dim): each.value_dim for each in found}

        def take(name: str, *shape: int) -> Tensor:
            return workspace.take(name, (num_rows, *shape), decoder.dtype)

        normed = take("normed", decoder.spec.hidden_size)
        heads = {
            size: (take("query", *size), take("attended", size[0], sizes[size]))
            for size in sorted(sizes, key=math.prod, reverse=True)  # smaller ones are views of the largest
        }
        return cls(normed, heads)


def take_gate_up(workspace: Workspace, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """A buffer [num_rows, num_columns] for the product of the gate and up projections before activation."""
    return workspace.take("gate_up", (num_rows, num_columns), dtype)


def take_partials(workspace: Workspace, num_partials: int, num_rows: int, num_columns: int) -> Tensor:
    """A buffer [num_partials, num_rows, num_columns] fp32 for the partial sums of a matrix product. The next
    product overwrites it."""
    return workspace.take("partials", (num_partials, num_rows, num_columns), torch.float32)
