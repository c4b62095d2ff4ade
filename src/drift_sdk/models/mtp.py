"""The layer of a model's own files that predicts one more token (MTP), as a draft head of the model.

The feature of a position is the target's output after its final norm. Feature and the embedding of the next
token are normalised, joined and projected; one layer like the target's follows, then a norm. Embedding and
head are the target's. For more tokens the layer is repeated, with its own output as the feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.random import RandomFp8Tensors, RandomTensors
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.allocation import (
    Allocation,
    MatrixReader,
    ReadMatrix,
    WeightForm,
    fill_places,
    memory_named,
)
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import DraftDecoder, DraftWeights, check_pairs
from drift_sdk.models.weights import DecoderWeights, allocate_layer, others, stored_layout
from drift_sdk.spec.model import Experts, ModelSpec


def has_mtp(spec: ModelSpec, tensors: TensorSource) -> bool:
    """Whether a model's files have the layer that its config describes."""
    return spec.mtp is not None and spec.names.mtp.joint in tensors.names()


def mtp_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of the layer that `spec.mtp` describes."""
    return {name: tuple(place.shape) for name, place in _meta_places(spec).items()}


@torch.inference_mode()
def load_mtp(
    target: Decoder,
    tensors: TensorSource,
    *,
    form: WeightForm = "expanded",
    check_bytes: Callable[[int], None] | None = None,
) -> DraftDecoder:
    """The draft head in a model's files, on the model's device and in its dtype, with its embedding and head.

    tensors: of the model, whose spec has a layer of this kind. form: of the head's own matrices; "stored": as
    the files have them, quantised or not.
    check_bytes(num_bytes) is called before memory is allocated, and may raise.

    Raises ModelLoadError naming tensor, file, found and expected shape for a tensor that is missing,
    unexpected, misshapen or not finite, of an odd number of columns for "int4", and if there is not enough
    memory.
    """
    spec = _with_stored_layout(target.spec, tensors)
    _check(spec, tensors, form)
    num_bytes = sum(place.numel() for place in _meta_places(spec).values()) * target.dtype.itemsize
    if check_bytes is not None:
        check_bytes(num_bytes)

    device, dtype = target.device, target.dtype
    with memory_named(tensors.location, device, lambda: num_bytes):
        reader = MatrixReader(tensors, form, device=device, dtype=dtype, on_read=lambda: None)
        allocation = Allocation(device, dtype, reader.read)
        weights = _allocate(spec, allocation, target.weights)
        for name, place in fill_places(allocation.places, tensors):
            reader.finite.add(name, place)
        reader.finite.finish()
        allocation.finish()
    return DraftDecoder(DraftConfig.of_mtp(spec), weights, target)


def random_mtp(target: Decoder, seed: int = 0, *, form: WeightForm = "expanded") -> DraftDecoder:
    """The draft head of a model with random weights, the same for the same seed. form: "stored" has the
    layer's matrices in FP8 with a scale for each block where that is how the config says that files have
    them."""
    spec = target.spec
    assert spec.mtp is not None
    options: dict[str, Any] = {
        "device": target.device,
        "dtype": target.dtype,
        "seed": seed,
        "norm_mean": 0.0 if spec.mtp.norm.kind == "offset" else 1.0,
    }
    blocks = () if spec.quantisation is None or form != "stored" else spec.quantisation.blocks
    if not blocks:
        return load_mtp(target, RandomTensors(mtp_shapes(spec), **options), form=form)

    if isinstance(spec.mtp.channel, Experts):  # an expert is quantised by itself
        names = spec.names
        spec = replace(spec, names=replace(names, experts=replace(names.experts, layout="each")))
    projections: list[str] = []

    def note(name: str, is_projection: bool) -> None:
        if is_projection:
            projections.append(name)

    _meta_places(spec, note)
    tensors = RandomFp8Tensors(mtp_shapes(spec), projections=projections, block=blocks[0], **options)
    return load_mtp(target, tensors, form=form)


def _allocate(spec: ModelSpec, allocation: Allocation, target: DecoderWeights | None) -> DraftWeights:
    """Weights that are not initialised; without a target, its own are left out."""
    assert spec.mtp is not None
    names, hidden = spec.names.mtp, spec.hidden_size
    unknown = allocation.empty(0)
    return DraftWeights(
        embedding=unknown if target is None else target.embedding,
        fc=None,
        input_norm=None,
        feature_norms=(),
        embedding_norm=allocation.tensor(names.embedding_norm, hidden),
        hidden_norm=allocation.tensor(names.hidden_norm, hidden),
        layers=(allocate_layer(spec.mtp, spec.names, names.layer, hidden, allocation),),
        final_norm=allocation.tensor(names.final_norm, hidden),
        head=unknown if target is None else target.head,
        target_ids=torch.arange(spec.vocab_size, device=unknown.device),
        joint=allocation.matrix(names.joint, hidden, 2 * hidden),
    )


def _meta_places(spec: ModelSpec, read: ReadMatrix | None = None) -> dict[str, torch.Tensor]:
    """The tensors of files, without memory. read: as in Allocation."""
    meta = torch.device("meta")
    allocation = Allocation(meta, torch.float32) if read is None else Allocation(meta, torch.float32, read)
    _allocate(spec, allocation, None)
    return allocation.places


def _with_stored_layout(spec: ModelSpec, tensors: TensorSource) -> ModelSpec:
    """The spec, with the layout that experts of the layer have in files: it may not be that of the others."""
    assert spec.mtp is not None
    channel, names = spec.mtp.channel, spec.names
    if not isinstance(channel, Experts):
        return spec

    experts = stored_layout(names.experts, channel, names.mtp.layer, spec.hidden_size, tensors)
    return replace(spec, names=replace(names, experts=experts))


def _check(spec: ModelSpec, tensors: TensorSource, form: WeightForm) -> None:
    """Raise ModelLoadError for a tensor that is missing, unexpected or misshapen, or cannot have the form."""
    projections: list[str] = []

    def note(name: str, is_projection: bool) -> None:
        projections.append(name)

    places, names = _meta_places(spec, note), set(tensors.names())
    missing = [name for name in places if name not in names]
    if missing:
        found = f"tensor {missing[0]} of shape {list(places[missing[0]].shape)} is missing"
        raise ModelLoadError(f"{tensors.location}: {found}{others(missing)}")

    own = spec.names.mtp
    copies = {own.embedding: spec.names.embedding, own.head: spec.names.head}
    unread = {name for name in names if name in copies or name.endswith("rotary_emb.inv_freq")}
    extra = sorted(name for name in names - places.keys() - unread if name.startswith(own.prefix))
    if extra and spec.quantisation is None:
        found = f"tensor {extra[0]} of shape {list(tensors.shape(extra[0]))} is not part of this draft"
        raise ModelLoadError(f"{tensors.file(extra[0])}: {found}{others(extra)}")

    for name, place in places.items():
        if (shape := tensors.shape(name)) != tuple(place.shape):
            found = f"tensor {name} has shape {list(shape)}, expected {list(place.shape)}"
            raise ModelLoadError(f"{tensors.file(name)}: {found}")

    expected = [spec.vocab_size, spec.hidden_size]
    for name in sorted(copies.keys() & names):
        if (copy := list(tensors.shape(name))) != expected:
            found = f"tensor {name} has shape {copy}, expected {expected}, as {copies[name]}"
            raise ModelLoadError(f"{tensors.file(name)}: {found}")

    for name in projections:
        check_pairs(tensors, name, form)
