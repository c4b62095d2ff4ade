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

__all__ = ["LayerTensors", "RepeatedLayers", "layout", "tensors_of"]


class LayerTensors(NamedTuple):
    """The tensors of one layer, which other layers have others for.

    kind: equal for layers that launch the same kernels with the same sizes. tensors: weights, keys and
    values, in the same order and of the same layout (see `layout`) for layers of a kind.
    """

    kind: object
    tensors: list[Tensor]

    def with_tensors(self, others: list[Tensor]) -> LayerTensors:
        """The layer with further tensors."""
        return LayerTensors((self.kind, layout(others)), [*self.tensors, *others])


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
        usable = {kind: tape for kind, tape in self._tapes.items() if tape.is_usable(layers)}
        for index, (kind, tensors) in enumerate(layers):
            if kind in usable:
                usable[kind].repeat(tensors)
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
        self._ranges = [(own.data_ptr(), own.data_ptr() + own.nbytes) for own in tensors]
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
            expected = list(self._with(tensors))
        except RuntimeError:  # of a part that cannot be viewed as it is in the first layer
            expected = []
        is_same = len(expected) == len(tape.launches) and all(map(Launch.equals, expected, tape.launches))
        self.is_complete, self.is_compared = self.is_complete and is_same, True

    def is_usable(self, layers: Sequence[LayerTensors]) -> bool:
        """Return True if all layers of the kind make the same launches with their own tensors, and the
        layer's own ones are where they were."""
        addresses = [(own.data_ptr(), own.data_ptr() + own.nbytes) for own in layers[self.index].tensors]
        return self.is_complete and self.is_compared and addresses == self._ranges

    def repeat(self, tensors: Sequence[Tensor]) -> None:
        """Launch with the tensors of another layer."""
        for one in self._with(tensors):
            one()

    def _with(self, tensors: Sequence[Tensor]) -> Iterator[Launch]:
        for one, picks in self._launches:
            yield one.replaced(picks, tensors) if picks else one

    def _pick(self, tensor: Tensor) -> Pick | None:
        """The pick of a tensor of the layer's own, or of a part of one; None for other tensors."""
        address = tensor.data_ptr()
        for number, (first, end) in enumerate(self._ranges):
            if first <= address < end:
                own, form = self._own[number], (tensor.shape, tensor.stride(), tensor.dtype)
                is_whole = form == (own.shape, own.stride(), own.dtype)
                return itemgetter(number) if is_whole else partial(_part, number, address - first, tensor)

        return None


def _part(number: int, offset: int, view: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The part of tensors[number] that `view` is of another tensor, `offset` bytes behind its beginning."""
    own = tensors[number].view(view.dtype)
    first = own.storage_offset() + offset // view.element_size()
    return own.as_strided(view.shape, view.stride(), first)


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
