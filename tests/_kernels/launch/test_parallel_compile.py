"""Kernels are handed to worker processes one by one; workers that fail delay nothing."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from msgspec.structs import replace

from drift_sdk._kernels.launch import parallel_compile
from drift_sdk._kernels.launch.parallel_compile import (
    KernelToCompile,
    compile_kernels,
    missing_kernels,
    record,
    recorded_kernels,
)

WORKER = """
import os, pickle, pickletools, sys

class Skipped(pickle.Unpickler):
    def find_class(self, module, name):
        return lambda *arguments: arguments

while True:
    try:
        kernel = Skipped(sys.stdin.buffer).load()
    except EOFError:
        break
    with open({log!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{kernel}}\\n")
    {answer}
"""
ANSWER = 'os.write(1, b".")'


def kernels(number: int) -> list[KernelToCompile]:
    return [
        KernelToCompile(
            module="m",
            name=f"kernel{index}",
            signature={},
            constants={(0,): index},
            attributes={},
            backend="cuda",
            arch=90,
            warp_size=32,
            options={},
        )
        for index in range(number)
    ]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces the worker by a module that writes down what it gets, and answers as it is told."""

    def use(answer: str) -> Path:
        log = tmp_path / "log"
        (tmp_path / "stand_in_worker.py").write_text(WORKER.format(log=str(log), answer=answer))
        monkeypatch.setattr(parallel_compile, "WORKER", "stand_in_worker")
        monkeypatch.syspath_prepend(tmp_path)
        return log

    return use


def test_each_kernel_goes_to_one_worker(worker) -> None:
    log, fractions = worker(ANSWER), []
    compile_kernels(kernels(5), num_processes=2, on_progress=fractions.append)
    lines = log.read_text().splitlines()
    for index in range(5):
        assert sum(f"kernel{index}" in line for line in lines) == 1
    assert len({line.split()[0] for line in lines}) <= 2
    assert fractions == [0.2, 0.4, 0.6, 0.8, 1.0]


@pytest.mark.parametrize("answer", ["sys.exit(3)", 'os.write(1, b"?")'])
def test_workers_that_fail_end_the_wait(answer: str, worker) -> None:
    worker(answer)
    fractions: list[float] = []
    compile_kernels(kernels(3), num_processes=1, on_progress=fractions.append)
    assert fractions == []


def test_nothing_is_compiled_without_an_interpreter(worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that embeds Python may not know where it is."""
    log = worker(ANSWER)
    monkeypatch.setattr(sys, "executable", "")
    compile_kernels(kernels(1))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compile_kernels(kernels(1))
    assert not log.exists()


ELSEWHERE = """
from pathlib import Path

from msgspec import Struct

class Writing(Struct, frozen=True):
    folder: str
    number: int

    @property
    def is_compiled(self):
        return Path(self.folder, str(self.number)).exists()

    def make(self):
        print("what compilers print")
        if self.number == 1:
            raise RuntimeError("a kernel that does not compile")
        Path(self.folder, str(self.number)).write_text("compiled")
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the path, with a compilation that writes a file."""
    (tmp_path / "compiled_elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("compiled_elsewhere")
    del sys.modules["compiled_elsewhere"]


def test_a_worker_makes_whatever_it_gets(elsewhere: ModuleType, tmp_path: Path) -> None:
    """One that fails does not end it."""
    compilations = [elsewhere.Writing(str(tmp_path), number) for number in range(4)]
    fractions: list[float] = []
    compile_kernels(compilations, num_processes=1, on_progress=fractions.append)
    assert fractions == [0.25, 0.5, 0.75, 1.0]
    assert missing_kernels(compilations) == [compilations[1]]


def test_compilations_are_recorded_once(elsewhere: ModuleType, tmp_path: Path) -> None:
    first, second = (elsewhere.Writing(str(tmp_path), number) for number in range(2))
    with recorded_kernels() as kernels:
        for each in (first, second, elsewhere.Writing(str(tmp_path), 0)):
            record(each)
    assert kernels == [first, second]


class Launched:
    """A kernel that keeps what reaches Triton."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bool]] = []

    def run(self, x: torch.Tensor, number: int, *, grid: tuple[int, ...], warmup: bool) -> None:
        self.found.append((number, warmup))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched()
    monkeypatch.setattr(parallel_compile, "launched_kernels", lambda: [found])
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace()))
    triton.runtime.driver.active.get_current_device = lambda: 0
    return found


def test_repeated_launches_reach_triton_once(launched: Launched) -> None:
    x, options = torch.zeros(64), {"grid": (1,), "warmup": False}
    for _ in range(2):
        with recorded_kernels():
            for _ in range(3):
                launched.run(x, 1, **options)
                launched.run(torch.ones(64), 2, **options)
            assert launched.found == [(1, True), (2, True)]
            launched.run(x[1:], 1, **options)  # not aligned
            triton.runtime.driver.active.get_current_device = lambda: 1
            launched.run(x, 1, **options)
            assert launched.found[2:] == [(1, True)] * 2
        launched.found.clear()
        triton.runtime.driver.active.get_current_device = lambda: 0


def test_launches_of_other_threads_and_compilations_all_reach_triton(launched: Launched) -> None:
    x = torch.zeros(64)

    def launch(number: int, **options: Any) -> None:
        for _ in range(2):
            launched.run(x, number, grid=(1,), **options)

    with recorded_kernels():
        launch(1, warmup=True)
        thread = threading.Thread(target=launch, args=(2,), kwargs={"warmup": False})
        thread.start()
        thread.join()
    launch(3, warmup=False)
    assert launched.found == [(1, True)] * 2 + [(2, False)] * 2 + [(3, False)] * 2


def test_a_kernel_is_made_with_its_module_and_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_a_kernel.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    made: list[object] = []
    monkeypatch.setattr(KernelToCompile, "compile", lambda kernel: (kernel, kernel.module in sys.modules))
    monkeypatch.setattr(KernelToCompile, "compile_launcher", lambda kernel, compiled: made.append(compiled))
    kernel = replace(kernels(1)[0], module="module_of_a_kernel")
    kernel.make()
    assert made == [(kernel, True)]
    del sys.modules["module_of_a_kernel"]


@pytest.mark.parametrize("makes_launchers", [False, True], ids=["one for all", "one each"])
def test_launchers_are_made_by_versions_that_compile_one_for_each_kernel(
    makes_launchers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[object]()
    module = SimpleNamespace(CudaLauncher=lambda source, metadata: found.append((source, metadata)))
    if makes_launchers:
        module.make_launcher = None
    monkeypatch.setattr("triton.backends.nvidia.driver", module)
    monkeypatch.setattr(KernelToCompile, "source", lambda kernel: kernel.name)
    kernels(1)[0].compile_launcher(SimpleNamespace(metadata="metadata"))
    assert found == [("kernel0", "metadata")] * makes_launchers


def test_a_kernel_is_compiled_if_its_metadata_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        KernelToCompile, "cache_file", lambda kernel: None if kernel.name == "kernel1" else "a file"
    )
    assert missing_kernels(kernels(3)) == [kernels(3)[1]]


def test_kernels_of_several_recordings_are_missing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelToCompile, "cache_file", lambda kernel: None)
    assert missing_kernels([*kernels(2), *kernels(3)]) == kernels(3)
