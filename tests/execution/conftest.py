from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from references.gated_delta import advance_prompts_reference, advance_rows_reference

from drift_sdk._kernels.attention import latent
from drift_sdk._kernels.attention.decode import AttentionConfig
from drift_sdk.execution.forward import gated_delta


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs per attention launch: the interpreter runs them one after the other, and their number does
    not affect the result."""
    if torch.cuda.is_available():
        return

    name = "drift_sdk.execution.forward.attention.attention_config"
    monkeypatch.setattr(name, lambda *_: AttentionConfig(num_programs=4))
    monkeypatch.setattr("drift_sdk._kernels.attention.decode.FEW_PARTITIONS", 2)
    monkeypatch.setattr("drift_sdk._kernels.attention.decode.MIN_PROGRAMS", 0)
    limits = replace(latent.gpu_limits(), num_multiprocessors=4)
    monkeypatch.setattr(latent, "gpu_limits", lambda: limits)
    monkeypatch.setattr(latent, "FOLDED_SHARE", 0)  # as with more programs


@pytest.fixture
def gated_delta_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated delta rule by its reference: the kernels in CUDA C++ do not run in the interpreter."""
    monkeypatch.setattr(gated_delta, "advance_rows", advance_rows_reference)
    monkeypatch.setattr(gated_delta, "advance_prompts", advance_prompts_reference)
