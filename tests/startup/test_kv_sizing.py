from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drift_sdk import ConfigError, EngineConfig
from drift_sdk.startup.sizing import (
    DeviceMemory,
    KVDemand,
    KVSize,
    MemoryRoom,
    _available_to_group,
    available_bytes,
    size_kv,
)

GIB = 2**30
LLAMA_8B = KVDemand(context=131_072, block_size=64, bytes_per_block=64 * 131_072)  # 128 KiB a token
TINY = KVDemand(context=256, block_size=16, bytes_per_block=1024)


def room(share: int, most: int | None = None, field: str = "gpu_memory_fraction") -> MemoryRoom:
    most = share if most is None else most
    return MemoryRoom(share=share, for_length=most, most=most, share_field=field, account="by a test")


def size(demand: KVDemand, given: MemoryRoom, **fields: Any) -> KVSize:
    return size_kv(EngineConfig(**fields), demand, given)


def test_cache_takes_the_whole_share() -> None:
    found = size(LLAMA_8B, room(100 * GIB))
    assert found == KVSize(num_blocks=100 * GIB // LLAMA_8B.bytes_per_block, max_model_len=131_072)
    assert size(LLAMA_8B, room(100 * GIB + 5)).num_blocks == found.num_blocks


def test_cache_is_no_larger_than_all_sequences_can_use() -> None:
    assert size(TINY, room(GIB), max_num_seqs=3) == KVSize(num_blocks=3 * 16, max_model_len=256)
    assert size(TINY, room(GIB), max_num_seqs=3, max_model_len=17) == KVSize(num_blocks=6, max_model_len=17)


def test_context_is_cut_to_the_cache() -> None:
    assert size(LLAMA_8B, room(GIB)) == KVSize(num_blocks=128, max_model_len=8192)
    assert size(LLAMA_8B, room(GIB), max_model_len=4096).max_model_len == 4096


@pytest.mark.parametrize(
    ("fields", "share", "field", "words"),
    [
        ({}, -1, "gpu_memory_fraction", "KV of 512 tokens takes 0.06 GiB, there is room for 0.00 GiB or 0"),
        ({}, 511 * 131_072, "gpu_memory_fraction", "0.06 GiB or 448 tokens (by a test)"),
        ({"max_model_len": 9000}, GIB, "max_model_len", "takes 1.10 GiB, there is room for 1.00 GiB or 8192"),
        ({"max_model_len": 200_000}, GIB, "max_model_len", "at most the model's context of 131072"),
        ({"kv_cache_tokens": 9000}, GIB, "kv_cache_tokens", "at most 8192: 9000 tokens take 1.10 GiB"),
        ({"kv_cache_tokens": 64, "max_model_len": 65}, GIB, "kv_cache_tokens", "at least max_model_len=65"),
    ],
)
def test_cache_that_does_not_fit_is_rejected_with_numbers(
    fields: dict[str, Any], share: int, field: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        size(LLAMA_8B, room(share), **fields)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_configured_max_model_len_may_take_more_than_the_default_share() -> None:
    """On a CPU, where the default share is an eighth of the available memory."""
    given = room(GIB, 4 * GIB, field="")
    assert size(LLAMA_8B, given, max_model_len=9000) == KVSize(num_blocks=141, max_model_len=9000)
    assert size(LLAMA_8B, given, kv_cache_tokens=9000) == KVSize(num_blocks=141, max_model_len=9000)
    with pytest.raises(ConfigError, match="max_model_len=131072: expected less, or more free memory"):
        size(LLAMA_8B, room(0, field=""))


def test_room_on_a_cpu_is_a_share_of_available_memory() -> None:
    device = torch.device("cpu")
    given = DeviceMemory(device, EngineConfig()).room()
    assert 0 < given.share < given.most == given.for_length < available_bytes(device) * 2
    assert "available" in given.account


def test_weights_that_do_not_fit_are_rejected_before_they_are_loaded() -> None:
    memory = DeviceMemory(torch.device("cpu"), EngineConfig())
    memory.check_weights(1)
    with pytest.raises(ConfigError, match="the weights take 1048576.00 GiB") as caught:
        memory.check_weights(2**50)
    assert caught.value.field == "dtype"


@pytest.mark.parametrize(
    ("fraction", "reserved", "expected"), [(1.0, 10, 60), (0.5, 10, 40), (0.5, 70, 0), (0.9, 10, 60)]
)
def test_available_bytes_respect_the_limit_of_torch(
    fraction: float, reserved: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("empty_cache", None),
        ("mem_get_info", (60, 100)),
        ("get_per_process_memory_fraction", fraction),
        ("memory_reserved", reserved),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)
    assert available_bytes(torch.device("cuda")) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 1"}, None),
        ({"memory.max": "100", "memory.current": "70", "memory.stat": "anon 9\ninactive_file 20"}, 50),
        ({"memory.max": "100", "memory.current": "170", "memory.stat": "anon 9"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "100",
                "memory/memory.usage_in_bytes": "70",
                "memory/memory.stat": "total_inactive_file 3",
            },
            33,
        ),
    ],
)
def test_available_bytes_respects_the_limit_of_a_container(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert _available_to_group(tmp_path, tmp_path / "no groups") == expected


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b": 50, "a": 90}, 40),
        ("0::/a/b\n", {"a/b": 90, "a": 50}, 40),
        ("0::/elsewhere\n", {".": 70}, 60),
        ("4:memory:/a\n0::/\n", {"memory/a": 50, "memory": 90}, 40),
        ("1:cpu:/\n4:memory:/\n", {"memory/a": 50}, None),
    ],
)
def test_available_bytes_respects_the_limits_of_all_groups_of_the_process(
    tmp_path: Path, own: str, limits: dict[str, int], expected: int | None
) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text(own)
    for group, limit in limits.items():
        folder = tmp_path / group
        folder.mkdir(parents=True, exist_ok=True)
        names = ("limit_in_bytes", "usage_in_bytes") if group.startswith("memory") else ("max", "current")
        for name, text in zip((*names, "stat"), (limit, 10, "anon 1"), strict=True):
            (folder / f"memory.{name}").write_text(f"{text}\n")
    assert _available_to_group(tmp_path, groups) == expected
