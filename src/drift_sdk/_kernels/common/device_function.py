"""The decorator of functions that kernels call: Triton's, with less time to import.

Triton takes the source of a function from `inspect`, which finds its last line by tokenising it. That takes a
millisecond for a function of fifty lines, and most of the import of this package's kernels. The last line of
a function of a module is found here by its indentation.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.runtime.jit

__all__ = ["device_function", "quick_sources", "source_lines"]

PACKAGE = __name__.partition(".")[0]
INSIDE = frozenset(" \t\r\n#)")
"""First characters of the lines of a function after its first `def`, of comments, and of empty lines."""
_swapping = threading.RLock()


def device_function(function: Callable[..., Any]) -> Any:
    """`triton.jit` for a function that kernels call. Functions that are launched have `kernel`."""
    with quick_sources():
        return triton.jit(function)


@contextmanager
def quick_sources() -> Iterator[None]:
    """Have Triton take the sources of this package's functions from `source_lines` in a `with` block."""
    module: Any = triton.runtime.jit
    with _swapping:
        module.inspect = _quick_inspect
        try:
            yield
        finally:
            module.inspect = inspect


def source_lines(function: Any) -> tuple[list[str], int]:
    """What `inspect.getsourcelines` returns for a function of a module, if its lines are indented but for
    closing parentheses of its signature: its source with decorators, and the number of the first line."""
    lines, index = inspect.findsource(function)
    length = next(number for number, line in enumerate(lines[index:]) if line.startswith("def ")) + 1
    while index + length < len(lines) and lines[index + length][0] in INSIDE:
        length += 1
    while lines[index + length - 1][0] in "#\r\n" or lines[index + length - 1].isspace():
        length -= 1
    return lines[index : index + length], index + 1


class _QuickInspect(ModuleType):
    """The module `inspect` with quick sources of this package's functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getsourcelines(self, function: Any) -> tuple[list[str], int]:
        is_own = isinstance(function, FunctionType) and function.__module__.partition(".")[0] == PACKAGE
        is_of_module = is_own and function.__qualname__ == function.__name__
        return source_lines(function) if is_of_module else inspect.getsourcelines(function)


_quick_inspect = _QuickInspect(inspect.__name__)
