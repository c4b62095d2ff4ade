"""New numbers for the weights of a decoder that is in use, in the memory that they have.

Weights that are numbers of the model's dtype are written tensor by tensor, also those that are fused with
others: each stored tensor has its own rows there. A layer whose weights are quantised, or in another order
than files have them, is loaded as at the start, whole, and copied to its place.

Whatever needs memory is done before the first number is written: layers are loaded one after the other and
wait in the host's memory, and the copies go through buffers that are there already. So an update that has
begun to write does not run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from msgspec import Struct, structs
from torch import Tensor

from drift_sdk.errors import ModelLoadError, RequestError, error_repr, is_out_of_memory
from drift_sdk.loading.safetensors import text_names
from drift_sdk.loading.tensors import STORED_DTYPES
from drift_sdk.models.allocation import Allocation, MatrixReader, fill_places
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.layer_inputs import allocate_inputs
from drift_sdk.models.weights import LayerWeights, allocate_layer, stored_layout, tensor_shapes
from drift_sdk.quantised.weight import QuantisedWeight
from drift_sdk.spec.model import Channel, ModelSpec, experts_of

Arrange = Callable[[Any, torch.dtype, Channel | None], Any]
"""Arranges the quantised matrices of a part for kernels. channel: of a layer."""

FIELD = "tensors"


class GivenTensors:
    """Tensors of a caller as a `TensorSource`."""

    location = "update_weights()"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def file(self, name: str) -> str:
        return self.location

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


class Part(Struct, frozen=True):
    """A layer, or what all layers share.

    label:    for errors.
    weights:  what is in use, a tree of dataclasses and tuples.
    allocate: makes the same anew.
    channel:  of a layer.
    """

    label: str
    weights: Any
    allocate: Callable[[Allocation], Any]
    channel: Channel | None = None


class Write(Struct, frozen=True):
    """The tensors of a part that are to be written. places: by name, where their numbers are; None: the part
    is loaded whole."""

    part: Part
    names: list[str]
    places: dict[str, Tensor] | None


@torch.inference_mode()
def update_weights(decoder: Decoder, tensors: Mapping[str, Tensor], arrange: Arrange | None = None) -> None:
    """Replace weights of a decoder by tensors with the names of its files, also of a model that reads images
    as well, whose other parts are left out.

    arrange: of the executor, if it arranges quantised matrices.

    All is checked, and all memory is allocated, before anything changes. RequestError if memory is short; for
    a tensor that is not part of the model, has another shape, is no dense tensor of floating-point numbers,
    cannot be read, or is not finite in the model's dtype; for a layer that can only be replaced whole if one
    of its tensors is missing; and for weights that files store quantised.
    """
    check_form(decoder)
    given_names: dict[str, str] = {}
    try:
        tensors = plain(tensors)
        given_names = text_names(tensors, FIELD, is_decoder=True)
        tensors = {name: tensors[given] for name, given in given_names.items()}
        writes = planned(decoder, tensors)
        check_finite(tensors, decoder.dtype)
    except ModelLoadError as error:  # of two names for one tensor
        raise RequestError(str(error), field=FIELD) from error
    except RequestError as error:
        given = given_names.get(error.value) if isinstance(error.value, str) else None
        if given in (None, error.value):
            raise

        message = str(error).replace(repr(error.value), repr(given), 1)
        raise RequestError(message, field=FIELD, value=given, allowed=error.allowed) from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise no_room(error) from error
    except Exception as error:  # a tensor without its storage, or of a class that runs code of the caller
        raise unreadable_tensors(error) from error

    try:
        copies = Copies(staged(decoder, writes, tensors, arrange))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise no_room(error) from error

    copies.run()


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without their classes. RequestError for what is no mapping of names to dense tensors of
    floating-point numbers."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise RequestError.of(FIELD, tensors, "a mapping of names to tensors, not empty")

    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RequestError.of(FIELD, {name: type(tensor).__name__}, "names, each with a tensor of torch")

        # The class of a distributed tensor wraps another one, with which it cannot be copied to a plain one.
        is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        if is_wrapper or tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
            found = f"of {type(tensor).__name__}, {tensor.layout} on the device {str(tensor.device)!r}"
            raise wrong(name, found, "a dense tensor that has its numbers")

        if tensor.dtype not in STORED_DTYPES:
            raise wrong(name, f"stored as {tensor.dtype}", "float32, bfloat16, float16 or float64")
    return {name: tensor.detach().as_subclass(Tensor) for name, tensor in tensors.items()}


def check_form(decoder: Decoder) -> None:
    """RequestError for weights that files store quantised."""
    has_experts = decoder.spec.experts is not None
    if has_experts and decoder.spec.names.experts.layout == "mxfp4":
        allowed = "a model whose experts are not stored in MXFP4"
        raise RequestError(f"{FIELD}: expected {allowed}", field=FIELD, allowed=allowed)

    is_quantised = any(isinstance(leaf, QuantisedWeight) for leaf in leaves(decoder.weights))
    if decoder.form == "stored" and is_quantised:
        allowed = 'an engine with another form than weights="stored": its files are quantised'
        raise RequestError(f"{FIELD}: expected {allowed}", field=FIELD, allowed=allowed)


def check_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """RequestError for the first tensor with NaN, infinity or numbers too large for the model's dtype."""
    for name, tensor in tensors.items():
        if tensor.numel() and not bool(torch.stack(torch.aminmax(tensor.to(dtype))).isfinite().all()):
            raise wrong(name, "not finite", f"finite numbers in {str(dtype).removeprefix('torch.')}")


def no_room(cause: Exception) -> RequestError:
    """The error for an update that there is too little memory for."""
    allowed = f"fewer at a time, or more free memory: nothing has changed ({error_repr(cause)})"
    return RequestError(f"{FIELD}: expected {allowed}", field=FIELD, allowed=allowed)


def unreadable_tensors(cause: Exception) -> RequestError:
    """The error for a mapping or a tensor whose own methods raise."""
    allowed = f"a mapping of names to tensors, all of which can be read ({error_repr(cause)})"
    return RequestError(f"{FIELD}: expected {allowed}", field=FIELD, allowed=allowed)


def wrong(name: str, found: str, allowed: str) -> RequestError:
    """The error for a tensor."""
    message = f"{FIELD}[{name!r}]: {found}: expected {allowed}"
    return RequestError(message, field=FIELD, value=name, allowed=allowed)


def planned(decoder: Decoder, tensors: Mapping[str, Tensor]) -> list[Write]:
    """What is written for the tensors, part by part. RequestError if they do not fit the model."""
    spec, weights = spec_of(decoder, tensors), decoder.weights
    names, hidden = spec.names, spec.hidden_size

    def root(allocation: Allocation) -> tuple[Any, ...]:
        embedding = allocation.matrix(names.embedding, spec.vocab_size, hidden, is_projection=False)
        head = None
        if not spec.is_head_tied:
            head = allocation.matrix(names.head, spec.vocab_size, hidden, is_projection=False)
        norm = allocation.tensor(names.final_norm, hidden)
        return embedding, norm, head

    head = None if spec.is_head_tied else weights.head
    parts = [
        Part("the model", (weights.embedding, weights.final_norm, head), root),
        Part("the inputs of layers", weights.layer_inputs, partial(allocate_inputs, spec)),
    ]
    for index, (layer, own) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        prefix = names.layer.format(index)

        def allocate(allocation: Allocation, layer: Any = layer, prefix: str = prefix) -> LayerWeights:
            return allocate_layer(layer, names, prefix, hidden, allocation, spec.layer_inputs)

        parts.append(Part(f"layer {index}", own, allocate, layer.channel))

    left = {name for name in tensors if not is_ignored(spec, name)}
    if spec.is_head_tied and names.head in left:
        check_tied(spec, tensors)
        left.remove(names.head)
    writes = []
    for part in parts:
        write = written(part, tensors, decoder.dtype)
        if write.names:
            writes.append(write)
            left -= set(write.names)
    if left:
        raise unknown(min(left), spec)

    return writes


def unknown(name: str, spec: ModelSpec) -> RequestError:
    """The error for a name that the model does not have, with one that ends alike, if there is one."""
    names = tensor_shapes(spec)
    alike = [own for own in names if f".{name}".endswith(f".{own}") or own.endswith(f".{name}")]
    return wrong(
        name, "no tensor of this model", f"names such as {alike[0] if alike else spec.names.final_norm!r}"
    )


def spec_of(decoder: Decoder, tensors: Mapping[str, Tensor]) -> ModelSpec:
    """The spec with the layout of experts that the tensors have, and the head that the decoder has."""
    spec = structs.replace(decoder.spec, is_head_tied=decoder.weights.head is decoder.weights.embedding)
    source = GivenTensors(tensors)
    for index, layer in enumerate(spec.layers):
        experts, prefix = experts_of(layer.channel), spec.names.layer.format(index)
        if experts is not None and any(name.startswith(f"{prefix}.") for name in tensors):
            names = stored_layout(spec.names.experts, experts, prefix, spec.hidden_size, source)
            return structs.replace(spec, names=structs.replace(spec.names, experts=names))

    return spec


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor has no effect on the model when it is loaded from files either."""
    return name.endswith("rotary_emb.inv_freq") or name.startswith(spec.names.unread)


def check_tied(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """RequestError for a head that is not the embedding, of a model where both are one matrix."""
    head, embedding = (tensors.get(name) for name in (spec.names.head, spec.names.embedding))
    if embedding is None or head is None or not torch.equal(head, embedding.to(head)):
        raise wrong(
            spec.names.head, "another matrix than the embedding", f"{spec.names.embedding}, which it is"
        )


def written(part: Part, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Write:
    """What is written to a part. RequestError for a tensor of another shape, and for one that is missing
    where a part is loaded whole."""
    allocation = Allocation(torch.device("meta"), dtype)
    shaped = part.allocate(allocation)
    names = [name for name in allocation.places if name in tensors]
    for name in names:
        found, expected = list(tensors[name].shape), list(allocation.places[name].shape)
        if found != expected:
            raise wrong(name, f"shape {found}", f"shape {expected}")

    places = None if allocation.has_reordered else places_in(part.weights, shaped, allocation.places)
    if places is not None:
        return Write(part, names, {name: places[name] for name in names})

    missing = [name for name in allocation.places if name not in tensors]
    if names and missing:
        reason = f"the other tensors of {part.label} beside it, as its weights are quantised or rearranged"
        raise wrong(missing[0], "missing", reason)

    return Write(part, names, None)


def places_in(weights: Any, shaped: Any, places: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The places of stored tensors in weights that are in use; None if these are not only tensors of the same
    layout. shaped: the same weights on the "meta" device, in which `places` lie."""
    own, others = list(leaves(weights)), list(leaves(shaped))
    if len(own) != len(others):
        return None

    found: dict[int, tuple[Tensor, int]] = {}
    for tensor, other in zip(own, others, strict=True):
        if not (isinstance(tensor, Tensor) and isinstance(other, Tensor)):
            return None

        if tensor.shape != other.shape or tensor.stride() != other.stride():
            return None

        found[memory_of(other)] = tensor, int(tensor.storage_offset() - other.storage_offset())
    views: dict[str, Tensor] = {}
    for name, place in places.items():
        tensor, offset = found[memory_of(place)]
        views[name] = tensor.as_strided(place.shape, place.stride(), place.storage_offset() + offset)
    return views


def memory_of(tensor: Tensor) -> int:
    """What is equal for a tensor and its views alone."""
    return int(tensor.untyped_storage()._cdata)


def loaded(decoder: Decoder, part: Part, source: GivenTensors, arrange: Arrange | None) -> Any:
    """The weights of a part, loaded as at the start. RequestError for numbers that are not finite when they
    are quantised."""
    reader = MatrixReader(
        source, decoder.form, device=decoder.device, dtype=decoder.dtype, on_read=lambda: None
    )
    allocation = Allocation(decoder.device, decoder.dtype, reader.read)
    weights = part.allocate(allocation)
    for _ in fill_places(allocation.places, source):
        pass
    allocation.finish()
    try:
        reader.finite.finish()
    except ModelLoadError as error:
        allowed = "numbers that are finite when they are quantised"
        raise RequestError(f"{FIELD}: {error}", field=FIELD, allowed=allowed) from error

    return weights if arrange is None else arrange(weights, decoder.dtype, part.channel)


Pair = tuple[Tensor, Tensor]
"""A tensor in use, and its new numbers."""


def staged(
    decoder: Decoder, writes: list[Write], tensors: Mapping[str, Tensor], arrange: Arrange | None
) -> list[Pair]:
    """All that is to be copied. Layers that are loaded whole are in the host's memory."""
    source, pairs = GivenTensors(tensors), []
    for write in writes:
        if write.places is not None:
            pairs += [(place, tensors[name]) for name, place in write.places.items()]
            continue

        weights = loaded(decoder, write.part, source, arrange)
        targets, sources = all_tensors(write.part.weights), all_tensors(weights)
        if len(targets) != len(sources):
            raise other_layout(write, is_each=len(targets) > len(sources))

        pairs += [(target, each.cpu()) for target, each in zip(targets, sources, strict=True)]
    return pairs


def other_layout(write: Write, *, is_each: bool) -> RequestError:
    """The error for experts in one tensor where those in use are quantised one by one, and the other way
    round. is_each: the ones in use have a tensor for each matrix of an expert."""
    name = next(name for name in write.names if ".experts." in name)
    forms = ("one tensor for all experts", "a tensor for each matrix of an expert")
    return wrong(name, forms[not is_each], f"{forms[is_each]}, as in the model's files")


def all_tensors(weights: Any) -> list[Tensor]:
    """All tensors of a tree of weights, in order."""
    return [tensor for leaf in leaves(weights) for tensor in tensors_in(leaf)]


def tensors_in(leaf: Tensor | QuantisedWeight) -> tuple[Tensor, ...]:
    return (leaf,) if isinstance(leaf, Tensor) else leaf.tensors()


class Copies:
    """Copies to the weights in use, for which memory is there.

    A copy on one device takes none, whatever dtypes and layouts. One between devices is of contiguous numbers
    of one dtype, so it goes through a buffer on a device where a tensor has another form: one a device, as
    large as the largest of these tensors.
    """

    def __init__(self, pairs: list[Pair]) -> None:
        self._pairs = pairs
        sizes: dict[torch.device, int] = {}
        for target, source in pairs:
            for device in self._buffered(target, source):
                sizes[device] = max(sizes.get(device, 0), target.numel() * target.element_size())
        self._buffers = {
            device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()
        }

    def run(self) -> None:
        for target, source in self._pairs:
            buffered = self._buffered(target, source)
            if source.device in buffered:
                source = self._buffer(source.device, target).copy_(source)
            if target.device in buffered:
                source = self._buffer(target.device, target).copy_(source)
            target.copy_(source)

    def _buffered(self, target: Tensor, source: Tensor) -> list[torch.device]:
        """The devices on which a copy needs a buffer."""
        if not is_between_devices(target, source):
            return []

        is_plain = source.dtype == target.dtype and source.is_contiguous()
        found = [] if is_plain else [source.device]
        return found if target.is_contiguous() else [*found, target.device]

    def _buffer(self, device: torch.device, like: Tensor) -> Tensor:
        num_bytes = like.numel() * like.element_size()
        return self._buffers[device][:num_bytes].view(like.dtype).view(like.shape)


def is_between_devices(target: Tensor, source: Tensor) -> bool:
    return target.device != source.device


def leaves(weights: Any) -> Iterator[Tensor | QuantisedWeight]:
    """The tensors and quantised matrices of a tree of dataclasses and tuples, in order."""
    if isinstance(weights, Tensor | QuantisedWeight):
        yield weights
    elif isinstance(weights, tuple):
        for each in weights:
            yield from leaves(each)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from leaves(getattr(weights, field.name))
