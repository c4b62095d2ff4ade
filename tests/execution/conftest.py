from __future__ import annotations

import pytest
import torch

from drift_sdk._kernels.paged_attention import AttentionConfig


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other; their number is no part of what they compute."""
    if torch.cuda.is_available():
        return

    for module in ("decode_forward", "eagle_rounds"):
        name = f"drift_sdk.execution.{module}.AttentionConfig"
        monkeypatch.setattr(name, lambda: AttentionConfig(num_programs=4))
