"""Headers of .gguf files on hubs that send whole files, or wrong parts of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from gguf_model import write_gguf
from hub_server import HubServer, hub_server
from model_zoo import make_model

from drift_sdk import ModelLoadError
from drift_sdk.loading import hub as hub_module
from drift_sdk.loading.hub import fetch_range
from drift_sdk.loading.source import find


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    (root / "gguf").mkdir()
    write_gguf(make_model(18, root / "qwen3"), root / "gguf" / "m-Q8_0.gguf")
    return root / "gguf"


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with hub_server(monkeypatch, tmp_path / "cache") as hub:
        hub.folders = {"org/gguf": folder}
        yield hub


def test_gguf_header_is_read_from_a_hub_that_sends_whole_files(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rest of the file is not waited for."""
    monkeypatch.setattr(hub_module, "FIRST_BYTES", 2**14)
    hub.headers = {"Accept-Ranges": None}
    hub.pace = lambda name: "halt" if name.endswith(".gguf") else None
    found = find("org/gguf:Q8_0")
    file = folder / "m-Q8_0.gguf"
    assert found.source.config["model_type"] == "qwen3"
    assert found.source.tokenizer().encode("ab") == [257]
    (copy,) = tmp_path.glob("drift-gguf-*/org/gguf/*.gguf")
    assert copy.stat().st_size == file.stat().st_size
    assert hub.downloads[-1] == (file.name, file.stat().st_size)
    assert not hub.has_given_up


def test_part_of_a_file_that_a_hub_sends_whole(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = huggingface_hub.hf_hub_url("org/gguf", "m-Q8_0.gguf")
    data = (folder / "m-Q8_0.gguf").read_bytes()
    for hub.headers in ({}, {"Accept-Ranges": None}):
        for start, num_bytes in ((0, 10), (1000, 5000), (len(data) - 10, 100)):
            found = fetch_range(url, start, num_bytes)
            assert found == (data[start : start + num_bytes], len(data))

    monkeypatch.setattr(hub_module, "MAX_SKIPPED_BYTES", 500)
    with pytest.raises(ModelLoadError, match="does not send parts of files: asked for byte 1000, got byte 0"):
        fetch_range(url, 1000, 10)


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"Content-Range": None}, "sends a part of the file, and does not tell which"),
        ({"Content-Range": "bytes 0-9/*"}, "sends a part of the file, and does not tell which"),
        ({"Content-Range": "bytes 2000-2009/5000"}, "asked for byte 1000, got byte 2000"),
        ({"Accept-Ranges": None, "Content-Length": None}, "does not tell the size of the file"),
    ],
)
def test_answers_that_are_no_part_of_a_file(
    headers: dict[str, str | None], said: str, hub: HubServer
) -> None:
    hub.headers = headers
    with pytest.raises(ModelLoadError, match=said):
        fetch_range(huggingface_hub.hf_hub_url("org/gguf", "m-Q8_0.gguf"), 1000, 10)
