"""Launches that are recorded and made again."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from drift_sdk._kernels.common.launch_tape import Launch, launch, recorded_launches


class Pair(NamedTuple):
    first: Tensor
    number: int


@dataclass
class Held:
    tensor: Tensor


def add(x: Tensor, pair: Pair, *, out: Tensor) -> int:
    torch.add(x, pair.first, alpha=pair.number, out=out)
    return 7


def write(x: Tensor, *, out: Tensor) -> bool:
    return bool(torch.equal(out.copy_(x), x))


def tensors(number: int) -> list[Tensor]:
    return [torch.full((3,), float(index + 1)) for index in range(number)]


def test_launches_are_made_and_recorded_on_their_own_thread() -> None:
    x, y, out = tensors(3)
    others = torch.empty(3)
    with recorded_launches(is_watched=True) as tape:
        assert launch(add, x, Pair(y, 10), out=out) == 7
        thread = threading.Thread(target=launch, args=(add, x, Pair(y, 1)), kwargs={"out": others})
        thread.start()
        thread.join()
    launch(add, x, Pair(y, 1), out=others)  # after the block
    assert out.tolist() == [21.0] * 3
    assert [one.function for one in tape.launches] == [add]
    assert tape.is_complete


def test_objects_that_may_hold_tensors_are_equal_only_to_themselves() -> None:
    first, second = Held(torch.zeros(2)), Held(torch.zeros(2))
    assert Launch(add, (first,), {}).equals(Launch(add, (first,), {}))
    assert not Launch(add, (first,), {}).equals(Launch(add, (second,), {}))


def test_a_launch_is_made_again_with_other_tensors() -> None:
    x, y, out, other, others_out = tensors(5)
    with recorded_launches() as tape:
        launch(add, x, Pair(y, 10), out=out)
    (made,) = tape.launches
    picks = made.picks({y: itemgetter(0), out: itemgetter(1)}.get)
    assert set(picks) == {1, "out"}
    again = made.replaced(picks.items(), [other, others_out])
    again()
    assert others_out.tolist() == [41.0] * 3
    assert isinstance(again.arguments[1], Pair)
    assert made.arguments[1].first is y and made.options["out"] is out


def test_launches_are_equal_if_they_use_the_same_memory() -> None:
    x, y, out = tensors(3)
    made = Launch(add, (x, Pair(y, 1)), {"out": out})
    assert made.equals(Launch(add, (x[:], Pair(y.view(3), 1)), {"out": out}))
    for other in (
        Launch(min, (x, Pair(y, 1)), {"out": out}),
        Launch(add, (x.clone(), Pair(y, 1)), {"out": out}),
        Launch(add, (x[:2], Pair(y, 1)), {"out": out}),
        Launch(add, (x, Pair(y, 2)), {"out": out}),
        Launch(add, (x, Pair(y, True)), {"out": out}),
        Launch(add, (x, Pair(y, 1), None), {"out": out}),
        Launch(add, (x, Pair(y, 1)), {"out": x}),
        Launch(add, (x, Pair(y, 1)), {}),
        Launch(add, (x.view(torch.int32), Pair(y, 1)), {"out": out}),
        Launch(add, (x, Pair(y, [1])), {"out": out}),
    ):
        assert not made.equals(other)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.zero_(),
        lambda x: x.copy_(x),
        lambda x: x + 1,
        lambda x: torch.empty_like(x),
        lambda x: x.sum().item(),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.__iadd__(1),
        lambda x: torch.stack([x, x]),
        lambda x: torch.mul(x, 2, out=x),
        lambda x: x[[0, 1]],
        lambda x: torch.unbind_copy(x),
        lambda x: handle_torch_function(write, (x,), x, out=x),
    ],
)
def test_operations_beside_launches_are_noticed(operation: object) -> None:
    (x,) = tensors(1)
    with recorded_launches(is_watched=True) as tape:
        assert callable(operation)
        operation(x)
    assert not tape.is_complete


def test_views_are_no_operations() -> None:
    x = torch.arange(24.0).view(4, 6)
    with recorded_launches(is_watched=True) as tape:
        first, second = x.split(2)
        assert first.shape == second.shape and x.unbind()[0].is_contiguous()
        x.T.unflatten(0, (2, 3)).transpose(0, 1)[1:].permute(2, 1, 0).view(torch.int32).data_ptr()
    assert tape.is_complete


def test_recording_ends_with_an_error() -> None:
    with pytest.raises(RuntimeError, match="failed"), recorded_launches(is_watched=True) as tape:
        raise RuntimeError("failed")
    x, y, out = tensors(3)
    launch(add, x, Pair(y, 1), out=out)
    assert not tape.launches
