"""The decorator of functions that kernels call: Triton's, with less time to import.

Triton takes the source of a function from `inspect`, which finds its last line by tokenising it, in about
half a millisecond for one that kernels call. The last line of a function of a module is found here by its
indentation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import triton
import triton.runtime.jit

__all__ = ["device_function", "quick_sources", "source_lines"]

PACKAGE = __name__.partition(".")[0]
BEFORE = frozenset("@ \t)")
"""First characters of the lines of decorators."""
INSIDE = frozenset(" \t\r\n\f#)")
"""First characters of the lines of a function after its first `def`, of comments, and of empty lines."""
_inspect = triton.runtime.jit.inspect


def device_function(function: Callable[..., Any]) -> Any:
    """`triton.jit` for a function that kernels call. Functions that are launched have `kernel`."""
    with quick_sources():
        return triton.jit(function)


@contextmanager
def quick_sources() -> Iterator[None]:
    """Have Triton take the sources of this package's functions from `source_lines` in a `with` block.

    Other threads may do so at the same time, and take sources of other functions as ever.
    """
    module: Any = triton.runtime.jit
    module.inspect = _quick_inspect
    try:
        yield
    finally:
        module.inspect = _inspect


def source_lines(function: Any) -> tuple[list[str], int]:
    """Return what `inspect.getsourcelines` returns: the source of a function with its decorators, and the
    number of the first line.

    Found by indentation for a function of a module whose lines are indented but for those of decorators and
    the end of its signature; by `inspect` for functions that begin otherwise.
    """
    lines, index = inspect.findsource(function)
    length = 0
    while index + length < len(lines) and lines[index + length][0] in BEFORE:
        length += 1
    line = "".join(lines[index + length : index + length + 1])
    if lines[index][0] not in "@d" or not line.startswith(f"def {function.__name__}("):
        return inspect.getsourcelines(function)

    length += 1
    while index + length < len(lines) and lines[index + length][0] in INSIDE:
        length += 1
    while lines[index + length - 1].startswith("#") or lines[index + length - 1].isspace():
        length -= 1
    return lines[index : index + length], index + 1


class _QuickInspect(ModuleType):
    """The module `inspect` with quick sources of this package's functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getsourcelines(self, function: Any) -> tuple[list[str], int]:
        is_own = str(function.__module__).partition(".")[0] == PACKAGE
        return source_lines(function) if is_own else inspect.getsourcelines(function)


_quick_inspect = _QuickInspect(inspect.__name__)
