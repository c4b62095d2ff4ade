"""Sources of functions of Triton are those that `inspect` finds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.runtime.jit import JITFunction

from drift_sdk import _kernels
from drift_sdk._kernels.launch import kernel as module
from drift_sdk._kernels.launch.kernel import RepeatedKernel, device_function, quick_sources, source_lines


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


def test_defaults_are_of_types_that_all_supported_versions_of_triton_take() -> None:
    """Triton 3.6 does not compile a call that leaves a default of another type, such as a string."""
    for function in functions():
        for parameter in inspect.signature(function).parameters.values():
            default = parameter.default
            is_taken = isinstance(default, (bool, int, float, triton.language.constexpr))
            assert default is parameter.empty or is_taken, (function, parameter)


SOURCES = {
    "a comment at the end": """
        @decorated
        def f(x):
            if x:
                return 1
            return (
                x + 2
            )
            # The last line.

        # Not a part of it.


        def g(x):
            return 7
    """,
    "a signature of several lines": """
        @decorated
        def f(
            x,
            y=(1),
        ):
            return x + y

        VALUE = 1
    """,
    "decorators of several lines": """
        @decorated
        @twice(
            1,
        )
        def f(x):
            return x
        def g(x):
            return 7
    """,
    "comments and empty lines inside": """
        def f(x):
            x = 1
        # A comment.

            \t
        \f
            return x
        """,
    "the last lines of a file": """
        VALUE = 1
        def f(x): return x
    """,
    "tabs": """
        def f(x):
        \tx = 1
        \treturn x
        def g(x):
        \treturn 7
    """,
    "a condition": """
        if True:
            def f(x):
                return x

        def g(x):
            return 7
    """,
    "a condition, and another function of the name": """
        if True:
            def f(x):
                return x
            first = f
        def f(x):
            return 7
        f = first
    """,
    "nothing but a condition": """
        if True:
            def f(x):
                return x
    """,
    "a tab after def": """
        def\tf(x):
            return x
        def g(x):
            return 7
    """,
    "a coroutine": """
        async def f(x):
            return x
        def g(x):
            return 7
    """,
    "a lambda": """
        f = lambda x: x
        def g(x):
            return 7
    """,
    "a wrapped function": """
        @wrapped
        def f(x):
            return x
        def g(x):
            return 7
    """,
    "a function of a function": """
        def outer():
            def inner(x):
                return x
            return inner
        f = outer()
        def g(x):
            return 7
    """,
}
HEAD = """
import functools
def decorated(function):
    return function
def twice(number):
    return decorated
def wrapped(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x)
    return wrapper
"""


def imported(folder: Path, text: str, name: str = "drift_sdk_sources") -> ModuleType:
    """A module with a text of its own."""
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SOURCES)
def test_sources_are_those_of_inspect(name: str, tmp_path: Path) -> None:
    function = imported(tmp_path, HEAD + textwrap.dedent(SOURCES[name])).f
    assert source_lines(function) == inspect.getsourcelines(function)


def test_most_sources_are_found_without_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(functions())
    monkeypatch.setattr(inspect, "getsourcelines", None)
    for function in found:
        source_lines(function)


def test_triton_takes_quick_sources_of_this_package_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(module, "source_lines", lambda function: taken.append(function) or (["x"], 1))
    own, triton_module = next(functions()), triton.runtime.jit
    other = imported(tmp_path, "def f(x):\n    return x\n", "drift_sdk_other").f
    nameless = imported(tmp_path, "def f(x):\n    return x\n", "nameless").f
    nameless.__module__ = None
    with quick_sources():
        assert triton_module.inspect.getsourcelines(own) == (["x"], 1)
        assert triton_module.inspect.signature is inspect.signature
        for each in (test_sources_are_those_of_inspect, other, nameless, Path):
            assert triton_module.inspect.getsourcelines(each) == inspect.getsourcelines(each)
    assert taken == [own]
    assert triton_module.inspect is inspect


def test_device_functions_and_kernels_have_quick_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def noted(function: Any) -> tuple[list[str], int]:
        taken.append(function)
        return inspect.getsourcelines(function)

    monkeypatch.setattr(module, "source_lines", noted)
    function = next(functions())
    monkeypatch.setattr(triton, "jit", JITFunction)
    assert device_function(function).raw_src == inspect.getsourcelines(function)[0]
    assert RepeatedKernel(function).raw_src == inspect.getsourcelines(function)[0]
    assert taken == [function, function]


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
