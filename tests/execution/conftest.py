from __future__ import annotations

import pytest
import torch

from drift_sdk._kernels.attention.paged_attention import AttentionConfig


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other; their number is no part of what they compute."""
    if torch.cuda.is_available():
        return

    name = "drift_sdk.execution.forward.attention_groups.AttentionConfig"
    monkeypatch.setattr(name, lambda: AttentionConfig(num_programs=4))
