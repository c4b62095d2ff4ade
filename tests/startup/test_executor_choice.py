"""Settings that the graph executor does not support."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from drift_sdk._kernels.launch.gpu_limits import limited_gpu
from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.speculation import Chain, DynamicTree, PartialVerification, Speculation, StaticTree
from drift_sdk.startup import executor_factory
from drift_sdk.startup.executor_factory import check_chain, choose_executor
from drift_sdk.startup.model_startup import _choose
from perf.cross_compile import GPUS

GPU = torch.device("cuda")
CHAIN_OF_16 = StaticTree(tuple((0,) * length for length in range(1, 17)))
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


DEVICE_OBSTACLE = executor_factory._device_obstacle


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which graphs can run."""
    monkeypatch.setattr(executor_factory, "_device_obstacle", lambda device: None)


def test_quantised_weights_run_on_graphs() -> None:
    speculation = Speculation(draft="head", draft_weights="fp8")
    forms = ({"weights": form} for form in ("int4", "nvfp4", "stored", "expanded"))
    for settings in ({}, {"kv_dtype": "fp8"}, {"weights": "fp8", "speculation": speculation}, *forms):
        assert choose_executor(EngineConfig(**settings), GPU) == ("graph", None)


@pytest.mark.parametrize(
    ("allocator", "capability", "reason"),
    [
        ("native", (9, 0), None),
        ("native", (8, 0), None),
        ("native", (7, 5), "the kernels need compute capability 8.0, A GPU has 7.5"),
        ("cudaMallocAsync", (9, 0), "CUDA graphs need torch's native allocator, here it is cudaMallocAsync"),
        ("pluggable", (9, 0), "CUDA graphs need torch's native allocator, here it is pluggable"),
    ],
)
def test_device_or_allocator_without_graphs_is_named(
    allocator: str, capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("is_available", True),
        ("get_device_capability", capability),
        ("get_device_name", "A GPU"),
        ("get_allocator_backend", allocator),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)
    monkeypatch.setattr(executor_factory, "_device_obstacle", DEVICE_OBSTACLE)
    monkeypatch.setattr(executor_factory, "_is_installed", lambda package: True)
    name, found = choose_executor(EngineConfig(), GPU)
    assert name == ("graph" if reason is None else "eager")
    assert found == reason if reason is None else found is not None and found.startswith(reason)


def test_setting_without_graphs_is_named() -> None:
    reason = "CUDA graphs do not support a KV cache in NVFP4"
    assert choose_executor(EngineConfig(kv_dtype="nvfp4"), GPU) == ("eager", reason)
    for config in ({"executor": "graph"}, {"strict_performance": True}):
        with pytest.raises(ConfigError, match=reason):
            choose_executor(EngineConfig(kv_dtype="nvfp4", **config), GPU)


@pytest.mark.parametrize(
    ("sizes", "is_supported"),
    [
        ((32, 16), True),
        ((128, 128), True),
        ((96, 256), True),
        ((16, 16), False),
        ((160, 16), False),
        ((64, 24), False),
    ],
)
def test_recurrent_layers_without_kernels_are_named(sizes: tuple[int, int], is_supported: bool) -> None:
    keys, values = sizes
    changes = {"model_type": "qwen3_5_text", "linear_key_head_dim": keys, "linear_value_head_dim": values}
    changes |= {"num_hidden_layers": 4, "head_dim": 64, "num_key_value_heads": 1}
    model = read_spec(CONFIG | changes)
    name, reason = choose_executor(EngineConfig(), GPU, model)
    assert name == ("graph" if is_supported else "eager")
    assert is_supported or f"this model has {keys} and {values}" in str(reason)


def test_biases_of_gates_are_named() -> None:
    changes = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 64, "num_key_value_heads": 1}
    reason = "CUDA graphs do not support gates of attention with a bias"
    for has_bias, expected in ((False, ("graph", None)), (True, ("eager", reason))):
        model = read_spec(CONFIG | changes | {"attention_bias": has_bias})
        assert choose_executor(EngineConfig(), GPU, model) == expected


@pytest.mark.parametrize(("head_dim", "is_large"), [(128, False), (258, False), (512, False), (514, True)])
def test_heads_that_do_not_fit_a_gpu_are_named(head_dim: int, is_large: bool) -> None:
    model = read_spec(CONFIG | {"head_dim": head_dim})
    reason = f"CUDA graphs support heads of up to 512 dimensions, this model has {head_dim}"
    expected = ("eager", reason) if is_large else ("graph", None)
    assert choose_executor(EngineConfig(), GPU, model) == expected
    if is_large:
        with pytest.raises(ConfigError, match=reason):
            choose_executor(EngineConfig(executor="graph"), GPU, model)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "capability", "is_refused"),
    [
        (256, torch.float32, 86, True),
        (192, torch.float32, 120, True),
        (256, torch.float32, 80, False),
        (256, torch.float32, 90, False),
        (256, torch.bfloat16, 86, False),
        (128, torch.float32, 86, False),
        (320, torch.float32, 90, True),
        (512, torch.bfloat16, 90, False),
    ],
)
def test_heads_in_float32_without_room_run_eagerly(
    head_dim: int, dtype: torch.dtype, capability: int, is_refused: bool
) -> None:
    model = read_spec(CONFIG | {"head_dim": head_dim})
    reason = f"CUDA graphs have no room on this GPU for heads of {head_dim} dimensions in float32"
    with limited_gpu(GPUS[capability]):
        expected = ("eager", reason) if is_refused else ("graph", None)
        assert choose_executor(EngineConfig(), GPU, model, dtype) == expected
        if is_refused:
            for config in (EngineConfig(executor="graph"), EngineConfig(strict_performance=True)):
                with pytest.raises(ConfigError, match=reason):
                    choose_executor(config, GPU, model, dtype)


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "dtype", "capability", "most"),
    [
        (128, 8, torch.bfloat16, 90, 16),
        (256, 16, torch.bfloat16, 90, 15),
        (128, 8, torch.bfloat16, 86, 15),
        (256, 4, torch.bfloat16, 86, 15),
        (256, 8, torch.bfloat16, 86, 7),
        (128, 4, torch.float32, 89, 15),
        (128, 4, torch.bfloat16, 89, 16),
        (512, 16, torch.bfloat16, 90, 16),
    ],
)
def test_chains_longer_than_attention_has_room_for_are_refused(
    head_dim: int, num_heads: int, dtype: torch.dtype, capability: int, most: int
) -> None:
    """Longest chains have 16 drafts."""
    settings = CONFIG | {"head_dim": head_dim, "num_attention_heads": num_heads, "num_key_value_heads": 1}
    config = read_spec(settings)
    with limited_gpu(GPUS[capability]):
        for num_drafts in range(most + 1):
            check_chain(num_drafts, config, dtype)
        for num_drafts in range(most + 1, 17):
            with pytest.raises(
                ConfigError, match=f"num_draft_tokens={num_drafts}: expected at most {most} here"
            ):
                check_chain(num_drafts, config, dtype)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (
            "float32",
            Chain(1),
            'executor=.graph.: expected "eager" or "auto" here: .* heads of 256 dimensions',
        ),
        ("bfloat16", Chain(16), "num_draft_tokens=16: expected at most 7 here"),
        ("bfloat16", CHAIN_OF_16, "num_draft_tokens=16"),
        ("bfloat16", Chain(7), None),
        ("bfloat16", DynamicTree(), None),
    ],
    ids=str,
)
def test_what_has_no_room_is_refused_before_weights_are_downloaded(
    dtype: str, shape: Chain | StaticTree | DynamicTree, message: str | None, tmp_path: Path
) -> None:
    settings = CONFIG | {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    source = resolve(tmp_path, has_weights=False)
    speculation = Speculation(draft="head", shape=shape)
    config = EngineConfig(load="random", executor="graph", dtype=dtype, speculation=speculation)
    refused = nullcontext() if message is None else pytest.raises(ConfigError, match=message)
    with limited_gpu(GPUS[86]), refused:
        _choose(source, config, GPU, getattr(torch, dtype))


def test_models_with_large_heads_are_opened_eagerly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 640}))
    source = resolve(tmp_path, has_weights=False)
    chosen = _choose(source, EngineConfig(load="random"), GPU, torch.bfloat16)
    assert chosen.executor_name == "eager" and "this model has 640" in (chosen.fallback or "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": DynamicTree()}, "expected a Chain with heads of 320 dimensions on CUDA graphs"),
        ({"shape": Chain(2), "checks": True}, "checks=True: expected False with heads of 320 dimensions"),
        ({"partial_verification": PartialVerification()}, "expected None with heads of 320 dimensions"),
        ({"shape": Chain(16)}, None),
    ],
    ids=str,
)
def test_trees_and_views_of_wide_heads_are_refused(
    fields: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 320}))
    source = resolve(tmp_path, has_weights=False)
    config = EngineConfig(load="random", speculation=Speculation(draft="head", **fields))
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        _choose(source, config, GPU, torch.bfloat16)
    eager = _choose(source, replace(config, executor="eager"), GPU, torch.bfloat16)
    assert eager.executor_name == "eager"


async def test_settings_of_the_graph_executor_alone_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        device="cpu",
        executor="eager",
        load="random",
        tuning="full",
        shape_log=tmp_path / "log.json",
        fast_prompts=True,
        step_timeout_s=60.0,
    )
    async with Engine(tmp_path, config):
        pass
    for name in ("tuning", "shape_log", "fast_prompts", "step_timeout_s"):
        assert f"{name} has no effect on the eager executor" in caplog.text
