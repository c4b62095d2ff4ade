"""Layers of the same kind: the launches of one are made again for the others, with their tensors.

Capturing the graphs of a model takes most of a start, and most of that goes to the Python code of the layers'
launches. Before a step is captured, a first run computes a few layers of each kind. If the launches of one
are those of another, with its own weights, keys and values in the places of the other's, so are those of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.launch_tape import Launch, LaunchTape, Pick, recorded_launches
from drift_sdk.execution.device.captured_kernels import CapturedKernel, GraphTail, capture_in_progress
from drift_sdk.execution.device.kernel_copies import AddressRange, KernelCopy, copies_of

__all__ = ["LayerTensors", "RepeatedLayers", "layout", "places", "tensors_of"]


class LayerTensors(NamedTuple):
    """The tensors of one layer, which other layers have others for.

    kind: equal for layers that launch the same kernels with the same sizes. tensors: weights, keys and
    values, in the same order, of the same layout (see `layout`) and in places of their own or not (see
    `places`) for layers of a kind.
    """

    kind: object
    tensors: list[Tensor]

    def with_tensors(self, others: list[Tensor]) -> LayerTensors:
        """The layer with further tensors."""
        return LayerTensors((self.kind, layout(others), places(others)), [*self.tensors, *others])


class RepeatedLayers:
    """The layers of a forward pass, whose launches are repeated where a first run has shown that they may be.

    A layer makes all its launches by `launch`.
    """

    def __init__(self) -> None:
        self._tapes: dict[object, _KindTape] = {}

    def run_first(
        self, layers: Sequence[LayerTensors], chosen: Sequence[int], compute: Callable[[int], None]
    ) -> None:
        """Compute the chosen layers, and compare their launches. compute(index): computes a layer."""
        self._tapes.clear()
        numbers = Counter(layers[index].kind for index in chosen)
        for index in chosen:
            kind, tensors = layers[index]
            if numbers[kind] == 1 or tensors[0].is_meta:  # no other layer, or no addresses, to compare
                compute(index)
                continue

            first = self._tapes.get(kind)
            if first is None:
                self._tapes[kind] = _KindTape.of(index, tensors, compute)
                continue

            with recorded_launches() as tape:
                compute(index)
            was_compared = first.is_compared
            first.compare(tape, tensors)
            if not (first.is_complete or was_compared):
                # It may have compiled kernels, or compared the library's with ours. It is computed again.
                self._tapes[kind] = _KindTape.of(first.index, layers[first.index].tensors, compute)
                self._tapes[kind].compare(tape, tensors)

    def run(self, layers: Sequence[LayerTensors], compute: Callable[[int], None]) -> None:
        """Compute all layers in order, or make the launches of one of their kind with their tensors."""
        tail, numbers = capture_in_progress(), Counter(kind for kind, _ in layers)
        usable = {kind: tape for kind, tape in self._tapes.items() if tape.is_usable(layers)}
        repeats = {
            kind: tape.repeat if tail is None or numbers[kind] < 3 else _KindCopies(tape, tail).repeat
            for kind, tape in usable.items()
        }
        for index, (kind, tensors) in enumerate(layers):
            if kind in repeats:
                repeats[kind](tensors)
            else:
                compute(index)


class _KindTape:
    """The launches of a kind of layers, as layer `index` made them with its own tensors.

    is_complete: whether the layer did nothing else, and those compared with it launched the same. Of those it
    is not known whether they did anything else.
    """

    def __init__(self, index: int, tape: LaunchTape, tensors: Sequence[Tensor]) -> None:
        self.index, self._own = index, tensors
        self.is_complete, self.is_compared = tape.is_complete, False
        self._ranges = _ranges(tensors)
        self._launches = [(one, list(one.picks(self._pick).items())) for one in tape.launches]

    @classmethod
    def of(cls, index: int, tensors: Sequence[Tensor], compute: Callable[[int], None]) -> _KindTape:
        """Compute a layer and take its launches."""
        with recorded_launches(is_watched=True) as tape:
            compute(index)
        return cls(index, tape, tensors)

    def compare(self, tape: LaunchTape, tensors: Sequence[Tensor]) -> None:
        """Compare with the launches of another layer of the kind."""
        try:
            expected = [self.launch(number, tensors) for number in range(len(self))]
        except RuntimeError:  # of a part that cannot be viewed as it is in the first layer
            expected = []
        is_same = len(expected) == len(tape.launches) and all(map(Launch.equals, expected, tape.launches))
        self.is_complete, self.is_compared = self.is_complete and is_same, True

    def is_usable(self, layers: Sequence[LayerTensors]) -> bool:
        """Return True if all layers of the kind make the same launches with their own tensors, and the
        layer's own ones are where they were."""
        is_in_place = _ranges(layers[self.index].tensors) == self._ranges
        return self.is_complete and self.is_compared and is_in_place

    def repeat(self, tensors: Sequence[Tensor]) -> None:
        """Launch with the tensors of another layer."""
        for number in range(len(self)):
            self.launch(number, tensors)()

    def __len__(self) -> int:
        """The number of launches."""
        return len(self._launches)

    def launch(self, number: int, tensors: Sequence[Tensor]) -> Launch:
        """A launch, by its number, with the tensors of another layer."""
        one, picks = self._launches[number]
        return one.replaced(picks, tensors) if picks else one

    def ranges(self, number: int, tensors: Sequence[Tensor]) -> list[AddressRange | None]:
        """The memory of the tensors of another layer that a launch takes; None for other tensors."""
        one, _ = self._launches[number]
        taken = {self._number(tensor.data_ptr()) for tensor in one.tensors()}
        return [each if place in taken else None for place, each in enumerate(_ranges(tensors))]

    def _number(self, address: int) -> int | None:
        """The number of the layer's tensor at an address, if there is one."""
        for number, (first, end) in enumerate(self._ranges):
            if first <= address < end:
                return number

        return None

    def _pick(self, tensor: Tensor) -> Pick | None:
        """The pick of a tensor of the layer's own, or of a part of one; None for other tensors."""
        address = tensor.data_ptr()
        number = self._number(address)
        if number is None:
            return None

        own, form = self._own[number], (tensor.shape, tensor.stride(), tensor.dtype)
        is_whole = form == (own.shape, own.stride(), own.dtype)
        offset = address - self._ranges[number][0]
        return itemgetter(number) if is_whole else partial(_part, number, offset, tensor)


class _KindCopies:
    """The launches of a kind of layers in a capture: those of two layers, then copies of their kernels."""

    def __init__(self, tape: _KindTape, tail: GraphTail) -> None:
        self._tape, self._tail = tape, tail
        self._seen: list[tuple[Sequence[Tensor], list[list[CapturedKernel] | None]]] = []
        self._copies: list[list[KernelCopy] | None] = []
        self._shared: dict[int, int] = {}  # addresses of tensors that both layers have, by number

    def repeat(self, tensors: Sequence[Tensor]) -> None:
        """Launch with the tensors of the next layer."""
        tape, numbers = self._tape, range(len(self._tape))
        if len(self._seen) < 2:
            kernels = [self._tail.kernels_of(tape.launch(number, tensors).__call__) for number in numbers]
            self._seen.append((tensors, kernels))
            return

        if not self._copies:
            self._copies = [self._copies_of(number) for number in numbers]
            pairs = zip(*(_addresses(seen) for seen, _ in self._seen), strict=True)
            self._shared = {number: one for number, (one, other) in enumerate(pairs) if one == other}
        addresses = _addresses(tensors)
        # A kernel's address of a tensor that both share cannot be told from other numbers.
        if any(addresses[number] != address for number, address in self._shared.items()):
            tape.repeat(tensors)
            return

        for number, copies in zip(numbers, self._copies, strict=True):
            if copies is None:
                tape.launch(number, tensors)()
                continue

            for copy in copies:
                copy.launch(addresses)

    def _copies_of(self, number: int) -> list[KernelCopy] | None:
        (tensors, first), (others, second) = self._seen
        ranges = self._tape.ranges(number, tensors), self._tape.ranges(number, others)
        return copies_of((first[number], second[number]), ranges, self._tail.stream)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [own.data_ptr() for own in tensors]


def _ranges(tensors: Sequence[Tensor]) -> list[AddressRange]:
    return [(own.data_ptr(), own.data_ptr() + own.nbytes) for own in tensors]


def _part(number: int, offset: int, view: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The part of tensors[number] that `view` is of another tensor, `offset` bytes behind its beginning."""
    own = tensors[number].view(view.dtype)
    first = own.storage_offset() + offset // view.element_size()
    return own.as_strided(view.shape, view.stride(), first)


def places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return for each tensor the number of the first one at its address, as a value to compare.

    Of two tensors in one place, an address does not tell which one it belongs to.
    """
    addresses = _addresses(tensors)
    return tuple(map(addresses.index, addresses))


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a dataclass or Struct of weights that have elements, in order."""
    if isinstance(value, Tensor):
        if value.numel():
            yield value
        return

    for each in value if isinstance(value, tuple | list) else _fields(value):
        yield from tensors_of(each)


def layout(value: object) -> object:
    """Shapes, types and strides of the tensors in a dataclass or Struct of weights, as a value to compare.

    Objects of other classes count as different from each other, unless they are equal.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.data_ptr() % 16

    if found := _fields(value):
        return type(value), tuple(map(layout, found))

    if isinstance(value, tuple | list):
        return tuple(map(layout, value))

    return value if value is None or isinstance(value, str | int | float | torch.dtype) else id(value)


def _fields(value: object) -> list[object]:
    """The values of a dataclass's or a Struct's fields; none of other objects."""
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]

    return [getattr(value, name) for name in value.__struct_fields__] if isinstance(value, Struct) else []
