from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Kernels run compiled where there is a GPU, else in Triton's interpreter (see the outer conftest)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def real_sizes_need_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("too large for the interpreter")
