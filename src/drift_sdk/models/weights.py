"""A decoder's weights: their layout in memory, and loading them from named tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.stored_formats import ScaleCheck
from drift_sdk.loading.tensors import CheckedSource, TensorSource
from drift_sdk.models.allocation import Allocation, ReadMatrix
from drift_sdk.models.channels.experts import ExpertWeights, allocate_experts
from drift_sdk.models.channels.mlp import MlpWeights, allocate_mlp
from drift_sdk.models.filling import fill_places
from drift_sdk.models.kv_numbers import KVForm
from drift_sdk.models.kv_scales import KVScales, KVScaleSource, load_kv_scales
from drift_sdk.models.matrix_reader import PAIRED, QUANTISERS, MatrixReader, WeightForm, quantised_bytes
from drift_sdk.models.mixers.attention import AttentionWeights, allocate_attention
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights, allocate_gated_delta
from drift_sdk.models.spare_tensors import later_layers, zero_biases
from drift_sdk.models.stored_layout import with_stored_layout
from drift_sdk.models.tied_head import with_stored_head
from drift_sdk.models.weight_memory import memory_named
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import Experts, GatedDelta, LayerSpec, ModelSpec, Names

__all__ = [
    "DecoderWeights",
    "LayerWeights",
    "allocate_layer",
    "check_tensors",
    "load_weights",
    "meta_weights",
    "odd_columns",
    "others",
    "projection_names",
    "tensor_shapes",
    "weight_bytes",
]

QUANTISED_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""The last part of the names of tensors that quantised weights have in place of "weight", or beside it."""


MixerWeights = AttentionWeights | GatedDeltaWeights
"""The weights of a mixer. `matrices` are those that rows are multiplied by."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms [hidden]: of the inputs of mixer and channel, and of their outputs."""

    mixer_norm: torch.Tensor
    mixer: MixerWeights
    channel_norm: torch.Tensor
    channel: MlpWeights | ExpertWeights
    mixer_post_norm: torch.Tensor | None = None
    channel_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. embedding and head: [vocab, hidden], one matrix if tied; they may be quantised.
    final_norm: [hidden]. kv_scales: of a KV cache of e4m3 or NVFP4; None: it is of the model's dtype."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix
    kv_scales: KVScales | None = None


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors that a model of these shapes is stored as."""
    places = _allocate(spec, torch.device("meta"), torch.float32)[1].places
    return {name: tuple(place.shape) for name, place in places.items()}


def weight_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    form: WeightForm = "expanded",
    tensors: TensorSource | None = None,
) -> int:
    """Bytes of the weights of a model of these shapes in `dtype` and `form`, MXFP4 experts in their own; of
    weights that are stored quantised, the most that they may take.

    tensors: for the form "stored", the files; little more than their headers is read.
    """
    if tensors is not None:
        spec = with_stored_layout(spec, tensors)
    projections: dict[str, bool] = {}

    def note(name: str, is_projection: bool) -> None:
        projections[name] = is_projection

    places = _allocate(spec, torch.device("meta"), dtype, note)[1].places
    sizes = {name: place.nbytes for name, place in places.items()}
    for name, is_projection in projections.items():
        if form in QUANTISERS and is_projection:
            rows, columns = places[name].shape
            sizes[name] = quantised_bytes(rows, columns, form)
        elif form == "stored" and isinstance(tensors, QuantisedSource):
            num_bytes = tensors.quantised_bytes(name)
            sizes[name] = sizes[name] if num_bytes is None else num_bytes
    return sum(sizes.values())


def odd_columns(spec: ModelSpec, form: WeightForm) -> str:
    """The first matrix with a number of columns that its form cannot have, in words; "" if there is none."""
    if form not in PAIRED:
        return ""

    shapes = tensor_shapes(spec)
    for name in projection_names(spec):
        if shapes[name][1] % 2:
            return f"{name} has {shapes[name][1]} columns, an odd number"

    return ""


def projection_names(spec: ModelSpec) -> list[str]:
    """Names of the matrices of layers, which are quantised when they are read."""
    projections: list[str] = []

    def note(name: str, is_projection: bool) -> None:
        if is_projection:
            projections.append(name)

    _allocate(spec, torch.device("meta"), torch.float32, note)
    return projections


def load_weights(
    spec: ModelSpec,
    tensors: TensorSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm = "expanded",
    kv_form: KVForm | None = None,
    on_tensor: Callable[[int, int], None] | None = None,
    check_bytes: Callable[[int], None] | None = None,
) -> DecoderWeights:
    """Weights on `device`, in `dtype` or as `form` says.

    kv_form: of the KV cache; None: it is of `dtype`.
    on_tensor(num_loaded, num_tensors) is called after each tensor.
    check_bytes(num_bytes) is called before memory is allocated, with the amount, and may raise.

    Raises ModelLoadError naming tensor and file: before memory is allocated, for a tensor that is missing,
    unexpected or misshapen; if there is not enough memory; and for a tensor that is not finite in `dtype`.
    """
    check_tensors(spec, tensors, kv_form)
    spec = with_stored_layout(spec, tensors)
    if reason := odd_columns(spec, form):
        raise ModelLoadError(f'{tensors.location}: tensor {reason}: expected another form than "{form}"')

    if spec.experts is not None and spec.names.experts.layout == "mxfp4" and dtype == torch.float16:
        raise ModelLoadError(
            f"{tensors.location}: MXFP4 weights in float16: expected bfloat16 or float32, which hold all of "
            "their numbers"
        )

    check_room = check_bytes or _is_enough
    check_room(weight_bytes(spec, dtype, form, tensors))
    with memory_named(tensors.location, device, lambda: weight_bytes(spec, dtype, form, tensors)):
        stored = with_stored_head(spec, tensors)
        if stored != spec:
            spec = stored
            check_room(weight_bytes(spec, dtype, form, tensors))
        weights = _filled(spec, tensors, device, dtype, form, on_tensor)

    if kv_form is None:
        return weights

    kv_scales = load_kv_scales(tensors, kv_form, spec, device)
    return replace(weights, kv_scales=kv_scales)


def _filled(
    spec: ModelSpec,
    tensors: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    form: WeightForm,
    on_tensor: Callable[[int, int], None] | None,
) -> DecoderWeights:
    """Weights with all tensors read, and known to be finite."""
    num_tensors, num_loaded = len(tensor_shapes(spec)), 0

    def count() -> None:
        nonlocal num_loaded
        num_loaded += 1
        if on_tensor is not None:
            on_tensor(num_loaded, num_tensors)

    reader = MatrixReader(tensors, form, device=device, dtype=dtype, on_read=count)
    finite, scales = reader.finite, ScaleCheck(tensors)
    weights, allocation = _allocate(spec, device, dtype, reader.read)
    for name, place in fill_places(allocation.places, tensors):
        if place.dtype != torch.uint8:
            finite.add(name, place)
        elif name.endswith("_scales"):
            scales.add(name, place)
        count()

    finite.finish()
    scales.finish()
    allocation.finish()
    return weights


def _is_enough(num_bytes: int) -> None:
    """Any number of bytes is enough."""


def check_tensors(spec: ModelSpec, tensors: TensorSource, kv_form: KVForm | None = None) -> None:
    """Raise ModelLoadError for a tensor that is missing, unexpected or misshapen, and for all else that
    headers show to be wrong, also of scales of a KV cache in `kv_form`."""
    spec = with_stored_layout(spec, tensors)
    places = _allocate(spec, torch.device("meta"), torch.float32)[1].places
    names = set(tensors.names())
    missing = [name for name in places if name not in names]
    if missing:
        found = f"tensor {missing[0]} of shape {list(places[missing[0]].shape)} is missing{others(missing)}"
        raise ModelLoadError(f"{tensors.location}: {found}{_hint(spec, missing[0], names)}")

    # Old files contain the frequencies of the rotation, which are computed from the config.
    extra = sorted(name for name in names - places.keys() if not name.endswith("rotary_emb.inv_freq"))
    extra = [name for name in extra if not name.startswith(spec.names.unread)]
    head = spec.names.head
    if head in extra and spec.is_head_tied:
        extra.remove(head)
        places[head] = places[spec.names.embedding]

    spare = zero_biases(spec, tensors, places, extra) | later_layers(spec, tensors, extra)
    extra = [name for name in extra if name not in spare]
    if extra:
        found = f"tensor {extra[0]} of shape {list(tensors.shape(extra[0]))} is not part of this model"
        hint = _hint(spec, extra[0], names)
        raise ModelLoadError(f"{tensors.file(extra[0])}: {found}{others(extra)}{hint}")

    for name, place in places.items():
        shape, expected = tensors.shape(name), tuple(place.shape)
        if shape != expected:
            raise ModelLoadError(
                f"{tensors.file(name)}: tensor {name} has shape {list(shape)}, expected {list(expected)}"
            )

    if isinstance(tensors, CheckedSource):
        for name, place in places.items():
            tensors.check(name, place.dtype)
    if kv_form == "fp8" and isinstance(tensors, KVScaleSource):
        tensors.check_kv_scales(spec.attention_layers, spec.attention.num_kv_heads)


def _hint(spec: ModelSpec, name: str, names: Collection[str]) -> str:
    """The reason for a wrong name, as the end of a message, if tensors are those of a quantised weight."""
    prefix = name.rpartition(".")[0]
    found = [f"{prefix}.{part}" for part in QUANTISED_PARTS if f"{prefix}.{part}" in names]
    if not found or spec.quantisation is not None:
        return ""

    return f": {found[0]} is of a quantised weight, but config.json has no quantization_config"


def others(names: list[str]) -> str:
    """The number of names after the first, as the end of a message."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def meta_weights(spec: ModelSpec, dtype: torch.dtype) -> DecoderWeights:
    """Weights on torch's "meta" device: shapes and types without memory."""
    return _allocate(spec, torch.device("meta"), dtype)[0]


def _allocate(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, read: ReadMatrix | None = None
) -> tuple[DecoderWeights, Allocation]:
    """Weights that are not initialised, and their allocation.

    read: as in Allocation; None: all matrices are numbers of `dtype`.
    """
    allocation = Allocation(device, dtype) if read is None else Allocation(device, dtype, read)
    names, hidden = spec.names, spec.hidden_size
    embedding = allocation.matrix(names.embedding, spec.vocab_size, hidden, is_projection=False)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(
            allocate_layer(layer, names, names.layer.format(index), hidden, allocation)
            for index, layer in enumerate(spec.layers)
        ),
        final_norm=allocation.tensor(names.final_norm, hidden),
        head=embedding
        if spec.is_head_tied
        else allocation.matrix(names.head, spec.vocab_size, hidden, is_projection=False),
    )
    return weights, allocation


def allocate_layer(
    layer: LayerSpec, names: Names, prefix: str, hidden: int, allocation: Allocation
) -> LayerWeights:
    """prefix: of the layer's tensors."""

    def norm(name: str) -> torch.Tensor:
        return allocation.tensor(f"{prefix}.{name}.weight", hidden)

    def mixer() -> MixerWeights:
        if isinstance(layer.mixer, GatedDelta):
            return allocate_gated_delta(layer.mixer, names.gated_delta, prefix, hidden, allocation)

        return allocate_attention(layer.mixer, names.attention, prefix, hidden, allocation)

    def channel() -> MlpWeights | ExpertWeights:
        if isinstance(layer.channel, Experts):
            return allocate_experts(layer.channel, names.experts, prefix, hidden, allocation)

        return allocate_mlp(layer.channel, names.mlp, prefix, hidden, allocation)

    has_post_norms = layer.post_norm is not None
    return LayerWeights(
        mixer_norm=norm(names.mixer_norm),
        mixer=mixer(),
        channel_norm=norm(names.channel_norm),
        channel=channel(),
        mixer_post_norm=norm(names.mixer_post_norm) if has_post_norms else None,
        channel_post_norm=norm(names.channel_post_norm) if has_post_norms else None,
    )
