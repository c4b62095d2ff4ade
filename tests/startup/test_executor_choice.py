"""Settings that the graph executor does not support."""

from __future__ import annotations

import pytest
import torch

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.speculation import Speculation
from drift_sdk.startup import executor_factory
from drift_sdk.startup.executor_factory import choose_executor

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which graphs can run."""
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)


def test_quantised_weights_run_on_graphs() -> None:
    speculation = Speculation(draft="head", draft_weights="fp8")
    forms = ({"weights": form} for form in ("int4", "nvfp4", "stored", "expanded"))
    for settings in ({}, {"kv_dtype": "fp8"}, {"weights": "fp8", "speculation": speculation}, *forms):
        assert choose_executor(EngineConfig(**settings), GPU) == ("graph", None)


def test_setting_without_graphs_is_named() -> None:
    reason = "CUDA graphs do not support a KV cache in NVFP4"
    assert choose_executor(EngineConfig(kv_dtype="nvfp4"), GPU) == ("eager", reason)
    for config in ({"executor": "graph"}, {"strict_performance": True}):
        with pytest.raises(ConfigError, match=reason):
            choose_executor(EngineConfig(kv_dtype="nvfp4", **config), GPU)
