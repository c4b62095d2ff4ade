"""A decoder's weights: their layout in memory, and loading them from named tensors.

What only the files tell is read first: the form in which they store experts, a head that they store although
the config says that it is the embedding, and tensors that have no effect on the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from msgspec import structs
from msgspec.structs import replace as replace_fields

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.stored_formats import ScaleCheck
from drift_sdk.loading.tensors import CheckedSource, TensorSource
from drift_sdk.models.allocation import (
    PAIRED,
    QUANTISERS,
    Allocation,
    MatrixReader,
    ReadMatrix,
    WeightForm,
    fill_places,
    memory_named,
    quantised_bytes,
    read_tensor,
)
from drift_sdk.models.channels import (
    ExpertWeights,
    MlpWeights,
    ParallelWeights,
    allocate_experts,
    allocate_mlp,
    allocate_parallel,
)
from drift_sdk.models.kv_cache import KVForm, KVScales, KVScaleSource, kv_heads, load_kv_scales
from drift_sdk.models.layer_inputs import (
    InputWeights,
    LayerInputWeights,
    allocate_input,
    allocate_inputs,
)
from drift_sdk.models.mixers.attention import AttentionWeights, allocate_attention
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights, allocate_gated_delta
from drift_sdk.models.mixers.latent_attention import LatentWeights, allocate_latent
from drift_sdk.quantised.weight import Matrix, dequantised, take_rows
from drift_sdk.spec.model import (
    ExpertLayout,
    ExpertNames,
    Experts,
    GatedDelta,
    LatentAttention,
    LayerInputs,
    LayerSpec,
    ModelSpec,
    Names,
    ParallelExperts,
    experts_of,
)

LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,9})\.")

log = logging.getLogger("drift_sdk")


def zero_biases(
    spec: ModelSpec,
    tensors: TensorSource,
    places: Mapping[str, torch.Tensor],
    extra: Collection[str],
) -> set[str]:
    """The `extra` tensors that are biases of zeros, which older tools wrote beside all matrices of a GPTQ
    model.

    places: the model's own tensors, by name.
    """
    if spec.quantisation is None or "gptq" not in spec.quantisation.storages:
        return set()

    matrices = {name: places.get(name.removesuffix("bias") + "weight") for name in extra}
    return {
        name
        for name, matrix in matrices.items()
        if name.endswith(".bias")
        and matrix is not None
        and tensors.shape(name) == tuple(matrix.shape[:1])
        and not read_tensor(tensors, name).any()
    }


def later_layers(spec: ModelSpec, tensors: TensorSource, extra: Collection[str]) -> set[str]:
    """The `extra` tensors of layers after the config's last one: as in transformers, the config counts. A
    warning says so."""
    layers = {name: int(found[1]) for name in extra if (found := LAYER.match(name))}
    later = {name for name, layer in layers.items() if layer >= spec.num_layers}
    if later:
        log.warning(
            "%s: tensors of layer %d and later are left out: the config says num_hidden_layers=%d",
            tensors.location,
            min(layers[name] for name in later),
            spec.num_layers,
        )
    return later


def with_stored_layout(spec: ModelSpec, tensors: TensorSource) -> ModelSpec:
    """The spec, with the layout of experts that files have."""
    found = [(index, experts_of(layer.channel)) for index, layer in enumerate(spec.layers)]
    index, experts = next((each for each in found if each[1] is not None), (0, None))
    if experts is None or spec.names.experts.layout == "mxfp4":
        return spec

    layer = spec.names.layer.format(index)
    names = stored_layout(spec.names.experts, experts, layer, spec.hidden_size, tensors)
    return replace_fields(spec, names=replace_fields(spec.names, experts=names))


def stored_layout(
    names: ExpertNames, experts: Experts, layer: str, hidden: int, tensors: TensorSource
) -> ExpertNames:
    """The names, with the layout of experts that a layer has in files. Tools write one tensor for each matrix
    of an expert, or one for all experts, whichever a family's published files have.

    layer: prefix of the layer's tensors.
    """
    prefix, stored = f"{names.prefix(layer)}.{names.experts}", tensors.names()
    size, layout = experts.intermediate_size, names.layout
    shapes = {f"{prefix}.{names.gate_up}": (2 * size, hidden), f"{prefix}.{names.down}": (hidden, size)}
    stacked = next((name for name in shapes if name in stored), None)
    if stacked is not None:
        rows, columns = shapes[stacked]
        layouts: dict[tuple[int, ...], ExpertLayout] = {
            (experts.num_experts, rows, columns): "stacked",
            (experts.num_experts, columns, rows): "transposed",
        }
        if rows != columns or layout == "each":  # otherwise the family decides
            layout = layouts.get(tensors.shape(stacked), layout)
    elif any(map(re.compile(rf"{re.escape(prefix)}\.\d+\.").match, stored)):
        layout = "each"
    return replace_fields(names, layout=layout)


COMPARED_ROWS = 4096
"""Rows of both that are compared at a time."""


def with_stored_head(spec: ModelSpec, tensors: TensorSource) -> ModelSpec:
    """The spec, with a head that is not tied to the embedding if files store one that differs from it: the
    files count, as in transformers. A warning says so.

    tensors: known to be those of the spec. Embedding and head are read as they are stored.
    """
    head, embedding = spec.names.head, spec.names.embedding
    if not spec.is_head_tied or head not in tensors.names() or _are_same(spec, tensors):
        return spec

    log.warning(
        "%s: tensor %s differs from %s, so it is the head, although the config says tie_word_embeddings",
        tensors.file(head),
        head,
        embedding,
    )
    return structs.replace(spec, is_head_tied=False)


def _are_same(spec: ModelSpec, tensors: TensorSource) -> bool:
    head, embedding = (_stored_matrix(tensors, name) for name in (spec.names.head, spec.names.embedding))
    for index in torch.arange(spec.vocab_size, device="cpu").split(COMPARED_ROWS):
        parts = (dequantised(take_rows(matrix, index), torch.float32) for matrix in (head, embedding))
        if not torch.equal(*parts):
            return False

    return True


def _stored_matrix(tensors: TensorSource, name: str) -> Matrix:
    """A matrix on the CPU, quantised if files have it so."""
    weight = tensors.quantised(name, torch.device("cpu")) if isinstance(tensors, QuantisedSource) else None
    return read_tensor(tensors, name) if weight is None else weight


QUANTISED_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""The last part of the names of tensors that quantised weights have in place of "weight", or beside it."""


MixerWeights = AttentionWeights | LatentWeights | GatedDeltaWeights
"""The weights of a mixer. `matrices` are those that rows are multiplied by."""
ChannelWeights = MlpWeights | ExpertWeights | ParallelWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms [hidden]: of the inputs of mixer and channel, and of their outputs.
    input: of its part of `ModelSpec.layer_inputs`. factor: [1], of the stream."""

    mixer_norm: torch.Tensor
    mixer: MixerWeights
    channel_norm: torch.Tensor
    channel: ChannelWeights
    mixer_post_norm: torch.Tensor | None = None
    channel_post_norm: torch.Tensor | None = None
    input: InputWeights | None = None
    factor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. embedding and head: [vocab, hidden], one matrix if tied; they may be quantised.
    final_norm: [hidden]. kv_scales: of a KV cache of e4m3 or NVFP4; None: it is of the model's dtype."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix
    kv_scales: KVScales | None = None
    layer_inputs: LayerInputWeights | None = None


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
        tensors.check_kv_scales(kv_heads(spec))


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
            allocate_layer(layer, names, names.layer.format(index), hidden, allocation, spec.layer_inputs)
            for index, layer in enumerate(spec.layers)
        ),
        final_norm=allocation.tensor(names.final_norm, hidden),
        head=embedding
        if spec.is_head_tied
        else allocation.matrix(names.head, spec.vocab_size, hidden, is_projection=False),
        layer_inputs=allocate_inputs(spec, allocation),
    )
    return weights, allocation


def allocate_layer(
    layer: LayerSpec,
    names: Names,
    prefix: str,
    hidden: int,
    allocation: Allocation,
    inputs: LayerInputs | None = None,
) -> LayerWeights:
    """prefix: of the layer's tensors. inputs: of the model's layers."""

    def norm(name: str) -> torch.Tensor:
        return allocation.tensor(f"{prefix}.{name}.weight", hidden)

    def mixer() -> MixerWeights:
        if isinstance(layer.mixer, GatedDelta):
            return allocate_gated_delta(layer.mixer, names.gated_delta, prefix, hidden, allocation)

        if isinstance(layer.mixer, LatentAttention):
            return allocate_latent(layer.mixer, names.latent, prefix, hidden, allocation)

        return allocate_attention(layer.mixer, names.attention, prefix, hidden, allocation)

    def channel() -> ChannelWeights:
        if isinstance(layer.channel, ParallelExperts):
            return allocate_parallel(layer.channel, names, prefix, hidden, allocation)

        if isinstance(layer.channel, Experts):
            return allocate_experts(layer.channel, names.experts, prefix, hidden, allocation)

        return allocate_mlp(layer.channel, names.mlp, prefix, hidden, allocation)

    has_post_norms, own = layer.post_norm is not None, None
    if inputs is not None:
        own = allocate_input(inputs, names.layer_inputs, prefix, hidden, allocation)
    return LayerWeights(
        mixer_norm=norm(names.mixer_norm),
        mixer=mixer(),
        channel_norm=norm(names.channel_norm),
        channel=channel(),
        mixer_post_norm=norm(names.mixer_post_norm) if has_post_norms else None,
        channel_post_norm=norm(names.channel_post_norm) if has_post_norms else None,
        input=own,
        factor=allocation.tensor(f"{prefix}.{names.factor}", 1) if layer.has_factor else None,
    )
