"""The device of kernel tests, and the tests that need a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """The device of a test's tensors. Kernels are compiled where there is a GPU; else they run in Triton's
    interpreter, see tests/conftest.py."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def skip_gpu_tests_without_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("too large for the interpreter")


@pytest.fixture(autouse=True)
def few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few partitions of attention loaded together: each takes the interpreter a millisecond, and their number
    does not affect the result."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("drift_sdk._kernels.attention.decode.LOADED_NUMBERS", 64)
        monkeypatch.setattr("drift_sdk._kernels.attention.decode.FEW_PARTITIONS", 4)
        monkeypatch.setattr("drift_sdk._kernels.attention.decode.MIN_PROGRAMS", 0)
