"""The decorator of kernels that are launched: Triton's, with less time to import and to launch again.

A step launches each of its kernels once a layer, and many steps are captured when an engine starts. At every
launch, Triton finds the compiled kernel again, by what arguments are specialised on, by options, and by
constants that may have changed. Little of that differs between layers: the compiled kernel is kept under a
key that takes less time to make.

Triton reads the source of a kernel when it is decorated. Here it does so when the kernel is first used: a
process uses few of the kernels that it imports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from drift_sdk._kernels.common.cache_keys import settle_cache_key
from drift_sdk._kernels.common.device_function import quick_sources
from drift_sdk._kernels.common.launching import is_interpreted

__all__ = ["RepeatedKernel", "kernel", "launch_key", "launched_kernels", "observed_launches"]

Observer = Callable[[Any, Any, Sequence[Any], dict[str, Any]], None]
"""Gets a kernel that was launched, what it was compiled to, and its arguments by position and by name."""

_kernels: list[Any] = []
"""All kernels of the process, by time of definition."""
_observers: list[Observer] = []
_reading = threading.RLock()
"""Held while Triton reads a kernel's source."""

DEFAULT_OPTIONS = {"enable_fp_fusion": True}
"""Options of launches that do not give them. Triton's own default depends on its version and on the
environment, and bits would depend on it."""
ALIGNMENT = 16
"""Bytes: Triton specialises kernels on pointers that are multiples of it."""


def kernel(
    function: Callable[..., None] | None = None,
    *,
    do_not_specialize: Sequence[str] = (),
    do_not_specialize_on_alignment: Sequence[str] = (),
) -> Any:
    """`triton.jit` for a function that is launched. Functions that kernels call have `device_function`.

    do_not_specialize, do_not_specialize_on_alignment: names of arguments, as for Triton.
    """
    options = {
        "do_not_specialize": do_not_specialize,
        "do_not_specialize_on_alignment": do_not_specialize_on_alignment,
    }

    def decorated(function: Callable[..., None]) -> Any:
        made = (triton.jit if is_interpreted() else RepeatedKernel)(function, **options)
        _kernels.append(made)
        return made

    return decorated if function is None else decorated(function)


def launched_kernels() -> list[Any]:
    """Return all kernels that imported modules define by the decorator `kernel`."""
    return list(_kernels)


@contextmanager
def observed_launches(observer: Observer) -> Iterator[None]:
    """Have an observer called after each launch of a compiled kernel, by any thread, in a `with` block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class RepeatedKernel(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel whose compiled variants are found by a key of its own, once Triton has launched them.

    The key has what Triton may specialise on: of tensors the type and whether the pointer is aligned, of
    other arguments and of options the value. Constants of modules are not in it: they are constant.
    """

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        # Without these two, those of the class would be found.
        self.__doc__, self.__module__ = function.__doc__, function.__module__
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._init_triton: Callable[[], None] | None = partial(super().__init__, function, **options)

    def __getattr__(self, name: str) -> Any:
        """An attribute that Triton's constructor sets, which is called when the first one is asked for."""
        with _reading:
            if (init := self.__dict__.get("_init_triton")) is not None:
                self._init_triton = None  # the constructor may ask for attributes, too
                try:
                    with quick_sources():
                        init()
                except BaseException:
                    self._init_triton = init
                    raise
        return super().__getattribute__(name)

    def run(self, *values: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        """Launch the kernel and return it compiled; with `warmup`, only compile it.

        values, options: arguments by position; arguments by name, and Triton's options of the launch. All
        arguments are given.
        """
        if warmup:
            settle_cache_key(self)
            return super().run(*values, grid=grid, warmup=True, **DEFAULT_OPTIONS | options)

        key = (torch.cuda.current_device(), *launch_key(values, options))
        compiled = self._compiled.get(key)
        if compiled is None:
            settle_cache_key(self)
            compiled = super().run(*values, grid=grid, warmup=False, **DEFAULT_OPTIONS | options)
            if compiled is None:  # a hook of Triton's has kept it from being compiled
                return None

            self._compiled[key] = compiled
        else:
            named = [options[name] for name in self.arg_names[len(values) :]]
            compiled[(*grid, 1, 1)[:3]](*values, *named)
        # Nothing is launched for an empty grid. Other threads may change the observers.
        for observe in tuple(_observers) if all(grid) else ():
            observe(self, compiled, values, options)
        return compiled


def launch_key(values: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies the compiled kernel of a launch, among those for one device."""
    given = (*values, *options.values())
    kinds = tuple(map(type, given))  # 1 equals True
    tensors, floats, others = places_of(kinds)
    pointers = [given[place] for place in tensors]
    return (
        *options,
        kinds,
        others(given),
        *[repr(given[place]) for place in floats],  # 0.0 equals -0.0
        *[tensor.dtype for tensor in pointers],
        *[tensor.data_ptr() % ALIGNMENT == 0 for tensor in pointers],
    )


@cache
def places_of(kinds: tuple[type, ...]) -> tuple[list[int], list[int], Callable[[Sequence[Any]], Any]]:
    """Return the places of tensors and of floats among arguments of these types, and a function that returns
    the other arguments."""
    tensors = [place for place, kind in enumerate(kinds) if issubclass(kind, Tensor)]
    floats = [place for place, kind in enumerate(kinds) if kind is float]
    others = [place for place in range(len(kinds)) if place not in (*tensors, *floats)]
    return tensors, floats, itemgetter(*others) if others else len
