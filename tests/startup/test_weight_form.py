"""The form of a model's weights where the configuration names none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs
from quantised_files import FORMATS
from tiny_llama import tiny_llama

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.families import read_spec
from drift_sdk.quantised.scheme import BLOCK_SCHEME, config_scheme
from drift_sdk.spec.model import Experts, ModelSpec
from drift_sdk.startup import model_parts
from drift_sdk.startup.model_parts import choose_weight_form, with_weight_form

GPU, CPU = torch.device("cuda"), torch.device("cpu")
PLAIN = read_spec(tiny_llama())


def quantised(kind: str) -> ModelSpec:
    return structs.replace(PLAIN, quantisation=config_scheme({"quantization_config": FORMATS[kind].config}))


def form_of(
    model: ModelSpec, *, executor: str = "graph", device: torch.device = GPU, **settings: Any
) -> str | None:
    config = EngineConfig(**settings)
    found = with_weight_form(config, model, executor, device, torch.bfloat16)
    assert structs.replace(found, weights=config.weights) == config
    return found.weights


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels multiply by quantised weights."""
    monkeypatch.setattr(model_parts, "_has_products", lambda device, dtype: True)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("kind", [*FORMATS, "gguf"])
def test_weights_that_kernels_multiply_by_stay_quantised(kind: str) -> None:
    model = structs.replace(PLAIN, quantisation=BLOCK_SCHEME) if kind == "gguf" else quantised(kind)
    assert form_of(model) == "stored"
    for settings in ({"load": "random"}, {"tensor_parallel": 2}):
        assert form_of(model, **settings) == "expanded"
    assert form_of(model, executor="eager") == "expanded"
    for weights in ("expanded", "stored"):
        assert form_of(model, weights=weights) == weights


@pytest.mark.usefixtures("products")
def test_experts_stay_quantised_too() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    names = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    layers = read_spec(tiny_llama(**names, **sizes)).layers
    assert isinstance(layers[0].channel, Experts)
    assert form_of(structs.replace(quantised("awq"), layers=layers)) == "stored"
    assert form_of(structs.replace(PLAIN, layers=layers)) == "expanded"


@pytest.mark.usefixtures("products")
def test_weights_that_are_not_quantised_are_expanded() -> None:
    assert form_of(PLAIN) == "expanded"


def test_weights_are_expanded_without_kernels_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, torch.dtype]] = []

    def has_products(device: torch.device, dtype: torch.dtype) -> bool:
        asked.append((device, dtype))
        return False

    monkeypatch.setattr(model_parts, "_has_products", has_products)
    assert form_of(quantised("awq")) == "expanded"
    assert asked == [(GPU, torch.bfloat16)]
    assert form_of(quantised("awq"), executor="eager", device=CPU) == "expanded"
    assert len(asked) == 1  # on a machine without a GPU, the packages for one are not imported


def test_quantised_files_are_not_quantised_again() -> None:
    model = structs.replace(PLAIN, quantisation=BLOCK_SCHEME)
    assert choose_weight_form(EngineConfig(weights="fp8", load="random"), model) == "fp8"
    with pytest.raises(ConfigError, match="weights='fp8': expected None, .* the files are quantised .gguf"):
        choose_weight_form(EngineConfig(weights="fp8"), model)
