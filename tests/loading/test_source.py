"""Finding a model, a draft or a tokenizer by name, and reading the files of a folder."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import transformers
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from model_zoo import make_model

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.source import Role, Source, eos_token_ids, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_model(1, folder)
    return folder


class Hub:
    """A fake hub that does not answer, and its cache. `problem`: raised by requests."""

    def __init__(self) -> None:
        self.cached: Path | None = None
        self.problem: Exception = ConnectionError("no route")
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, repo_id: str, *, local_files_only: bool, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, "local_files_only": local_files_only, **options})
        if local_files_only and self.cached is None:
            raise LocalEntryNotFoundError("nothing cached\nand more")

        assert local_files_only
        return str(self.cached)

    def model_info(self, *_: Any, **__: Any) -> Any:
        advice = "Got: ...\nPlease check your connection, or pass local_files_only=False"
        raise LocalEntryNotFoundError(advice) from self.problem


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


@pytest.mark.parametrize("as_type", [str, Path])
def test_folder(folder: Path, as_type: type, hub: Hub) -> None:
    source = resolve(as_type(folder))
    assert source.path == folder
    assert source.config["model_type"] == "llama"
    assert source.generation_config["eos_token_id"] == 1
    assert source.chat_templates == {}
    assert set(source.tensors().names()) >= {"lm_head.weight"}
    assert source.tokenizer().encode("ab") == source.tokenizer().encode("ab") != []
    assert hub.calls == []


@pytest.mark.parametrize("role", ["model", "draft", "tokenizer"])
def test_missing_path_is_never_a_hub_id(role: Role, hub: Hub) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve(Path("org/model"), role=role)

    assert str(caught.value) == f"{role} 'org/model' does not exist (a Path is never a hub id)"
    assert hub.calls == []


@pytest.mark.parametrize("name", ["org/model.gguf", "notes.txt", "model.safetensors"])
def test_missing_file_is_not_looked_up_on_the_hub(name: str, hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match=rf"model '{name}' does not exist \(a name that ends in"):
        resolve(name)

    assert hub.calls == []


@pytest.mark.parametrize("name", ["/no/such/folder", "./folder", "a/b/c", "org//model", "~/no such folder"])
def test_name_that_is_no_hub_id(name: str, hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="does not exist, and is not a hub id"):
        resolve(name)

    assert hub.calls == []


@pytest.mark.parametrize("role", ["model", "draft", "tokenizer"])
def test_existing_file_of_another_kind(role: Role, folder: Path, hub: Hub) -> None:
    file = folder / "model.safetensors"
    with pytest.raises(ModelLoadError, match=f"^{role} '{file}' is not a folder"):
        resolve(str(file), role=role)

    assert hub.calls == []


def test_draft_may_be_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "draft.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(file, role="draft").path == file


@pytest.mark.parametrize("as_type", [str, Path])
def test_tilde_is_the_home_directory(as_type: type, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve(as_type("~/model")).path == folder
    assert resolve(as_type("~/model"), role="draft").path == folder
    with pytest.raises(ModelLoadError, match="'~nobody-of-this-name/model' does not exist"):
        resolve(as_type("~nobody-of-this-name/model"))


@pytest.mark.parametrize("role", ["model", "draft", "tokenizer"])
def test_unreachable_hub(role: Role, hub: Hub) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve("org/model", role=role, revision="v2")

    expected = "not in the cache, and the hub cannot be reached: ConnectionError: no route"
    assert str(caught.value).startswith(f"{role} 'org/model' at revision 'v2': {expected}")
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("Traceback") == 1 and "local_files_only" not in printed.splitlines()[-1]


@pytest.mark.parametrize(
    "problem, expected",
    [
        (OSError(28, "No space left on device"), "it cannot be downloaded: OSError: .* No space left"),
        (TimeoutError(110, "timed out"), "the hub cannot be reached: TimeoutError: .*timed out"),
        (RuntimeError(), "the hub cannot be reached: RuntimeError; a folder or a .gguf file needs no hub"),
        (
            HfHubHTTPError("404 Client Error.\n\nRepository Not Found", response=Mock()),
            "the hub answers: HfHubHTTPError: 404 Client Error. Repository Not Found",
        ),
    ],
)
def test_failed_download_names_its_cause(problem: Exception, expected: str, hub: Hub) -> None:
    hub.problem = problem
    with pytest.raises(ModelLoadError, match=f"not in the cache, and {expected}"):
        resolve("org/model")


def test_local_files_only_never_asks_the_hub(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="not in the cache, and local_files_only is set"):
        resolve("org/model", local_files_only=True)

    assert [call["local_files_only"] for call in hub.calls] == [True]


def test_empty_cache_of_the_real_library(tmp_path: Path) -> None:
    """The real huggingface_hub reports a cache miss as expected; it may not go online."""
    with pytest.raises(ModelLoadError, match="not in the cache, and local_files_only is set"):
        resolve("org/model", cache_dir=tmp_path, local_files_only=True)


def test_cache_comes_before_the_network(folder: Path, hub: Hub, tmp_path: Path) -> None:
    hub.cached = folder
    source = resolve("org/model", revision="v2", cache_dir=tmp_path)
    assert source.path == folder
    (call,) = hub.calls
    assert call["local_files_only"] is True
    assert call["revision"] == "v2" and call["cache_dir"] == tmp_path


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


def test_folder_that_cannot_be_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def iterdir(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    source = Source(folder)
    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(ModelLoadError, match="cannot be listed: Permission denied"):
        source.weight_files()


def test_tokenizer_only_folder(folder: Path) -> None:
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / file).unlink()

    assert resolve(folder).tokenizer().encode("ab")


def test_chat_template_places(folder: Path) -> None:
    def write(template: object) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    write("from the tokenizer")
    assert resolve(folder).chat_templates["default"] == "from the tokenizer"
    write([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}])
    assert resolve(folder).chat_templates["default"] == "d"
    (folder / "chat_template.jinja").write_text("from its own file: é", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert resolve(folder).chat_templates == {"default": "from its own file: é", "tools": "t", "rag": "r"}


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
    with pytest.raises(ModelLoadError, match=f"{folder}: config: eos_token_id='x'"):
        eos_token_ids(resolve(folder), 100)


def test_eos_token_ids_of_a_text_part(folder: Path) -> None:
    """Those outside of it come first, as in transformers."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    part: dict[str, object] = {"text_config": {"eos_token_id": [1, 6]}}
    for outer, expected in (({}, (1, 6)), ({"eos_token_id": None}, (1, 6)), ({"eos_token_id": 2}, (2,))):
        (folder / "config.json").write_text(json.dumps(part | outer))
        assert eos_token_ids(resolve(folder), 100) == expected
        theirs = transformers.GenerationConfig.from_model_config(part | outer).eos_token_id
        assert theirs == (list(expected) if len(expected) > 1 else expected[0])
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": True}}))
    with pytest.raises(ModelLoadError, match="text_config: eos_token_id=True: expected token ids"):
        eos_token_ids(resolve(folder), 100)
