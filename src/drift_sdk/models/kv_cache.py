"""What sequences keep between steps, in plain torch: the KV cache, and the states of recurrent layers.

The KV cache has keys and values of tokens, in blocks. Numbers are of the model's dtype, e4m3, or NVFP4. In
NVFP4, a head of a token is a row of bytes: its codes, two in a byte, then the e4m3 scales of its groups of
16 dimensions.

States belong to sequences that advance, are rewound, and start from checkpoints. Positions are cut at
multiples of BORDER. A sequence has the state at a border, and of the rows since then what each adds to the
state. So rows that were rejected are dropped, and the state does not depend on how it came about: neither
on the division of a prompt, nor on drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk.loading.tensors import TensorSource
from drift_sdk.quantised.formats import E4M3, NVFP4_GROUP, nvfp4_numbers, quantise_e4m3, quantise_groups
from drift_sdk.spec.model import BORDER, GatedDelta, KVShape, ModelSpec

KVForm = Literal["fp8", "nvfp4"]


def stored_shape(head_dim: int, dtype: torch.dtype, form: KVForm | None) -> tuple[torch.dtype, int]:
    """The dtype of what is stored, and the number of elements of a head. form: None: numbers of `dtype`."""
    if form == "nvfp4":
        return torch.uint8, head_dim // 2 + -(-head_dim // NVFP4_GROUP)

    return dtype if form is None else E4M3, head_dim


def bytes_of_head(head_dim: int, dtype: torch.dtype, form: KVForm | None) -> int:
    """Bytes of a head of a token's keys, or of its values."""
    stored, size = stored_shape(head_dim, dtype, form)
    return stored.itemsize * size


def encode(x: Tensor, scale: Tensor, form: KVForm) -> Tensor:
    """Return the stored form of numbers [..., head_dim], as uint8. scale: float32, of a shape that
    broadcasts."""
    if form == "fp8":
        return quantise_e4m3(x, scale).view(torch.uint8)

    codes, scales = quantise_groups(x, scale)
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1)


def decode(stored: Tensor, scale: Tensor, form: KVForm, head_dim: int) -> Tensor:
    """Return the numbers [..., head_dim] of their stored form, as float32."""
    if form == "fp8":
        return stored.to(torch.float32) * scale

    codes, scales = stored.split((head_dim // 2, stored.shape[-1] - head_dim // 2), dim=-1)
    return nvfp4_numbers(codes, scales.contiguous().view(E4M3).to(torch.float32) * scale)


@runtime_checkable
class KVScaleSource(TensorSource, Protocol):
    """A TensorSource whose files may have scales of the KV cache.

    heads: KV heads of the layers that keep keys and values, by index. Both methods raise ModelLoadError
    naming file and tensor.
    """

    def check_kv_scales(self, heads: Mapping[int, int]) -> None:
        """Find out from headers whether `kv_scales` can read the scales."""

    def kv_scales(self, heads: Mapping[int, int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Scales of keys and of values of each layer, float32 [num_kv_heads] on the CPU; empty without."""


NVFP4_SCALE = 0.25
"""The static scale of a KV cache in NVFP4. Numbers up to 672 are stored, and groups whose largest number is
at least 0.024 have scales with all bits of e4m3."""


class KVScales(Struct, frozen=True):
    """Scales of keys and of values, float32 [num_layers, num_kv_heads] each. A layer with fewer KV heads than
    another one has the first of its row.

    form: "fp8": a number x is stored as the e4m3 number next to x / scale. "nvfp4": as a group of
    `quantise_groups`, with the scale as its global scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    form: KVForm = "fp8"


def load_kv_scales(tensors: TensorSource, form: KVForm, spec: ModelSpec, device: torch.device) -> KVScales:
    """The scales of a source for e4m3, 1 where its files have none and in layers without keys and values;
    fixed ones for NVFP4, whose groups have scales of their own. Raises ModelLoadError as KVScaleSource
    does."""
    heads = kv_heads(spec)
    ones = torch.ones(spec.num_layers, max(heads.values()), dtype=torch.float32, device=device)
    if form == "nvfp4":
        fixed = ones * NVFP4_SCALE
        return KVScales(fixed, fixed, form)

    keys, values = ones, ones.clone()
    found = tensors.kv_scales(heads) if isinstance(tensors, KVScaleSource) else {}
    for layer, scales in found.items():
        for row, own in zip((keys[layer], values[layer]), scales, strict=True):
            row[: len(own)] = own
    return KVScales(keys, values)


def kv_heads(spec: ModelSpec) -> dict[int, int]:
    """KV heads of the layers that keep keys and values, by index."""
    return {index: each.kv.num_kv_heads for index, each in enumerate(spec.layers) if each.kv is not None}


class KVCache:
    """Keys and values of all layers. In each layer, KV slot `block_id * block_size + offset` holds one
    token's.

    dtype: of the keys and values that are stored and read.
    tensors: keys, then values, of the layers of each shape and number of blocks: [layers, blocks *
    block_size, num_kv_heads, head_dim or value_dim], not initialised: a slot must be written before it is
    read. Of latents, there are no values. They are of `dtype`, or with scales e4m3: what is read was rounded
    then. In NVFP4 they are uint8, and the last dimension has the bytes of a head.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape | None],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: KVScales | None = None,
        *,
        num_blocks_of: Mapping[int, int] = {},
    ) -> None:
        """shapes: of each layer; None: it keeps none. num_blocks_of: of layers that have another number of
        blocks than `num_blocks`."""
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self._scales = scales
        self._shapes = {index: shape for index, shape in enumerate(shapes) if shape is not None}
        form = None if scales is None else scales.form
        self.tensors: list[torch.Tensor] = []
        by_layer: dict[int, list[torch.Tensor]] = {index: [] for index in self._shapes}
        groups: dict[tuple[KVShape, int], list[int]] = {}
        for index, shape in self._shapes.items():
            groups.setdefault((shape, num_blocks_of.get(index, num_blocks)), []).append(index)
        for (shape, number), layers in groups.items():
            for size in shape.stored_dims:
                stored, length = stored_shape(size, dtype, form)
                sizes = len(layers), number * block_size, shape.num_kv_heads, length
                self.tensors.append(torch.empty(sizes, dtype=stored, device=device))
                for index, tensor in zip(layers, self.tensors[-1].unbind(0), strict=True):
                    by_layer[index].append(tensor)
        self._layers = {index: tuple(tensors) for index, tensors in by_layer.items()}

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of one layer as stored, [num_blocks * block_size, num_kv_heads, dim] each; of
        latents, keys alone."""
        return self._layers[index]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [N, num_kv_heads, dim] of one layer to slots [N] int64. Of latents, values
        are the beginnings of keys, and not written again."""
        given = (key,) if self._shapes[layer].is_latent else (key, value)
        pairs = zip(self._layers[layer], given, strict=True)
        if self._scales is None:
            for cache, x in pairs:
                cache.index_copy_(0, slots, x)
            return

        for (cache, x), scale in zip(pairs, self._scales_of(layer, self._scales), strict=False):
            cache.view(torch.uint8).index_copy_(0, slots, encode(x, scale, self._scales.form))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, num_kv_heads, dim] of one layer in slots [N] int64, in `dtype`."""
        shape = self._shapes[layer]
        found = [cache.index_select(0, slots) for cache in self._layers[layer]]
        if self._scales is not None:
            scales, form = self._scales_of(layer, self._scales), self._scales.form
            parts = zip(found, scales, shape.stored_dims, strict=False)
            found = [decode(codes, scale, form, size).to(self.dtype) for codes, scale, size in parts]
        return found[0], found[0][..., : shape.value_dim] if shape.is_latent else found[1]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots [N] int64 to others in all layers, which have the same blocks, as they are. All are read
        before any is written."""
        for cache in self.tensors:
            bits = cache.view(torch.uint8)
            bits.index_copy_(1, targets, bits.index_select(1, sources))

    def _scales_of(self, layer: int, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of a layer's keys and values, [num_kv_heads, 1] each."""
        number = self._shapes[layer].num_kv_heads
        return scales.keys[layer, :number, None], scales.values[layer, :number, None]


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
