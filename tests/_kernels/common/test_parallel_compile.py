"""Kernels are handed to worker processes one by one; workers that fail delay nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from drift_sdk._kernels.common import parallel_compile
from drift_sdk._kernels.common.parallel_compile import KernelToCompile, compile_kernels, settle_cache_key

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
CALLS = """
import triton.language as tl
from triton.runtime.jit import JITFunction

FACTOR, OFFSET = tl.constexpr(2), tl.constexpr(3)

@JITFunction
def scaled(x):
    return x * FACTOR

@JITFunction
def moved(x):
    return scaled(x) + OFFSET

@JITFunction
def kernel(x):
    moved(x)
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


def test_keys_do_not_depend_on_the_order_of_computing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that computes the key of a called function first finds what another process compiled."""
    (tmp_path / "functions_that_call.py").write_text(CALLS)
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for first in ("kernel", "moved", "scaled"):
        monkeypatch.delitem(sys.modules, "functions_that_call", raising=False)
        module = importlib.import_module("functions_that_call")
        settle_cache_key(getattr(module, first))
        settle_cache_key(module.kernel)
        keys.append(module.kernel.cache_key)
    assert len(set(keys)) == 1
