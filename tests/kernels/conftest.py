from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Kernels run compiled where there is a GPU, else in Triton's interpreter (see the outer conftest)."""
    return "cuda" if torch.cuda.is_available() else "cpu"
