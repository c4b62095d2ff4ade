"""Layers of a kind launch the same kernels: a first run computes some, whose launches are repeated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec import Struct
from torch import Tensor

pytest.importorskip("cuda.bindings")

from drift_sdk._kernels.common.launch_tape import Launch, launch
from drift_sdk.execution.forward import repeated_layers
from drift_sdk.execution.forward.repeated_layers import LayerTensors, RepeatedLayers, places, tensors_of


class Layer(Struct, frozen=True):
    weight: Tensor
    codes: Tensor
    scale: float = 1.0
    bias: Tensor | None = None


def multiply(x: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    torch.add(x, weight, alpha=scale, out=out)


class Model:
    """Adds the weights of its layers to `x` in turn, forwards and backwards."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.layers = [
            Layer(torch.randn(6, generator=generator), torch.randn(8, generator=generator).view(torch.uint8))
            for _ in range(number)
        ]
        self.x, self.between, self.computed = torch.zeros(3), torch.zeros(3), list[int]()
        self.tables = torch.randn(number, 3, generator=generator)

    def own(self, kinds: str | None = None) -> list[LayerTensors]:
        return [
            LayerTensors(kind, list(tensors_of(layer)))
            for kind, layer in zip(kinds or "a" * len(self.layers), self.layers, strict=True)
        ]

    def compute(self, index: int) -> None:
        layer = self.layers[index]
        self.computed.append(index)
        launch(multiply, self.x, layer.weight[:3], layer.scale, self.between)
        launch(multiply, self.between, layer.codes.view(torch.float32)[5:8], 2.0, self.x)

    def run(
        self,
        compute: Callable[[int], None] | None = None,
        kinds: str | None = None,
        chosen: Sequence[int] = (0, 1, 4),
        change: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """The layers that are computed after a first run of the chosen ones. The result is that of computing
        all. change: called after the first run."""
        compute, repeated = compute or self.compute, RepeatedLayers()
        repeated.run_first(self.own(kinds), chosen, compute)
        change()
        self.x.zero_()
        for index in range(len(self.layers)):
            compute(index)
        expected = self.x.tolist()
        self.computed.clear()
        self.x.zero_()
        repeated.run(self.own(kinds), compute)
        assert self.x.tolist() == expected
        return self.computed


def test_layers_are_repeated_with_their_own_tensors() -> None:
    assert Model(8).run() == []


@pytest.mark.parametrize("chosen", [(), (0,)])
def test_layers_of_which_no_two_were_compared_are_computed(chosen: tuple[int, ...]) -> None:
    assert Model(5).run(chosen=chosen) == list(range(5))


def test_all_tensors_of_a_tuple_are_a_layers_own() -> None:
    model = Model(6)

    def add(pair: tuple[Tensor, Tensor]) -> None:
        model.x.add_(pair[0] * pair[1])

    def compute(index: int) -> None:
        model.compute(index)
        layer = model.layers[index]
        launch(add, (layer.weight[:3], layer.weight[3:]))

    assert model.run(compute) == []


def test_each_kind_has_its_own_launches() -> None:
    model = Model(12)

    def compute(index: int) -> None:
        model.compute(index)
        if index % 2:
            launch(multiply, model.x, model.layers[index].weight[3:], 3.0, model.x)

    assert model.run(compute, "ab" * 6, (0, 1, 2, 3, 10, 11)) == []
    assert model.run(compute, "ab" * 6, (0, 1, 2)) == [1, 3, 5, 7, 9, 11]
    assert model.run(compute) == list(range(12)), "layers said to be of one kind"


def test_what_a_kinds_first_layer_does_besides_is_not_repeated() -> None:
    """Such as to compile kernels, and to compare the library's products. It is computed again."""
    model = Model(6)
    made, computed = list[Tensor](), list[int]()

    def compute(index: int) -> None:
        if not made:
            made.append(torch.zeros(3))
            launch(multiply, model.x, made[0], 0.0, model.x)
        computed.append(index)
        model.compute(index)

    assert model.run(compute, chosen=(1, 4, 5)) == []
    assert computed == [1, 4, 1, 5, *range(6)]


def test_layers_that_differ_in_a_number_are_computed() -> None:
    model = Model(6)
    model.layers = [Layer(each.weight, each.codes, float(index)) for index, each in enumerate(model.layers)]
    assert model.run() == list(range(6))


def test_layers_that_use_tensors_of_their_index_are_computed() -> None:
    model = Model(6)

    def compute(index: int) -> None:
        model.compute(index)
        launch(multiply, model.x, model.tables[index], 1.0, model.x)

    assert model.run(compute) == list(range(6))


def test_layers_that_compute_without_a_launch_are_computed() -> None:
    model = Model(6)

    def compute(index: int) -> None:
        model.compute(index)
        model.x.mul_(0.5)

    assert model.run(compute) == list(range(6))


def test_layers_that_alternate_between_buffers_are_computed() -> None:
    model = Model(6)
    others = [torch.zeros(3), torch.zeros(3)]

    def compute(index: int) -> None:
        model.between = others[index % 2]
        model.compute(index)

    assert model.run(compute) == list(range(6))


def test_layers_with_parts_of_other_types_that_have_no_view_are_computed() -> None:
    """A tensor without dimensions cannot be seen as bytes."""
    numbers = [torch.tensor(float(index)) for index in range(6)]

    class Numbers(Model):
        def own(self, kinds: str | None = None) -> list[LayerTensors]:
            return [LayerTensors("a", [number]) for number in numbers]

    model = Numbers(6)

    def compute(index: int) -> None:
        launch(multiply, model.x, numbers[index].view(1).view(torch.uint8)[:3], 1.0, model.x)
        model.computed.append(index)

    assert model.run(compute) == list(range(6))


def test_a_last_layer_with_another_launch_is_noticed() -> None:
    model = Model(6)

    def compute(index: int) -> None:
        model.compute(index)
        if index == 5:
            launch(multiply, model.x, model.x, 1.0, model.x)

    assert model.run(compute, chosen=(0, 1, 2, 5)) == list(range(6))


def test_launches_are_not_repeated_once_tensors_have_moved() -> None:
    """As keys and values do when the cache gets its blocks."""
    model = Model(6)

    def move() -> None:
        model.layers[0] = Layer(model.layers[0].weight.clone(), model.layers[0].codes)

    assert model.run(change=move) == list(range(6))


def test_launches_are_not_repeated_once_one_of_the_tensors_has_moved() -> None:
    model = Model(6)

    def move() -> None:
        model.layers[0] = Layer(model.layers[0].weight, model.layers[0].codes.clone())

    assert model.run(change=move) == list(range(6))


def test_a_later_first_run_replaces_the_launches() -> None:
    model, repeated = Model(6), RepeatedLayers()
    repeated.run_first(model.own(), (0, 1, 2), model.compute)
    model.between = torch.zeros(3)
    repeated.run_first(model.own(), (0,), model.compute)
    model.computed.clear()
    repeated.run(model.own(), model.compute)
    assert model.computed == list(range(6))


def test_layers_without_addresses_are_computed() -> None:
    layers = [LayerTensors("a", [torch.empty(3, device="meta")]) for _ in range(6)]
    repeated, computed = RepeatedLayers(), list[int]()
    repeated.run_first(layers, (0, 1, 5), computed.append)
    repeated.run(layers, computed.append)
    assert computed == [0, 1, 5, *range(6)]


Range = tuple[int, int]


class EmulatedCapture:
    """A capture whose kernels are the launches themselves. launches: those that were read, in order.

    ranges: of each pair that copies are made of, the numbers of the tensors that are given.
    """

    stream = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_copies: Callable[[int], bool]) -> None:
        self.launches, self.copied, self.ranges = list[Launch](), list[int](), list[list[int]]()
        self._has_copies = has_copies
        monkeypatch.setattr(repeated_layers, "capture_in_progress", lambda: self)
        monkeypatch.setattr(repeated_layers, "copies_of", self._copies_of)

    def kernels_of(self, call: Any) -> list[Launch]:
        self.launches.append(call.__self__)
        call()
        return [call.__self__]

    def _copies_of(
        self,
        kernels: tuple[list[Launch], list[Launch]],
        ranges: tuple[Sequence[Range | None], Sequence[Range | None]],
        stream: int,
    ) -> list[EmulatedCopy] | None:
        number = len(self.ranges)
        self.ranges.append([place for place, each in enumerate(ranges[0]) if each is not None])
        assert stream == self.stream
        if not self._has_copies(number):
            return None

        copies = [
            EmulatedCopy(*pair, ranges, lambda: self.copied.append(number))
            for pair in zip(*kernels, strict=True)
        ]
        return copies


class EmulatedCopy:
    """Makes a launch with numbers at other addresses."""

    def __init__(
        self,
        first: Launch,
        second: Launch,
        ranges: tuple[Sequence[Range | None], Sequence[Range | None]],
        on_launch: Callable[[], object],
    ) -> None:
        self._launch, self._on_launch = second, on_launch
        self._places: dict[int, tuple[int, int]] = {}
        for place, (one, other) in enumerate(zip(first.arguments, second.arguments, strict=True)):
            if isinstance(one, Tensor) and one.data_ptr() != other.data_ptr():
                (found,) = [
                    (number, one.data_ptr() - begin[0])
                    for number, (begin, end) in enumerate(zip(*ranges, strict=True))
                    if begin
                    and end
                    and begin[0] <= one.data_ptr() < begin[1]
                    and one.data_ptr() - begin[0] == other.data_ptr() - end[0]
                ]
                self._places[place] = found

    def launch(self, addresses: Sequence[int]) -> None:
        arguments = list(self._launch.arguments)
        for place, (number, offset) in self._places.items():
            length = arguments[place].numel()
            found = (ctypes.c_float * length).from_address(addresses[number] + offset)
            arguments[place] = torch.tensor(list(found))
        self._launch.function(*arguments)
        self._on_launch()


@pytest.mark.parametrize(
    "has_copies", [lambda number: True, lambda number: number == 1, lambda number: False]
)
def test_kernels_of_two_layers_are_copied_for_the_others_of_a_capture(
    has_copies: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = EmulatedCapture(monkeypatch, has_copies)
    model = Model(7)
    assert model.run() == []
    assert len(capture.launches) == 4, "two layers with two launches"
    assert capture.ranges == [[0], [1]], "tensors that a launch takes"
    assert capture.copied == [number for _ in range(5) for number in (0, 1) if has_copies(number)]


def test_each_kind_of_layers_has_its_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = EmulatedCapture(monkeypatch, lambda number: True)
    assert Model(8).run(kinds="ab" * 4, chosen=(0, 1, 2, 3, 6, 7)) == []
    assert len(capture.launches) == 8
    assert capture.copied == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("kinds", ["aab", "aabb"])
def test_kernels_of_two_layers_of_a_kind_are_not_read(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = EmulatedCapture(monkeypatch, lambda number: True)
    Model(len(kinds)).run(kinds=kinds, chosen=range(len(kinds)))
    assert not capture.launches


def test_a_tensor_that_the_first_layers_alone_share_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of both have its address, like a constant."""
    capture = EmulatedCapture(monkeypatch, lambda number: True)
    model = Model(6)
    first, second, third, fourth, *others = model.layers
    second, fourth = Layer(first.weight, second.codes), Layer(first.weight, fourth.codes)
    model.layers = [first, second, third, fourth, *others]
    assert model.run(chosen=(0, 4, 5)) == []
    assert capture.copied == [0, 1], "of the fourth layer, which has the tensor too"


def test_scales_in_one_place_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as scales of ones for keys and for values, in all layers of a kind."""
    capture = EmulatedCapture(monkeypatch, lambda number: True)
    model = Model(6)
    model.layers = [Layer(each.codes.view(torch.float32), each.codes) for each in model.layers]
    assert model.run(chosen=(0, 4, 5)) == []
    assert capture.copied == [0, 1] * 4


def test_places_tell_which_tensors_share_an_address() -> None:
    first, second = torch.zeros(2, 4)
    assert places([first, second, first[:2], second[1:], second]) == (0, 1, 0, 3, 1)
    layer = LayerTensors("a", [])
    assert layer.with_tensors([first, first]).kind != layer.with_tensors([first, second]).kind


def test_tensors_in_tuples_and_options_are_those_that_a_launch_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture = EmulatedCapture(monkeypatch, lambda number: False)
    model = Model(4)

    def add(pair: tuple[Tensor, float], *, out: Tensor) -> None:
        out.add_(pair[0] * pair[1])

    def subtract(*, out: Tensor, codes: Tensor) -> None:
        out.sub_(codes[:3])

    def compute(index: int) -> None:
        layer = model.layers[index]
        launch(add, (layer.weight[3:], 2.0), out=model.x)
        launch(subtract, out=model.x, codes=layer.codes[4:])

    assert model.run(compute, chosen=(0, 2, 3)) == []
    assert capture.ranges == [[0], [1]]


def test_tensors_behind_each_other_are_told_apart() -> None:
    """All layers but one have them so."""
    model = Model(5)
    pairs = [(both[:6], both[6:]) for both in torch.randn(5, 14, generator=torch.Generator().manual_seed(1))]
    pairs[2] = (pairs[2][0], pairs[2][1] + 1.0)
    model.layers = [Layer(weight, codes.view(torch.uint8)) for weight, codes in pairs]

    def compute(index: int) -> None:
        launch(multiply, model.x, model.layers[index].codes.view(torch.float32)[:3], 2.0, model.x)

    assert model.run(compute, chosen=(0, 3, 4)) == []


def test_a_later_capture_reads_kernels_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier one may have buffers that are not there any more."""
    capture = EmulatedCapture(monkeypatch, lambda number: True)
    model, repeated = Model(6), RepeatedLayers()
    repeated.run_first(model.own(), (0, 1, 5), model.compute)
    for number in (1, 2):
        repeated.run(model.own(), model.compute)
        assert len(capture.launches) == 4 * number
