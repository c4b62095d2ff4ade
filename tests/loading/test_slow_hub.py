"""A hub that is silent or slow: whoever waits for it may stop waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import huggingface_hub.constants
import pytest
from gguf_model import write_gguf
from hub_server import HubServer, hub_server
from model_zoo import make_model
from slow_cases import slow_rows_after

from drift_sdk import Engine, EngineClosed, EngineConfig, ModelLoadError, Speculation, inspect
from drift_sdk.loading.hub import call_each

LONG_S = 600
"""Seconds that the hub's library waits for each answer."""
WAIT_S = 120.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    qwen3 = make_model(18, root / "qwen3")
    (root / "gguf").mkdir()
    write_gguf(qwen3, root / "gguf" / "m-Q8_0.gguf")
    return root


@pytest.fixture
def hub(models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(huggingface_hub.constants, name, LONG_S)
    with hub_server(monkeypatch, tmp_path / "cache") as hub:
        hub.folders = {f"org/{name}": models / name for name in ("qwen3", "gguf")}
        yield hub


def slow(pace: str, end: str) -> Callable[[str], str | None]:
    return lambda name: pace if name.endswith(end) else None


CONFIG = EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=64)


@pytest.mark.parametrize("ends_by", ["cancelling", "closing"])
@pytest.mark.parametrize(
    ("pace", "file", "model", "options"),
    [
        ("stall", "listing", "org/qwen3", {}),
        ("drip", "listing", "org/qwen3", {}),
        ("stall", "config.json", "org/qwen3", {}),
        ("stall", ".safetensors", "org/qwen3", {}),
        ("drip", ".safetensors", "org/qwen3", {}),
        ("stall", ".gguf", "org/gguf:Q8_0", {}),
        ("drip", ".gguf", "org/gguf:Q8_0", {}),
        ("stall", "listing", "qwen3", {"speculation": Speculation(draft="org/qwen3")}),
        ("stall", "tokenizer.json", "qwen3", {"tokenizer": "org/qwen3"}),
    ],
)
def test_start_that_waits_for_the_hub_ends(
    pace: str,
    file: str,
    model: str,
    options: dict[str, object],
    ends_by: str,
    hub: HubServer,
    models: Path,
) -> None:
    hub.pace = slow(pace, file)
    config = EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=64, **options)  # type: ignore[arg-type]
    engine = Engine(model if model.startswith("org") else models / model, config)

    async def end() -> None:
        await anyio.to_thread.run_sync(hub.is_slow.wait)
        await engine.aclose()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            if ends_by == "closing":
                tasks.start_soon(end)
                with pytest.raises(EngineClosed):
                    await engine.start()
            else:
                tasks.start_soon(engine.start)
                await anyio.to_thread.run_sync(hub.is_slow.wait)
                tasks.cancel_scope.cancel()

    anyio.run(main)
    assert not engine.is_open
    assert not hub.has_given_up
    assert not list(Path(tempfile.gettempdir()).glob("drift-gguf-*"))


def test_start_that_waits_for_another_one_ends(hub: HubServer, models: Path) -> None:
    """One engine takes its memory at a time; the first waits for its draft."""
    hub.pace = slow("stall", "listing")
    speculation = Speculation(draft="org/qwen3")
    config = EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=64, speculation=speculation)
    first, second = Engine(models / "qwen3", config), Engine(models / "qwen3", CONFIG)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.start)
            await anyio.to_thread.run_sync(hub.is_slow.wait)
            with anyio.move_on_after(0.2) as scope:
                await second.start()
            assert scope.cancelled_caught
            tasks.cancel_scope.cancel()

    anyio.run(main)
    assert not hub.has_given_up


@pytest.mark.parametrize(
    ("pace", "file", "call"),
    slow_rows_after(
        1,
        [
            ("stall", ".safetensors", "SyncEngine('org/qwen3', config).start()"),
            ("stall", "config.json", "inspect('org/qwen3', config)"),
        ],
    ),
)
def test_interrupted_process_ends(pace: str, file: str, call: str, hub: HubServer, tmp_path: Path) -> None:
    hub.pace = slow(pace, file)
    program = f"from drift_sdk import *\nconfig = EngineConfig(device='cpu', max_model_len=64)\n{call}"
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DOWNLOAD_TIMEOUT": str(LONG_S),
        "HF_HUB_ETAG_TIMEOUT": str(LONG_S),
    }
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | settings, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert hub.is_slow.wait(WAIT_S)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=WAIT_S)
        finally:
            child.kill()
    assert errors.strip().endswith("KeyboardInterrupt")
    assert not hub.has_given_up


def test_listing_of_a_silent_hub_fails(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from drift_sdk.loading import hub as module

    hub.pace = slow("stall", "listing")
    monkeypatch.setattr(module, "LISTING_TIMEOUT_S", 0.1)
    with pytest.raises(ModelLoadError, match="not in the cache, and the hub cannot be reached: .*[tT]ime"):
        inspect("org/qwen3", CONFIG)


def test_calls_on_threads() -> None:
    """The first error ends the waiting, and calls that have not begun."""
    assert call_each(lambda number: number + 1, range(30), lambda: None) == [*range(1, 31)]

    called = []
    goes_on = threading.Event()

    def work(number: int) -> None:
        called.append(number)
        if number == 3:
            raise ValueError("the fourth")
        goes_on.wait(WAIT_S)

    with pytest.raises(ValueError, match="the fourth"):
        call_each(work, range(30), lambda: None)
    goes_on.set()
    assert len(called) < 30
