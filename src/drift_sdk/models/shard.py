"""The division of a model between GPUs: which part of each weight a GPU has.

| weight | a GPU's part | its product |
|---|---|---|
| query, key, value, gate, up; their biases; sinks | its heads, its share of the MLP: rows | whole columns |
| attention output, down | the same columns, at borders of slices | partial sums of all columns |
| head | its share of the vocabulary: rows; all rows if GPUs do not divide the vocabulary | whole logits |
| embedding, norms, biases of output and down | all | |

Keys and values are those of a GPU's heads, and so are their scales. A GPU thus runs a smaller model
(`Shard.spec`), whose attention output and down products are added across GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from msgspec import Struct
from msgspec.structs import replace as replace_fields

from drift_sdk._kernels.gemm.slices import num_slices, shard_slices
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVForm, KVScaleSource
from drift_sdk.models.weights import check_tensors
from drift_sdk.spec.model import Attention, AttentionNames, LayerSpec, Mlp, MlpNames, ModelSpec

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "sinks")
"""Ends of the names of tensors of which a GPU has rows."""
COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of tensors of which a GPU has columns."""


class Shard(Struct, frozen=True, kw_only=True):
    """One of `size` parts of a model, that of GPU number `rank`."""

    rank: int
    size: int

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The description of the part."""
        return replace_fields(spec, layers=tuple(map(self._layer, spec.layers)))

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        if self.size == 1:
            return layer

        mixer, channel = layer.mixer, layer.channel
        assert isinstance(mixer, Attention) and isinstance(channel, Mlp)
        return replace_fields(
            layer,
            mixer=replace_fields(
                mixer,
                num_heads=mixer.num_heads // self.size,
                num_kv_heads=mixer.num_kv_heads // self.size,
            ),
            channel=replace_fields(channel, intermediate_size=channel.intermediate_size // self.size),
        )

    def part(self, number: int) -> slice:
        """The part of so many heads, rows or columns."""
        return slice(self.rank * number // self.size, (self.rank + 1) * number // self.size)

    def row_slices(self, num_columns: int, inner: int) -> int:
        """Slices of the product with a part [num_columns, inner] of a weight's rows: those of the weight."""
        return num_slices(num_columns * self.size, inner)

    def column_slices(self, num_columns: int, inner: int) -> int:
        """Slices of the product with a part [num_columns, inner] of a weight's columns."""
        return shard_slices(num_columns, inner * self.size, self.size)


def shard_obstacles(spec: ModelSpec, size: int) -> Iterator[str]:
    """Yield why a model cannot be divided between `size` GPUs, in words; nothing if it can."""
    if spec.recurrent_layers or spec.has_latents:
        yield "recurrent layers" if spec.recurrent_layers else "latent attention"
        return

    if spec.layer_inputs is not None or any(layer.has_factor for layer in spec.layers):
        yield "inputs or factors of layers"
    if len({(layer.kv, layer.channel) for layer in spec.layers}) > 1:
        yield "layers of different shapes"
    known = (AttentionNames(), AttentionNames(fused="qkv_proj")), (MlpNames(), MlpNames(fused="gate_up_proj"))
    if spec.names.attention not in known[0] or spec.names.mlp not in known[1]:
        yield "tensors of other names"
    yield from _layer_obstacles(spec.layers[0], spec.hidden_size, size)


def _layer_obstacles(layer: LayerSpec, hidden_size: int, size: int) -> Iterator[str]:
    mixer, channel = layer.mixer, layer.channel
    assert isinstance(mixer, Attention)
    if not isinstance(channel, Mlp):
        yield "a mixture of experts"
        return

    if mixer.has_gate:
        yield "gates of attention"
    if mixer.head_dim != mixer.value_dim:
        yield "keys and values of different sizes"
    for number, what in (
        (mixer.num_kv_heads, "KV heads"),
        (mixer.num_heads, "heads"),
        (channel.intermediate_size, "columns of the MLP"),
    ):
        if number % size:
            yield f"{number} {what}"
    for inner, what in (
        (mixer.output_size, "attention's output"),
        (channel.intermediate_size, "the MLP's down projection"),
    ):
        if not shard_slices(hidden_size, inner, size):
            yield f"{inner} columns of {what}, which are not {size} equal slices of a multiple of 64"


def load_shard(
    spec: ModelSpec,
    tensors: TensorSource,
    shard: Shard,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_form: KVForm | None = None,
    on_tensor: Callable[[int, int], None] | None = None,
    check_bytes: Callable[[int], None] | None = None,
) -> Decoder:
    """A decoder with a part of a model's layers, and all of its embedding and head: a draft may use them, so
    that the head is cut later, by `cut_head`.

    spec, tensors: of the whole model. The other arguments and errors are those of `Decoder.load`.
    """
    check_tensors(spec, tensors, kv_form)
    return Decoder.load(
        shard.spec(spec),
        ShardedTensors(tensors, spec, shard),
        device=device,
        dtype=dtype,
        kv_form=kv_form,
        on_tensor=on_tensor,
        check_bytes=check_bytes,
    )


def cut_head(decoder: Decoder, shard: Shard) -> None:
    """Leave a decoder its part of the head. A head that is the embedding, or whose rows GPUs do not divide,
    takes no memory more or less: of the first, the part is a view."""
    weights = decoder.weights
    head = weights.head
    assert isinstance(head, torch.Tensor)
    if head.shape[0] % shard.size == 0:
        part = head[shard.part(head.shape[0])]
        decoder.weights = replace(weights, head=part if head is weights.embedding else part.clone())


class ShardedTensors:
    """The TensorSource of a part of a model, which reads a source of the whole model."""

    def __init__(self, tensors: TensorSource, spec: ModelSpec, shard: Shard) -> None:
        """spec: of the whole model, to which `tensors` are known to belong."""
        self._tensors, self._shard = tensors, shard
        mixer, channel = spec.attention, spec.layers[0].channel
        assert isinstance(mixer, Attention) and isinstance(channel, Mlp)
        query, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        size = channel.intermediate_size
        self._fused = {"qkv_proj": (query, kv, kv), "gate_up_proj": (size, size)}

    @property
    def location(self) -> str:
        return self._tensors.location

    def names(self) -> Collection[str]:
        return self._tensors.names()

    def file(self, name: str) -> str:
        return self._tensors.file(name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape, dim = list(self._tensors.shape(name)), self._dimension(name)
        if dim is not None:
            shape[dim] //= self._shard.size
        return tuple(shape)

    def get(self, name: str) -> torch.Tensor:
        tensor, dim = self._tensors.get(name), self._dimension(name)
        if dim is None:
            return tensor

        sizes = list(self._fused.get(_matrix(name), (tensor.shape[dim],)))
        parts = []
        for whole in torch.split(tensor, sizes, dim):
            part = self._shard.part(whole.shape[dim])
            parts.append(whole.narrow(dim, part.start, part.stop - part.start))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def check_kv_scales(self, heads: Mapping[int, int]) -> None:
        if isinstance(self._tensors, KVScaleSource):
            self._tensors.check_kv_scales(self._whole(heads))

    def kv_scales(self, heads: Mapping[int, int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Scales of the part's heads, as in KVScaleSource."""
        if not isinstance(self._tensors, KVScaleSource):
            return {}

        found = self._tensors.kv_scales(self._whole(heads))
        parts = {layer: self._shard.part(len(keys)) for layer, (keys, _) in found.items()}
        return {layer: (keys[parts[layer]], values[parts[layer]]) for layer, (keys, values) in found.items()}

    def _whole(self, heads: Mapping[int, int]) -> dict[int, int]:
        """KV heads of the whole model's layers."""
        return {layer: number * self._shard.size for layer, number in heads.items()}

    def _dimension(self, name: str) -> int | None:
        """The dimension along which a tensor is cut; None if a GPU has all of it."""
        if name.endswith(COLUMNS):
            return 1

        return 0 if _matrix(name) in (*ROWS, *self._fused) else None


def _matrix(name: str) -> str:
    """The part of a tensor's name that tells its matrix: `q_proj` of its weight and of its bias."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
