"""What opening a model takes from its configuration."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
import torch
from model_zoo import make_model

from drift_sdk import ConfigError, Engine, EngineConfig
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.events import Report
from drift_sdk.loading.source import Source
from drift_sdk.startup import model_parts, model_startup, text_startup
from drift_sdk.startup.model_startup import choose_device
from drift_sdk.startup.sizing import DeviceMemory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(1, tmp_path / "model")
    return tmp_path / "model"


def test_float16_is_rejected_where_auto_finds_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    async def main() -> None:
        with pytest.raises(ConfigError, match="dtype='float16': expected float32 or bfloat16 on the CPU"):
            async with Engine(folder, EngineConfig(dtype="float16", max_model_len=64)):
                pass

    anyio.run(main)


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_gpu_has_one_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a process lock it, and keep its streams, by that name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(EngineConfig(device=name)) == torch.device("cuda", 0)
    assert choose_device(EngineConfig(device="cuda:1")) == torch.device("cuda", 1)


@pytest.mark.parametrize("weights", [None, "int4"])
def test_memory_that_loading_has_freed_is_returned_before_the_cache_is_sized(
    weights: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are quantised one after the other, from numbers that are not needed any more."""
    order: list[str] = []
    room = DeviceMemory.room
    monkeypatch.setattr(model_parts, "return_freed_memory", lambda device: order.append(device.type))
    monkeypatch.setattr(DeviceMemory, "room", lambda memory: (order.append("sized"), room(memory))[1])

    async def main() -> None:
        config = EngineConfig(device="cpu", dtype="float32", max_model_len=64, weights=weights)
        async with Engine(folder, config):
            pass

    anyio.run(main)
    assert order[:2] == ["cpu", "sized"]


def test_revision_is_of_the_model_and_not_of_the_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revisions: dict[str, str | None] = {}

    def resolve(name: str, *, role: str = "model", revision: str | None = None, **_: object) -> Source:
        revisions[role] = revision
        return original(folder)

    original = model_startup.resolve
    for module in (model_startup, text_startup):
        monkeypatch.setattr(module, "resolve", resolve)
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        max_model_len=64,
        revision="v1",
        tokenizer="org/other",
        kv_cache_tokens=64,
    )

    async def main() -> None:
        async with Engine("org/model", config):
            pass

    anyio.run(main)
    assert revisions == {"model": "v1", "tokenizer": None}


def test_threads_are_set_for_the_engines_thread_alone(folder: Path) -> None:
    """torch gives threads that begin later the number that was set last, so it has to be set back."""

    def threads_elsewhere() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    found: list[int] = []

    def open_files(report: Report, limits: object = None) -> LoadedModel:
        opened = model_startup.open_model(folder, config, report)
        found.append(torch.get_num_threads())
        return opened

    config = EngineConfig(dtype="float32", device="cpu", max_model_len=64, kv_cache_tokens=64, num_threads=3)
    before = torch.get_num_threads(), threads_elsewhere()
    assert 3 not in before

    async def main() -> None:
        async with Engine(folder, config, open_model=open_files) as engine:
            assert (torch.get_num_threads(), threads_elsewhere()) == before
            await engine.generate([5])

    anyio.run(main)
    assert found == [3]
    assert (torch.get_num_threads(), threads_elsewhere()) == before
