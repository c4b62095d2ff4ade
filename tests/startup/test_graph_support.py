"""Models with options that the graph executor does not support."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs
from quantised_files import FORMATS
from tiny_llama import tiny_llama

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.rope import Rope
from drift_sdk.quantised.scheme import BLOCK_SCHEME, config_scheme
from drift_sdk.speculation import Speculation
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
    assert options_without_graphs(PLAIN, EngineConfig()) == ()
    assert choose_executor(EngineConfig(), GPU, PLAIN) == ("graph", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (8,)},
        {"ropes": (*PLAIN.ropes, Rope(theta=5e5, rotary_dim=16))},
        {"layer_ropes": (None,)},
        {"ropes": (Rope(theta=5e5, rotary_dim=8),)},
        {"attention_scale": 0.3},
        {"activation": "gelu_tanh"},
        {"has_offset_norms": True},
        {"has_post_norms": True},
        {"embedding_multiplier": 12.0},
        {"residual_multiplier": 0.22},
        {"logits_divisor": 8.0},
    ],
    ids=str,
)
def test_options_of_new_families_run_on_graphs(changes: dict[str, Any]) -> None:
    assert choose_executor(EngineConfig(), GPU, structs.replace(PLAIN, **changes)) == ("graph", None)


def test_quantised_weights_run_on_graphs() -> None:
    speculation = Speculation(draft="head", draft_weights="fp8")
    quantising = ({"weights": form} for form in ("int4", "nvfp4"))
    for settings in (*quantising, {"weights": "fp8", "speculation": speculation}):
        assert choose_executor(EngineConfig(**settings), GPU, PLAIN) == ("graph", None)
    schemes = [config_scheme({"quantization_config": kind.config}) for kind in FORMATS.values()]
    for scheme in (BLOCK_SCHEME, *schemes):
        model = structs.replace(PLAIN, quantisation=scheme)
        for weights in (None, "expanded", "stored"):
            assert choose_executor(EngineConfig(weights=weights), GPU, model) == ("graph", None)


def test_option_without_graphs_is_named() -> None:
    assert choose_executor(EngineConfig(kv_dtype="fp8"), GPU, PLAIN) == ("graph", None)
    reason = "CUDA graphs do not support a KV cache in NVFP4 of this model"
    assert choose_executor(EngineConfig(kv_dtype="nvfp4"), GPU, PLAIN) == ("eager", reason)
    for config in ({"executor": "graph"}, {"strict_performance": True}):
        with pytest.raises(ConfigError, match=reason):
            choose_executor(EngineConfig(kv_dtype="nvfp4", **config), GPU, PLAIN)


def test_quantised_experts_do_not_run_on_graphs() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = DecoderConfig.from_hf(
        tiny_llama(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], head_dim=8, **experts)
    )
    assert options_without_graphs(model, EngineConfig()) == ()
    assert options_without_graphs(model, EngineConfig(weights="int4")) == ("quantised weights of experts",)


def test_quantised_files_are_not_quantised_again() -> None:
    model = structs.replace(PLAIN, quantisation=BLOCK_SCHEME)
    assert choose_executor(EngineConfig(weights="stored", load="random"), GPU, model) == ("graph", None)
    with pytest.raises(ConfigError, match="weights='fp8': expected None, .* the files are quantised .gguf"):
        choose_executor(EngineConfig(weights="fp8"), GPU, model)
