"""Errors of opening an engine say whether they are about the model, the draft or the tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest
from draft_zoo import make_draft
from model_zoo import make_model

from drift_sdk import Engine, EngineConfig, ModelLoadError, Speculation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(1, tmp_path / "model")
    return tmp_path / "model"


def error_of(model: Path | str, **fields: object) -> str:
    """The message of the ModelLoadError that opening an engine raises."""
    config = EngineConfig(dtype="float32", device="cpu", max_model_len=64, **fields)

    async def main() -> str:
        with pytest.raises(ModelLoadError) as caught:
            async with Engine(model, config):
                pass
        return str(caught.value)

    return anyio.run(main)


def test_missing_paths_are_named_with_their_role(folder: Path) -> None:
    missing = folder.parent / "missing"
    assert error_of(missing).startswith(f"model '{missing}' does not exist")
    assert error_of(folder, tokenizer=missing).startswith(f"tokenizer '{missing}' does not exist")
    speculation = Speculation(draft=missing)
    assert error_of(folder, speculation=speculation).startswith(f"draft '{missing}' does not exist")
    file = missing.with_suffix(".json")
    assert error_of(folder, tokenizer=file) == f"tokenizer: {file}: is missing"


def test_broken_files_are_named_with_their_role(folder: Path) -> None:
    other = Path(shutil.copytree(folder, folder.parent / "other"))
    (other / "tokenizer.json").write_text("{")
    assert error_of(folder, tokenizer=other).startswith(f"tokenizer: {other}/tokenizer.json: not a usable")
    make_draft("specforge", folder.parent / "draft", folder)
    (folder.parent / "draft" / "model.safetensors").unlink()
    message = error_of(folder, speculation=Speculation(draft=folder.parent / "draft"))
    assert message.startswith(f"draft: {folder.parent}/draft: holds none of model.safetensors")
    message = error_of(folder, speculation=Speculation(draft=other))
    assert message.startswith(f"draft: {other}/tokenizer.json: not a usable")


def test_paths_are_named_once(folder: Path) -> None:
    (folder / "config.json").write_text("not JSON")
    (folder.parent / "empty").mkdir()
    (folder.parent / "bad.gguf").write_bytes(b"no GGUF file")
    for model, file in (
        (folder, "config.json"),
        (folder.parent / "empty", ""),
        (folder.parent / "bad.gguf", ""),
    ):
        message = error_of(model)
        assert message.startswith(f"{model / file}: ")
        assert message.count(str(model)) == 1


def test_tilde_of_model_draft_and_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    make_draft("specforge", folder.parent / "draft", folder)
    for tokenizer in ("~/model", "~/model/tokenizer.json"):
        config = EngineConfig(
            dtype="float32",
            device="cpu",
            max_model_len=64,
            tokenizer=tokenizer,
            speculation=Speculation(draft="~/draft"),
        )

        async def main(config: EngineConfig = config) -> int:
            async with Engine("~/model", config) as engine:
                return len(engine.tokenizer.encode("ab"))

        assert anyio.run(main)
