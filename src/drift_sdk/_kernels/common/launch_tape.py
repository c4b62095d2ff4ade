"""Launches that are noted while a step is computed, and can be made again with other tensors.

Most of the time of a launch goes to the Python code before it, which checks arguments and chooses a kernel. A
layer that has the shapes of an earlier one needs none of that: its launches are those of the earlier layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Launch", "LaunchTape", "Pick", "launch", "recorded_launches"]

Pick = Callable[[Sequence[Tensor]], Any]
"""Takes the value of an argument from a sequence of tensors."""

DESCRIPTIONS = {torch.Size, torch.dtype, torch.device, int, bool}
"""Types of results that describe a tensor, as those of most calls beside launches do. Functions of torch that
write to a tensor return it or None."""

_current = threading.local()


class Launch(NamedTuple):
    """A call that launches kernels. Tensors may also be in tuples among its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        self.function(*self.arguments, **self.options)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among its arguments."""
        return _tensors((*self.arguments, *self.options.values()))

    def picks(self, pick_of: Callable[[Tensor], Pick | None]) -> dict[int | str, Pick]:
        """Picks of the arguments with a tensor for which `pick_of` returns one, by position or name."""
        named: Iterable[tuple[int | str, Any]] = (*enumerate(self.arguments), *self.options.items())
        found = {place: _pick(value, pick_of) for place, value in named}
        return {place: pick for place, pick in found.items() if pick is not None}

    def replaced(self, picks: Iterable[tuple[int | str, Pick]], tensors: Sequence[Tensor]) -> Launch:
        """The launch with arguments that are picked from `tensors`."""
        arguments, options = list(self.arguments), dict(self.options)
        for place, pick in picks:
            if isinstance(place, int):
                arguments[place] = pick(tensors)
            else:
                options[place] = pick(tensors)
        return Launch(self.function, tuple(arguments), options)

    def equals(self, other: Launch) -> bool:
        """Return True if another launch does the same with the same memory."""
        return (
            self.function == other.function
            and self.options.keys() == other.options.keys()
            and _is_same(self.arguments, other.arguments)
            and _is_same(tuple(self.options.values()), tuple(other.options.values()))
        )


class LaunchTape:
    """The launches of a thread inside `recorded_launches`.

    is_complete: whether nothing else computed, allocated or copied; always True unless that is watched.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.is_complete = True
        self.is_launching = False

    def launch(self, launched: Launch) -> Any:
        """Note a launch and make it."""
        self.launches.append(launched)
        self.is_launching = True
        try:
            return launched.function(*launched.arguments, **launched.options)
        finally:
            self.is_launching = False


def launch(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function that launches kernels and does nothing else, and note the call if this thread records.

    Its arguments have all tensors that the kernels read and write.
    """
    tape: LaunchTape | None = getattr(_current, "tape", None)
    if tape is None:
        return function(*arguments, **options)

    return tape.launch(Launch(function, arguments, options))


@contextmanager
def recorded_launches(*, is_watched: bool = False) -> Iterator[LaunchTape]:
    """Record the launches that this thread makes in a `with` block. They are made, too.

    is_watched: find out whether torch did more than to make views outside of them.
    """
    tape, outer = LaunchTape(), getattr(_current, "tape", None)
    _current.tape = tape
    try:
        with _Watch(tape) if is_watched else nullcontext():
            yield tape
    finally:
        _current.tape = outer


class _Watch(TorchFunctionMode):
    """Sees every call of torch on this thread. A TorchDispatchMode imports sympy, for a second."""

    def __init__(self, tape: LaunchTape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._tape.is_launching or (type(result) in DESCRIPTIONS and not kwargs):
            return result

        if _writes(function, kwargs or {}) or not _is_view(result, args):
            self._tape.is_complete = False
        return result


def _writes(function: Any, options: dict[str, Any]) -> bool:
    """Return True for a function of torch that by its name or its options writes to a tensor."""
    name = str(getattr(function, "__name__", ""))
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name.startswith(("__i", "__set")) or "out" in options


def _is_view(result: Any, arguments: Any) -> bool:
    """Return True if all tensors of a result share memory with an argument."""
    storages = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, Tensor)}
    results = _tensors(tuple(result) if isinstance(result, list) else result)
    return all(each.untyped_storage().data_ptr() in storages for each in results)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)


def _pick(value: Any, pick_of: Callable[[Tensor], Pick | None]) -> Pick | None:
    if isinstance(value, Tensor):
        return pick_of(value)

    picks = [_pick(each, pick_of) for each in value] if isinstance(value, tuple) else []
    return partial(_picked, value, picks) if any(picks) else None


def _picked(value: Any, picks: Sequence[Pick | None], tensors: Sequence[Tensor]) -> Any:
    """A tuple like `value` with picked elements."""
    picked = [one if pick is None else pick(tensors) for one, pick in zip(value, picks, strict=True)]
    return type(value)(*picked) if hasattr(value, "_fields") else tuple(picked)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return _place(value) == _place(other)

    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))

    is_number = isinstance(value, bool | int | float | str)
    return value is other or is_number and type(value) is type(other) and value == other


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
