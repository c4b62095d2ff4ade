"""What forward passes keep from step to step: KV caches of target and draft, and recurrent states.

KV caches have blocks, in the layout that the kernels read, and rotation tables; a draft also keeps features
and outputs. Recurrent states are those of slots, and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.recurrent.gated_delta import LayerStates, state_shape
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.layers import half_tables
from drift_sdk.models.mixers.attention import query_factors
from drift_sdk.spec.model import (
    AnyAttention,
    Attention,
    GatedDelta,
    KVShape,
    ModelSpec,
    QueryScaling,
    num_input_rows,
    num_ring_rows,
)
from drift_sdk.spec.rope import Rope
from drift_sdk.steps import ExecutorLimits, PrefillChunk


class KVTensors(NamedTuple):
    """Keys and values of the layers of a shape: [layers, num_blocks, num_kv_heads, block_size, dim] each. Of
    latents, both are the same tensor."""

    keys: Tensor
    values: Tensor


class Rotation(NamedTuple):
    """Tables by position, [max_model_len + 1, ...] in the model's dtype, as the eager model computes them.

    cos, sin [..., rotary_dim / 2]: None without rotation. query_factors: None: queries are not scaled.
    """

    cos: Tensor | None
    sin: Tensor | None
    query_factors: Tensor | None


class PagedKVCache:
    """Keys and values of all sequences.

    groups: the tensors of each shape, of the decoder's `kv_dtype`, uninitialised; of layers with windows
    apart, if these have blocks of their own. They have a single block until `allocate` is called, which is
    enough for steps whose rows are all padding. Behind these blocks there are more, for nodes of trees.
    first_tree_slot: the first cache slot behind the blocks.
    """

    groups: list[KVTensors]

    def __init__(self, decoder: Decoder, limits: ExecutorLimits, num_tree_rows: int = 0) -> None:
        """num_tree_rows: most rows of trees in a step."""
        self._decoder, self.block_size = decoder, limits.block_size
        self._num_tree_blocks = -(-num_tree_rows // limits.block_size)
        self._positions = torch.arange(limits.max_model_len + 1, dtype=torch.float32, device=decoder.device)
        self._rotations: dict[tuple[Rope | None, QueryScaling | None], Rotation] = {}
        windows = decoder.spec.window_layers if limits.num_window_blocks else ()
        self._layers: dict[tuple[KVShape, bool], list[int]] = {}  # by shape, and whether in `windows`
        for shape, layers in decoder.spec.kv_groups.items():
            for layer in layers:
                self._layers.setdefault((shape, layer in windows), []).append(layer)
        self._places = {
            layer: (group, place)
            for group, layers in enumerate(self._layers.values())
            for place, layer in enumerate(layers)
        }
        self.allocate(1, 1)

    def allocate(self, num_blocks: int, num_window_blocks: int = 0) -> None:
        """Replace keys and values. Graphs that were captured before still use the old ones.
        num_window_blocks: of layers with windows, if these have blocks of their own."""
        self.groups = []  # the old ones are freed before the new ones are allocated
        self.first_tree_slot = num_blocks * self.block_size
        for (shape, is_window), layers in self._layers.items():
            number = num_window_blocks if is_window else num_blocks + self._num_tree_blocks
            self.groups.append(self._tensors(shape, len(layers), number))

    def _tensors(self, shape: KVShape, num_layers: int, num_blocks: int) -> KVTensors:
        decoder = self._decoder

        def empty(size: int) -> Tensor:
            sizes = num_layers, num_blocks, shape.num_kv_heads, self.block_size, size
            return torch.empty(sizes, dtype=decoder.kv_dtype, device=decoder.device)

        keys = empty(shape.head_dim)
        return KVTensors(keys, keys if shape.is_latent else empty(shape.value_dim))

    def layer(self, index: int) -> LayerKV:
        """Keys and values of a layer."""
        group, place = self._places[index]
        keys, values = (tensor[place] for tensor in self.groups[group])
        shape, scales = self._decoder.spec.layers[index].kv, self._decoder.weights.kv_scales
        if shape is not None and shape.is_latent:
            scale = None if scales is None else scales.keys[index]
            return LayerKV(keys, keys, scale, scale, latent_dim=shape.value_dim)

        if scales is None:
            return LayerKV(keys, values)

        number = keys.shape[1]
        return LayerKV(keys, values, scales.keys[index, :number], scales.values[index, :number])

    def rotation(self, spec: AnyAttention) -> Rotation:
        """The tables of a layer. Layers with the same rotation share them."""
        key = spec.rope, spec.query_scaling if isinstance(spec, Attention) else None
        if key not in self._rotations:
            self._rotations[key] = self._rotation(*key)
        return self._rotations[key]

    def _rotation(self, rope: Rope | None, scaling: QueryScaling | None) -> Rotation:
        dtype = self._decoder.dtype
        cos, sin = (None, None) if rope is None else half_tables(rope, self._positions, dtype)
        factors = None if scaling is None else query_factors(scaling, self._positions, dtype)
        return Rotation(cos, sin, factors)


class DraftKVCache:
    """The draft's state on the device.

    Draft row i is computed from the feature of position i and token i + 1. Its keys and values lie at the
    place of token i + 1 in its slot's blocks, so place 0 of a slot is unused.

    keys, values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim], uninitialised. Of
    latents, both are the same tensor. They and `block_features` have a single block until `allocate` is
    called. Behind the blocks of keys and values there are more, for nodes of trees while these grow.
    first_tree_slot: the first cache slot behind the blocks.
    cos, sin: [max_model_len + 2, rotary_dim / 2] by place, so each holds the rotation of the position before;
    the entry of place 0 is never used.
    block_features: [num_blocks, hidden], the feature of each block's last token.
    outputs: [num_slots, hidden], the output of each slot's newest row.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self, draft: DraftDecoder, limits: ExecutorLimits, num_slots: int, num_tree_rows: int = 0
    ) -> None:
        """num_tree_rows: most rows that are computed while trees grow."""
        config, dtype, device = draft.config, draft.dtype, draft.device
        self._draft = draft
        self._num_tree_blocks = -(-num_tree_rows // limits.block_size)
        self.num_places = limits.max_model_len + 2
        self.block_size = limits.block_size
        self.outputs = torch.empty(num_slots, config.hidden_size, dtype=dtype, device=device)
        positions = torch.arange(self.num_places, dtype=torch.float32, device=device) - DRAFT_KV_OFFSET
        rope = config.attention.rope
        assert rope is not None
        self.cos, self.sin = half_tables(rope, positions, dtype)
        self.allocate(1)

    def allocate(self, num_blocks: int) -> None:
        """Replace keys, values and block features. Graphs captured before still use the old ones."""
        config, dtype, device = self._draft.config, self._draft.dtype, self._draft.device
        num_all = num_blocks + self._num_tree_blocks
        kv = config.attention.kv
        shape = (config.num_layers, num_all, kv.num_kv_heads, self.block_size, kv.head_dim)
        # The old ones are freed before the new ones are allocated.
        self.keys = self.values = torch.empty(0, dtype=dtype)
        self.first_tree_slot = num_blocks * self.block_size
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = self.keys if kv.is_latent else torch.empty(shape, dtype=dtype, device=device)
        self.block_features = torch.empty(num_blocks, config.hidden_size, dtype=dtype, device=device)

    def layer(self, index: int) -> LayerKV:
        """Keys and values of a layer."""
        keys, values, kv = self.keys[index], self.values[index], self._draft.config.attention.kv
        return LayerKV(keys, values, latent_dim=kv.value_dim if kv.is_latent else 0)


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


class ModelResources(Struct, frozen=True, kw_only=True):
    """The target model of a graph executor.

    decoder: configuration and weights.
    cache:   keys and values of all sequences.
    tuned:   launch configurations of the matrix products.
    limits:  most sequences, tokens and blocks.
    states:  of recurrent layers; None: the model has none.
    exchange: with the other GPUs of a tensor-parallel model; None: the decoder is the whole model.
    window_table: [S, max_blocks] int32, the block table of layers with windows; None: they have no blocks of
             their own.
    """

    decoder: Decoder
    cache: PagedKVCache
    tuned: TunedTable
    limits: ExecutorLimits
    states: RecurrentStates | None = None
    exchange: Exchange | None = None
    window_table: Tensor | None = None
