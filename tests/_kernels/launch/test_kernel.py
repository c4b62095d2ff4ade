"""Repeated launches of kernels go to the compiled kernel, and the others to Triton."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from drift_sdk._kernels.launch import kernel as kernel_module

SOURCE = """
from drift_sdk._kernels.launch.kernel import RepeatedKernel

@RepeatedKernel
def add(x_ptr, y_ptr, size, scale, SIZE):
    '''Add.'''
"""


class Launched:
    """A compiled kernel that keeps its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values: self.launches.append((grid, values))


class Triton:
    """A stand-in for Triton's launch, which returns a new compiled kernel each time."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.options: list[dict[str, Any]] = []
        self.compiles = True

    def run(self, warmup: bool, options: dict[str, Any]) -> Launched | None:
        self.calls.append(warmup)
        self.options.append(options)
        return Launched() if self.compiles else None


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Triton:
    found = Triton()

    def run(kernel: Any, *values: Any, warmup: bool, **options: Any) -> Launched | None:
        return found.run(warmup, options)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "module_of_add.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_add", raising=False)
    return importlib.import_module("module_of_add").add


def aligned(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor at an address that is a multiple of 64, which the allocator gives."""
    return torch.zeros(64, dtype=dtype)


def test_a_repeated_launch_gets_all_arguments_in_their_order(triton: Triton, add: Any) -> None:
    compiled = add[(7,)](aligned(), aligned(), 64, SIZE=8, scale=0.5, num_warps=4)
    x, y = aligned(), aligned()
    assert add[(9, 2)](x, y, 64, SIZE=8, scale=0.5, num_warps=4) is compiled
    assert triton.calls == [False]
    ((grid, values),) = compiled.launches
    assert grid == (9, 2, 1)
    assert values[0] is x and values[1] is y and values[2:] == (64, 0.5, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"x_ptr": aligned(torch.float16)},
        {"x_ptr": aligned()[1:]},
        {"x_ptr": None},
        {"size": 2},
        {"size": True},
        {"scale": -0.0},
        {"SIZE": 16},
        {"num_warps": 8},
        {"launch_pdl": True},
    ],
    ids=["type", "alignment", "none", "number", "bool", "sign", "constant", "warps", "option"],
)
def test_what_triton_may_specialise_on_is_looked_up_by_triton(
    triton: Triton, add: Any, change: dict[str, Any]
) -> None:
    launch = {"x_ptr": aligned(), "y_ptr": aligned(), "size": 1, "scale": 0.0, "SIZE": 8, "num_warps": 4}
    first = add[(1,)](**launch)
    other = add[(1,)](**launch | change)
    assert other is not first
    assert add[(1,)](**launch) is first
    assert add[(1,)](**launch | change) is other
    assert triton.calls == [False, False]


def test_devices_have_compiled_kernels_of_their_own(
    triton: Triton, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = {"x_ptr": aligned(), "y_ptr": aligned(), "size": 1, "scale": 0.0, "SIZE": 8}
    first = add[(1,)](**launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert add[(1,)](**launch) is not first


def test_products_and_sums_are_fused_unless_a_launch_says_otherwise(triton: Triton, add: Any) -> None:
    """Whatever Triton's default is."""
    add.warmup(aligned(), aligned(), 1, 0.0, 8, grid=(1,))
    add[(1,)](aligned(), aligned(), 1, 0.0, 8)
    add[(1,)](aligned(), aligned(), 1, 0.0, 8, enable_fp_fusion=False)
    assert [options["enable_fp_fusion"] for options in triton.options] == [True, True, False]


def test_first_and_repeated_launches_are_observed(triton: Triton, add: Any) -> None:
    """The check of programmatic launches is such an observer."""
    seen = list[tuple[Any, ...]]()
    launch = {"x_ptr": aligned(), "y_ptr": aligned(), "size": 1, "scale": 0.0, "SIZE": 8}
    with kernel_module.observed_launches(lambda *found: seen.append(found)):
        compiled = add[(1,)](**launch)
        add[(1,)](**launch)
        add.warmup(**launch, grid=(1,))  # launches nothing
        add[(0,)](**launch)  # as this
    add[(1,)](**launch)
    assert seen == [(add, compiled, (), launch)] * 2


def test_all_observers_see_a_launch(triton: Triton, add: Any) -> None:
    """Steps may be captured by two threads, each with an observer of its own."""
    seen = list[str]()
    with kernel_module.observed_launches(lambda *found: seen.append("outer")):
        with kernel_module.observed_launches(lambda *found: seen.append("inner")):
            add[(1,)](aligned(), aligned(), 1, 0.0, 8)
        add[(1,)](aligned(), aligned(), 1, 0.0, 8)
    assert seen == ["outer", "inner", "outer"]


def test_an_observer_that_is_removed_during_a_launch_hides_it_from_no_other(triton: Triton, add: Any) -> None:
    seen = list[str]()
    with ExitStack() as first, kernel_module.observed_launches(lambda *found: first.close()):
        first.enter_context(kernel_module.observed_launches(lambda *found: seen.append("first")))
        with kernel_module.observed_launches(lambda *found: seen.append("second")):
            add[(1,)](aligned(), aligned(), 1, 0.0, 8)
    assert seen == ["first", "second"]


def test_keys_of_the_cache_are_settled_before_triton_compiles(
    triton: Triton, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = list[tuple[Any, int]]()
    settle = kernel_module.settle_cache_key
    monkeypatch.setattr(
        kernel_module,
        "settle_cache_key",
        lambda kernel: settled.append((kernel, len(triton.calls))) or settle(kernel),
    )
    add.warmup(aligned(), aligned(), 1, 0.0, 8, grid=(1,))
    add[(1,)](aligned(), aligned(), 1, 0.0, 8)
    assert settled == [(add, 0), (add, 1)]


def test_launches_are_not_observed_after_an_error(triton: Triton, add: Any) -> None:
    seen = list[Any]()
    with (
        pytest.raises(RuntimeError, match="failed"),
        kernel_module.observed_launches(lambda *found: seen.append(found)),
    ):
        raise RuntimeError("failed")
    add[(1,)](aligned(), aligned(), 1, 0.0, 8)
    assert not seen


def test_source_is_read_when_a_kernel_is_first_used(add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine uses less than half of the kernels of the modules that it imports."""
    read = list[Any]()
    lines = inspect.getsourcelines
    monkeypatch.setattr(inspect, "getsourcelines", lambda function: read.append(function) or lines(function))
    assert add.__module__ == "module_of_add"
    assert add.__doc__ == "Add."
    assert not read
    assert add.arg_names == ["x_ptr", "y_ptr", "size", "scale", "SIZE"]
    assert add.__name__ == "add" and "def add(" in add.src
    assert len(read) == 1
    with pytest.raises(AttributeError, match="nothing"):
        add.nothing  # noqa: B018


def test_source_that_could_not_be_read_is_read_again(add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> None:
        raise OSError("could not get source code")

    with monkeypatch.context() as patch:
        patch.setattr(inspect, "getsourcelines", fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="Python file"):
                add.arg_names  # noqa: B018
    assert add.arg_names == ["x_ptr", "y_ptr", "size", "scale", "SIZE"]


def test_threads_that_use_a_kernel_at_once_wait_until_its_source_is_read(
    add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, may_go_on, found = threading.Event(), threading.Event(), list[Any]()
    lines = inspect.getsourcelines

    def slow(function: Any) -> Any:
        is_reading.set()
        may_go_on.wait(10)
        return lines(function)

    monkeypatch.setattr(inspect, "getsourcelines", slow)
    threads = [threading.Thread(target=lambda: found.append(add.arg_names)) for _ in range(3)]
    for thread in threads:
        thread.start()
    is_reading.wait(10)
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert found == [["x_ptr", "y_ptr", "size", "scale", "SIZE"]] * 3


def test_warm_ups_and_kernels_that_were_not_compiled_are_not_kept(triton: Triton, add: Any) -> None:
    launch = {"x_ptr": aligned(), "y_ptr": aligned(), "size": 1, "scale": 0.0, "SIZE": 8}
    add.warmup(**launch, grid=(1,))
    triton.compiles = False
    assert add[(1,)](**launch) is None
    triton.compiles = True
    compiled = add[(1,)](**launch)
    assert add[(1,)](**launch) is compiled
    assert triton.calls == [True, False, False]


def test_interpreted_kernels_are_tritons() -> None:
    assert kernel_module.is_interpreted()
    assert not isinstance(kernel_module.kernel(lambda x_ptr: None), kernel_module.RepeatedKernel)
