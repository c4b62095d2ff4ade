"""Sizes of the two pools of KV blocks of models with windows, and of a pool of latents."""

from __future__ import annotations

from math import prod
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from msgspec.structs import replace

from drift_sdk import Chain, ConfigError, DynamicTree, EngineConfig, NGram, Speculation
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk.driver.life_cycle import with_limits
from drift_sdk.families import read_spec
from drift_sdk.models.weights import tensor_shapes
from drift_sdk.scheduling.planning import least_window_blocks
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup.executor_factory import RESERVE_BYTES, kv_bytes_per_token, target_demand
from drift_sdk.startup.sizing import (
    ATTENTION_TILE,
    KVDemand,
    KVSize,
    MemoryRoom,
    WindowDemand,
    kv_layers,
    size_kv,
)
from drift_sdk.steps import ExecutorLimits
from perf.harness.published import PUBLISHED

GIB = 2**30
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "layer_types": [FULL if index % 6 == 5 else SLIDING for index in range(30)],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
MXFP4_BYTES = 65_250_000_000
"""Of the weights of gpt-oss-120b, as its files have them."""


def spec_of(name: str) -> ModelSpec:
    return read_spec(GEMMA4 if name == "gemma-4-26b-a4b" else PUBLISHED[name])


def bfloat16_bytes(spec: ModelSpec) -> int:
    """Size of the weights in bfloat16."""
    return 2 * sum(prod(shape) for shape in tensor_shapes(spec).values())


def room(share: int) -> MemoryRoom:
    return MemoryRoom(share=share, for_length=share, most=share, share_field="", account="by a test")


@pytest.mark.parametrize(
    ("name", "before", "after", "in_windows"),
    [
        ("gemma-3-27b", 157_568, 424_704, 106_176),
        ("gpt-oss-120b", 933_248, 1_731_264, 135_232),
        ("gemma-4-26b-a4b", 371_008, 1_166_080, 291_520),
    ],
)
def test_tokens_that_fit_on_a_gpu_of_139_gib(name: str, before: int, after: int, in_windows: int) -> None:
    """The default configuration with weights in bfloat16 or as stored, without scratch memory of graphs."""
    spec, config = spec_of(name), EngineConfig()
    weights = MXFP4_BYTES if name == "gpt-oss-120b" else bfloat16_bytes(spec)
    share = int(config.gpu_memory_fraction * 139 * GIB) - weights - RESERVE_BYTES
    demand = target_demand(config, spec, torch.bfloat16, None, 64, "graph")
    assert demand.windows is not None
    in_all_layers = kv_bytes_per_token(spec, torch.bfloat16, None) * 64
    assert demand.bytes_per_block + demand.windows.bytes_per_block == in_all_layers
    found = size_kv(config, demand, room(share))
    assert share // in_all_layers * 64 == before
    assert (found.num_blocks * 64, found.num_window_blocks * 64) == (after, in_windows)
    assert found.max_model_len == spec.max_position_embeddings
    assert (
        demand.num_bytes(config, found.num_blocks) <= share < demand.num_bytes(config, found.num_blocks + 4)
    )


def test_latents_that_fit_on_a_gpu_of_139_gib() -> None:
    spec, config = spec_of("glm-4.7-flash"), EngineConfig()
    share = int(config.gpu_memory_fraction * 139 * GIB) - bfloat16_bytes(spec) - RESERVE_BYTES
    demand = target_demand(config, spec, torch.bfloat16, None, 64, "graph")
    found = size_kv(config, demand, room(share))
    assert demand.bytes_per_block == 64 * 47 * 576 * 2
    assert (found.num_blocks * 64, found.num_window_blocks) == (1_369_856, 0)
    assert found.max_model_len == spec.max_position_embeddings


@pytest.mark.parametrize(
    ("name", "token", "windows_mib", "all_gib", "kept_gib"),
    [
        ("gemma-3-27b", 81_920, 494, 62.0, 10.5),
        ("gemma-4-26b-a4b", 20_480, 238, 27.5, 2.7),
        ("gpt-oss-120b", 36_864, 11, 9.0, 4.5),
    ],
)
def test_memory_of_a_sequence(
    name: str, token: int, windows_mib: int, all_gib: float, kept_gib: float
) -> None:
    """Of 131,072 tokens, as the page of models has it."""
    demand = target_demand(EngineConfig(), spec_of(name), torch.bfloat16, None, 64, "graph")
    windows, num_tokens = demand.windows, 131_072
    assert windows is not None and demand.bytes_per_block == 64 * token
    num_bytes = least_window_blocks(windows.window, 64, windows.row_tokens) * windows.bytes_per_block
    assert num_bytes / 2**20 == pytest.approx(windows_mib, abs=0.5)
    assert (num_tokens * token + num_bytes) / GIB == pytest.approx(kept_gib, abs=0.05)
    assert num_tokens // 64 * (demand.bytes_per_block + windows.bytes_per_block) / GIB == all_gib


SIZES = st.integers(1, 2**12)


@given(
    demand=st.builds(
        KVDemand,
        context=st.integers(600, 100_000),
        block_size=st.sampled_from([1, 16, 64]),
        bytes_per_block=SIZES,
        windows=st.builds(
            WindowDemand,
            window=st.integers(1, 500),
            bytes_per_block=SIZES,
            row_tokens=st.integers(1, 9),
            chunk_tokens=st.integers(2, 5000),
        ),
    ),
    share=st.integers(0, 2**26),
    max_num_seqs=st.integers(1, 300),
    max_model_len=st.one_of(st.none(), st.integers(512, 600)),
)
def test_sizes_fit_and_are_kept_when_an_engine_wakes(
    demand: KVDemand, share: int, max_num_seqs: int, max_model_len: int | None
) -> None:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    try:
        found = size_kv(config, demand, room(share))
    except ConfigError:
        assert demand.num_bytes(config, demand.num_blocks(max_model_len or 512)) > share
        return

    windows = demand.windows
    assert windows is not None
    assert demand.num_bytes(config, found.num_blocks) <= share
    most = max_num_seqs * demand.num_blocks(config.max_model_len or demand.context)
    assert found.num_blocks == most or demand.num_bytes(config, found.num_blocks + 1) > share
    least = least_window_blocks(windows.window, demand.block_size, windows.row_tokens)
    assert found.num_window_blocks >= least
    limits = ExecutorLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=found.max_model_len,
        num_blocks=found.num_blocks,
        block_size=demand.block_size,
        vocab_size=8,
    )
    assert size_kv(with_limits(config, limits), demand, room(share)) == found


def test_configured_tokens_are_those_of_layers_that_keep_all() -> None:
    demand = target_demand(EngineConfig(), spec_of("gemma-3-27b"), torch.bfloat16, None, 64, executor="graph")
    found = size_kv(EngineConfig(kv_cache_tokens=100_000), demand, room(80 * GIB))
    assert found == KVSize(num_blocks=1563, max_model_len=100_000, num_window_blocks=391)
    with pytest.raises(ConfigError, match="at most 455808: 1000000 tokens take 175.50 GiB"):
        size_kv(EngineConfig(kv_cache_tokens=1_000_000), demand, room(80 * GIB))


def test_layers_with_blocks_of_their_own() -> None:
    spec = spec_of("gpt-oss-120b")
    both = tuple(range(1, 36, 2)), tuple(range(0, 36, 2))
    assert kv_layers(EngineConfig(), spec) == both
    chain = Speculation(draft=NGram(), shape=Chain(3))
    assert kv_layers(EngineConfig(speculation=chain), spec) == both
    one = tuple(range(36)), ()
    tree = Speculation(draft="folder", shape=DynamicTree())
    assert kv_layers(EngineConfig(speculation=tree), spec) == one
    checked = Speculation(draft=NGram(), shape=Chain(3), checks=True)
    assert kv_layers(EngineConfig(speculation=checked), spec) == one
    assert kv_layers(EngineConfig(max_model_len=128), spec) == one
    assert kv_layers(EngineConfig(max_model_len=129), spec) == both
    in_windows = tuple(layer for layer in spec.layers if layer.mixer.window is not None)
    assert kv_layers(EngineConfig(), replace(spec, layers=in_windows)) == (tuple(range(18)), ())


def test_kernels_that_read_before_a_window() -> None:
    """A tile of keys that lies in several blocks begins in one before that of the window's first key."""
    assert Partitions().tile == ATTENTION_TILE
    spec = spec_of("gpt-oss-120b")

    def window(block_size: int, executor: str) -> int:
        demand = target_demand(EngineConfig(), spec, torch.bfloat16, None, block_size, executor)
        assert demand.windows is not None
        return demand.windows.window

    assert (window(64, "graph"), window(128, "graph"), window(16, "eager")) == (128, 128, 128)
    assert window(16, "graph") == 128 + 63
