"""Sources of functions of Triton are those that `inspect` finds."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from drift_sdk import _kernels
from drift_sdk._kernels.common import device_function as module
from drift_sdk._kernels.common.device_function import device_function, quick_sources, source_lines


def functions() -> Iterator[FunctionType]:
    """All functions of the package that Triton compiles."""
    for found in pkgutil.walk_packages(_kernels.__path__, f"{_kernels.__name__}."):
        values: list[Any] = list(vars(importlib.import_module(found.name)).values())
        for value in values:
            function = getattr(value, "fn", None)
            if isinstance(function, FunctionType) and function.__module__ == found.name:
                yield function


def test_all_sources_are_those_of_inspect() -> None:
    found = list(functions())
    assert len(found) > 100
    for function in found:
        assert source_lines(function) == inspect.getsourcelines(function), function


# fmt: off
@device_function
def followed_by_a_comment(x):
    if x:
        return 1
    return (
        x + 2
    )
    # The last line.

# Not a part of it.


@device_function
def with_signature_of_several_lines(
    x,
    y,
):
    return x + y
# fmt: on


@pytest.mark.parametrize("made", [followed_by_a_comment, with_signature_of_several_lines])
def test_the_source_ends_where_that_of_inspect_does(made: Any) -> None:
    assert source_lines(made.fn) == inspect.getsourcelines(made.fn)


def test_triton_takes_quick_sources_of_this_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(module, "source_lines", lambda function: taken.append(function) or (["x"], 1))
    triton_inspect: Any = triton.runtime.jit
    own = next(functions())
    with quick_sources():
        assert triton_inspect.inspect.getsourcelines(own) == (["x"], 1)
        assert triton_inspect.inspect.signature is inspect.signature
        lines = triton_inspect.inspect.getsourcelines(test_all_sources_are_those_of_inspect)
    assert taken == [own]
    assert lines == inspect.getsourcelines(test_all_sources_are_those_of_inspect)
    assert triton_inspect.inspect is inspect


def test_functions_inside_others_are_left_to_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> int:
        return 1

    monkeypatch.setattr(inner, "__module__", "drift_sdk.anything")
    with quick_sources():
        assert triton.runtime.jit.inspect.getsourcelines(inner) == inspect.getsourcelines(inner)


def test_an_error_and_other_threads_leave_triton_as_it_was() -> None:
    def swap() -> None:
        for _ in range(50):
            with pytest.raises(KeyError), quick_sources(), quick_sources():
                raise KeyError

    threads = [threading.Thread(target=swap) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert triton.runtime.jit.inspect is inspect
