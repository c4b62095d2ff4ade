"""Models with options that the graph executor does not support."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs
from tiny_llama import tiny_llama

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.rope import Rope
from drift_sdk.startup import executor_factory
from drift_sdk.startup.executor_factory import choose_executor
from drift_sdk.startup.graph_support import options_without_graphs

GPU = torch.device("cuda")
PLAIN = DecoderConfig.from_hf(tiny_llama())


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which graphs can run."""
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)


def test_plain_models_run_on_graphs() -> None:
    assert options_without_graphs(PLAIN) == ()
    assert choose_executor(EngineConfig(), GPU, PLAIN) == ("graph", None)


@pytest.mark.parametrize(
    "changes, option",
    [
        ({"windows": (8,)}, "sliding windows"),
        ({"ropes": (*PLAIN.ropes, Rope(theta=5e5, rotary_dim=16))}, "several rotations"),
        ({"layer_ropes": (None,)}, "layers without rotation"),
        ({"ropes": (Rope(theta=5e5, rotary_dim=8),)}, "partial rotation"),
        ({"attention_scale": 0.3}, "attention scales"),
        ({"activation": "gelu_tanh"}, "the activation gelu_tanh"),
        ({"has_offset_norms": True}, "offset norms"),
        ({"has_post_norms": True}, "norms of outputs"),
        ({"embedding_multiplier": 12.0}, "embedding multipliers"),
        ({"residual_multiplier": 0.22}, "residual multipliers"),
        ({"logits_divisor": 8.0}, "divisors of logits"),
    ],
)
def test_option_without_graphs_is_named(changes: dict[str, Any], option: str) -> None:
    model = structs.replace(PLAIN, **changes)
    assert options_without_graphs(model) == (option,)
    reason = f"CUDA graphs do not support {option} of this model"
    assert choose_executor(EngineConfig(), GPU, model) == ("eager", reason)
    for config in (EngineConfig(executor="graph"), EngineConfig(strict_performance=True)):
        with pytest.raises(ConfigError, match=reason):
            choose_executor(config, GPU, model)
