"""Settings of all tests. Uninitialised tensors are filled with NaN, so that code that reads them fails."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator

# Set before torch is imported. Tests run in parallel processes, and torch's threads spin while they wait:
# with more than one thread each, processes would take the cores from each other. Child processes inherit the
# setting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import placement
import pytest
import quick_interpreter
import torch
from hypothesis import settings
from poisoned_memory import can_map, map_nan
from steady_dots import install as install_steady_dots

from drift_sdk import serving

# Read when a kernel is decorated. Without a GPU, kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    quick_interpreter.install()

MAX_CACHED_BYTES = 2**30
"""Bytes of the GPU that a process keeps from one test to the next."""

# No deadline, because a busy machine may pause a test. A failing example is printed so that it can be
# repeated.
settings.register_profile("drift", deadline=None, print_blob=True)
settings.load_profile("drift")

# A shell's background jobs ignore SIGINT, and programs that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--executor",
        choices=placement.EXECUTORS,
        default="eager",
        help="executor of the engines in tests/engine/test_constraints.py, tests/parity/test_batching.py and "
        "tests/parity/test_processors.py: eager on the CPU, or graphs on a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    placement.use(config.getoption("--executor"))


def pytest_collection_finish() -> None:
    """Have the garbage collector, which runs often in tests, not look at what imported modules hold."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a GPU, engines measure no launch configurations when they start, and find none of this machine."""
    if torch.cuda.is_available():
        from drift_sdk.startup import graph_startup

        monkeypatch.setattr(graph_startup, "EFFORTS", graph_startup.EFFORTS | {"short": None})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.fixture(autouse=True)
def steady_seeds(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Requests that name no seed draw the same tokens in each run of a test."""
    monkeypatch.setattr(serving, "SEEDS", random.Random(request.node.nodeid))


@pytest.fixture(autouse=True)
def freed_gpu_memory() -> Iterator[None]:
    """On a GPU, which several processes share, memory that torch caches is given back after a test."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MAX_CACHED_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def steady_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, the bits of a row do not depend on its place in a matrix, whatever the CPU."""
    if not torch.cuda.is_available():
        install_steady_dots(monkeypatch)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills tensors that the package makes with torch.empty: floats with NaN, integers with their maximum."""

    def poisoned(make):
        def empty(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if not sys._getframe(1).f_globals["__name__"].startswith("drift_sdk"):
                return tensor

            if can_map(tensor):
                return map_nan(tensor.shape, tensor.dtype)

            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
