"""Uninitialised memory is poisoned: whatever of the package reads it finds NaN."""

from __future__ import annotations

import os
import signal
import sys

# Before torch reads it. Tests run side by side, and torch's threads wait by spinning: with more than one each
# they would take the cores from one another. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import placement
import pytest
import quick_interpreter
import torch
from hypothesis import settings

# Read when a kernel is decorated: without a GPU, Triton's interpreter runs it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    quick_interpreter.install()

# A busy machine may pause a test for longer than the default deadline; CI repeats what a desk found.
settings.register_profile("drift", deadline=None, print_blob=True)
settings.load_profile("drift")

# A shell's background jobs ignore Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--executor",
        choices=placement.EXECUTORS,
        default="eager",
        help="what runs the engines of tests/engine/test_constraints.py, tests/parity/test_batching.py and "
        "tests/parity/test_processors.py: eagerly on the CPU, or by graphs on a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    placement.use(config.getoption("--executor"))


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make):
        def empty(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if not sys._getframe(1).f_globals["__name__"].startswith("drift_sdk"):
                return tensor

            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
