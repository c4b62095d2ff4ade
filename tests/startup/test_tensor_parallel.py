"""Checks of engines that divide a model between GPUs, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from random_folder import make_random_folder
from tiny_llama import tiny_llama

from drift_sdk import ConfigError, Engine, EngineConfig, RequestError, SamplingParams, inspect
from drift_sdk.families import read_spec
from drift_sdk.models.shard import Shard
from drift_sdk.startup.model_parts import check_division, parallel_devices, shards_of
from drift_sdk.testing import scripted_engine

FIRST = torch.device("cuda", 0)
SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODEL = read_spec(tiny_llama() | SHAPES)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Four GPUs: their names, and pairs that do not reach each other."""
    found: dict[str, Any] = {"names": ["H200"] * 4, "apart": set()}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: found["names"][index])
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in found["apart"]
    )
    return found


def test_one_gpu_needs_nothing() -> None:
    config = EngineConfig()
    assert parallel_devices(config, torch.device("cpu")) == [torch.device("cpu")]
    assert shards_of(config) == [None]
    check_division(config, MODEL, "eager")


def test_gpus_follow_the_first(gpus: dict[str, Any]) -> None:
    config = EngineConfig(tensor_parallel=2)
    assert parallel_devices(config, torch.device("cuda", 1)) == [torch.device("cuda", n) for n in (1, 2)]
    assert parallel_devices(config, torch.device("cuda"))[0] == FIRST
    assert shards_of(config) == [Shard(rank=0, size=2), Shard(rank=1, size=2)]
    check_division(config, MODEL, "graph")


@pytest.mark.parametrize(
    ("size", "changes", "allowed"),
    [
        (5, {}, "at most 4 from cuda:0 on: this machine has 4 GPUs"),
        (3, {"names": ["H200", "H100", "H200", "H200"]}, "GPUs of one kind; here H100 and H200"),
        (3, {"apart": {(2, 1)}}, "cuda:2 does not reach cuda:1"),
    ],
)
def test_unsuitable_gpus_are_refused(
    size: int, changes: dict[str, Any], allowed: str, gpus: dict[str, Any]
) -> None:
    gpus.update(changes)
    with pytest.raises(ConfigError, match=f"tensor_parallel={size}: .*{allowed}"):
        parallel_devices(EngineConfig(tensor_parallel=size), FIRST)


@pytest.mark.parametrize(
    ("size", "fields", "executor", "obstacle"),
    [
        (4, {}, "graph", "1, 2 for this model: it has 2 KV heads and 128 columns of attention's output"),
        (3, {}, "graph", "1, 2 for this model: it has 2 KV heads and"),
        (2, {"weights": "fp8"}, "graph", '1 for weights="fp8"'),
        (2, {}, "eager", "1 for executor eager"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    size: int, fields: dict[str, Any], executor: str, obstacle: str
) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel={size}: expected {obstacle}"):
        check_division(EngineConfig(tensor_parallel=size, **fields), MODEL, executor)


def test_fast_prompts_are_refused_for_a_divided_model() -> None:
    config = EngineConfig(tensor_parallel=2, fast_prompts=True)
    with pytest.raises(ConfigError, match="fast_prompts=True: expected False for a model divided"):
        check_division(config, read_spec(tiny_llama()), "graph")


def test_all_possible_numbers_of_gpus_are_named() -> None:
    wide = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "hidden_size": 4096}
    model = read_spec(tiny_llama() | SHAPES | wide | {"intermediate_size": 8192})
    with pytest.raises(
        ConfigError, match="tensor_parallel=48: expected 1, 2, 4, 8, 16, 32, 64 for this model"
    ):
        check_division(EngineConfig(tensor_parallel=48), model, "graph")


def test_an_engine_on_a_cpu_does_not_start(tmp_path: Path) -> None:
    engine = Engine(
        make_random_folder(tmp_path, "llama"), EngineConfig(device="cpu", load="random", tensor_parallel=2)
    )
    with pytest.raises(ConfigError, match="tensor_parallel=2: expected 1 on cpu"):
        anyio.run(engine.start)


def test_inspection_of_a_model_with_fewer_kv_heads_than_gpus(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", load="random", tensor_parallel=64)
    info = inspect(make_random_folder(tmp_path, "llama"), config)
    assert any("tensor_parallel=64: expected 1, 2 for this model" in reason for reason in info.reasons)
    assert info.weight_bytes is None and info.kv_bytes_per_token is None and info.kv_cache_tokens is None


def test_reports_beside_the_graphs_are_refused() -> None:
    engine = scripted_engine(config=EngineConfig(tensor_parallel=2))

    async def main() -> None:
        async with engine:
            await engine.generate("a", SamplingParams(max_tokens=1))
            with pytest.raises(RequestError, match="prompt_logprobs=1: expected None with tensor_parallel"):
                engine.generate("a", SamplingParams(max_tokens=1, prompt_logprobs=1))
            with pytest.raises(
                RequestError, match="prompt_states='last': expected None with tensor_parallel"
            ):
                await engine.embed(["a"])
            with pytest.raises(
                RequestError, match=r"logprob_token_ids=\(5,\): expected \(\) with tensor_par"
            ):
                engine.generate("a", logprobs=0, logprob_token_ids=(5,))

    anyio.run(main)
