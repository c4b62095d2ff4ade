"""Where a model's name leads: a folder, a file, the hub; and what a folder offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from model_zoo import make_model

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.source import eos_token_ids, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_model(1, folder)
    return folder


class Hub:
    """snapshot_download over a cached and a remote folder, either of which may be absent."""

    def __init__(self, cached: Path | None, remote: Path | None) -> None:
        self.cached = cached
        self.remote = remote
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, *, local_files_only: bool, **options: Any) -> str:
        if repo_id.count("/") > 1:
            raise huggingface_hub.errors.HFValidationError("too many parts")

        self.calls.append({"repo_id": repo_id, "local_files_only": local_files_only, **options})
        if local_files_only and self.cached is None:
            raise LocalEntryNotFoundError("nothing cached\nand more")

        if not local_files_only and self.remote is None:
            raise ConnectionError("no route")

        return str(self.cached if local_files_only else self.remote)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(None, None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


@pytest.mark.parametrize("as_type", [str, Path])
def test_folder(folder: Path, as_type: type, hub: Hub) -> None:
    source = resolve(as_type(folder))
    assert source.path == folder and source.name == str(folder)
    assert source.config["model_type"] == "llama"
    assert source.generation_config["eos_token_id"] == 1
    assert source.chat_template is None
    assert set(source.tensors().names()) >= {"lm_head.weight"}
    assert source.tokenizer().encode("ab") == source.tokenizer().encode("ab") != []
    assert hub.calls == []


def test_path_is_never_a_hub_id(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="'org/model' does not exist .a Path is never a hub id."):
        resolve(Path("org/model"))

    assert hub.calls == []


def test_every_place_tried_is_listed(hub: Hub) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve("org/model", revision="v2")

    for part in (
        "path 'org/model' does not exist",
        "revision 'v2'",
        "hub cache",
        "nothing cached",
        "no route",
    ):
        assert part in str(caught.value)

    assert "and more" not in str(caught.value)
    assert isinstance(caught.value.__cause__.__cause__, ConnectionError)
    with pytest.raises(ModelLoadError) as caught:
        resolve("org/model", local_files_only=True)

    assert "no route" not in str(caught.value)
    with pytest.raises(ModelLoadError, match="not a hub id"):
        resolve("/no/such/folder")


def test_real_hub_functions_refuse_without_a_network(tmp_path: Path) -> None:
    """The real library, on an empty cache and without leave to go online."""
    with pytest.raises(ModelLoadError, match="LocalEntryNotFoundError"):
        resolve("org/model", cache_dir=tmp_path, local_files_only=True)

    with pytest.raises(ModelLoadError, match="not a hub id"):
        resolve("org//model", cache_dir=tmp_path, local_files_only=True)


def test_cache_comes_before_the_network(folder: Path, hub: Hub, tmp_path: Path) -> None:
    hub.cached = folder
    source = resolve("org/model", revision="v2", cache_dir=tmp_path)
    assert source.path == folder and source.name == "org/model"
    (call,) = hub.calls
    assert call["local_files_only"] is True
    assert call["revision"] == "v2" and call["cache_dir"] == tmp_path
    assert set(call["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja", "pytorch_model.bin"}


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "a shard"])
def test_interrupted_download_is_completed(lost: str, hub: Hub, tmp_path: Path) -> None:
    index = 0 if lost == "a shard" else 1
    make_model(index, tmp_path / "cached")
    make_model(index, tmp_path / "remote")
    hub.cached, hub.remote = tmp_path / "cached", tmp_path / "remote"
    next(hub.cached.glob("model-00002*" if lost == "a shard" else lost)).unlink()
    assert resolve("org/model").path == hub.remote
    assert [call["local_files_only"] for call in hub.calls] == [True, False]


def test_progress_bars_stay_off(folder: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.cached = folder
    resolve("org/model")
    with hub.calls[0]["tqdm_class"](total=3, desc="files") as bar:
        bar.update(3)

    assert capsys.readouterr() == ("", "")


def test_wrong_folders_and_files(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        _ = resolve(empty).config

    with pytest.raises(ModelLoadError, match=r"holds neither model\.safetensors nor"):
        resolve(empty).tensors()

    (empty / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        _ = resolve(empty).config

    with pytest.raises(ModelLoadError, match=r"is not a folder or a \.gguf file"):
        resolve(folder / "model.safetensors")

    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match=r"config\.json: not a JSON object"):
        _ = resolve(folder).config


def test_tokenizer_only_folder(folder: Path) -> None:
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / file).unlink()

    assert resolve(folder).tokenizer().encode("ab")


def test_chat_template_places(folder: Path) -> None:
    def write(template: object) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    write("from the tokenizer")
    assert resolve(folder).chat_template == "from the tokenizer"
    write([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}])
    assert resolve(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("from its own file: é", encoding="utf-8")
    assert resolve(folder).chat_template == "from its own file: é"


def test_eos_token_ids(folder: Path) -> None:
    def write(file: str, **changes: object) -> None:
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | changes))

    assert eos_token_ids(resolve(folder), 100) == (1,)
    write("generation_config.json", eos_token_id=[7, 8])
    assert eos_token_ids(resolve(folder), 100) == (7, 8)
    write("generation_config.json", eos_token_id=None)
    write("config.json", eos_token_id=9)
    assert eos_token_ids(resolve(folder), 100) == (9,)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(resolve(folder), 100) == (9,)
    write("config.json", eos_token_id=None)
    assert eos_token_ids(resolve(folder), 100) == ()
    write("config.json", eos_token_id="x")
    with pytest.raises(ModelLoadError, match="eos_token_id='x'"):
        eos_token_ids(resolve(folder), 100)
