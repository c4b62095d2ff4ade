"""Where a model comes from: a folder, a .gguf file or the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from drift_sdk._files import has_file
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.gguf import GGUFFile
from drift_sdk.loading.hub import download
from drift_sdk.loading.safetensors import SafetensorsFolder
from drift_sdk.loading.tensors import TensorSource

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["Source", "eos_token_ids", "resolve"]


class Source:
    """A model's files. Each is read when asked for, so a broken one is reported by what needs it.

    `name`: what the caller asked for; `path`: the folder or .gguf file found for it.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        """As in config.json; from the metadata for a GGUF file."""
        if self._gguf is not None:
            return self._gguf.config

        if not has_file(self.path / "config.json"):
            ggufs = ", ".join(sorted(file.name for file in self.path.glob("*.gguf")))
            hint = f"; a .gguf file is given by its own path: {ggufs}" if ggufs else ""
            raise ModelLoadError(f"{self.path}: holds no config.json{hint}")

        return self._json("config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """As in generation_config.json; empty where there is none."""
        return self._json("generation_config.json")

    @cached_property
    def chat_template(self) -> str | None:
        """Jinja text: chat_template.jinja, else the tokenizer's own; the default one of several."""
        from drift_sdk.text.tokenizer import default_template

        if self._gguf is not None:
            return default_template(self._gguf.metadata.get("tokenizer.chat_template"), self.path)

        if has_file(self.path / "chat_template.jinja"):
            return self._text("chat_template.jinja")

        file = "tokenizer_config.json"
        return default_template(self._json(file).get("chat_template"), self.path / file)

    def tensors(self) -> TensorSource:
        return SafetensorsFolder(self.path) if self._gguf is None else self._gguf

    def tokenizer(self) -> Tokenizer:
        from drift_sdk.text.tokenizer import Tokenizer

        if self._gguf is not None:
            try:
                return Tokenizer.from_gguf(self._gguf.metadata)
            except ModelLoadError as error:
                raise ModelLoadError(f"{self.path}: {error}") from error

        return Tokenizer.from_file(self.path / "tokenizer.json", self._json("tokenizer_config.json"))

    @cached_property
    def _gguf(self) -> GGUFFile | None:
        return GGUFFile(self.path) if os.path.isfile(self.path) else None

    def _text(self, file: str) -> str:
        try:
            return (self.path / file).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ModelLoadError(f"{self.path / file}: cannot be read: {error}") from error

    def _json(self, file: str) -> dict[str, Any]:
        path = self.path / file
        if self._gguf is not None or not has_file(path):
            return {}

        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise ModelLoadError(f"{path}: not a JSON object: {error}") from error


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Source:
    """Find a model: an existing folder, an existing .gguf file, else, for a str alone, a hub id.

    The hub's local cache comes before the network. Raises ModelLoadError naming each place that was tried.
    """
    path = Path(model)
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf"):
        return Source(str(model), path)

    found = "is not a folder or a .gguf file" if os.path.lexists(path) else "does not exist"
    tried = f"no model found: path {short_repr(str(path))} {found}"
    if isinstance(model, Path):
        raise ModelLoadError(f"{tried} (a Path is never a hub id)")

    try:
        folder = download(model, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
    except ModelLoadError as error:
        raise ModelLoadError(f"{tried}; {error}") from error

    return Source(model, folder)


def eos_token_ids(source: Source, vocab_size: int) -> tuple[int, ...]:
    """Ids below vocab_size that end a completion: generation_config's, else the config's. Empty when neither
    names any; ModelLoadError when none of those named can be generated."""
    for name, settings in (("generation_config", source.generation_config), ("config", source.config)):
        if settings.get("eos_token_id") is not None:
            ids = _ids(name, settings)
            # A padded or trimmed vocabulary leaves ids that cannot be generated.
            known = tuple(token_id for token_id in ids if token_id < vocab_size)
            if ids and not known:
                found = f"{name}: eos_token_id={short_repr(list(ids))}"
                raise ModelLoadError(f"{source.path}: {found}: expected one below vocab_size={vocab_size}")

            return known

    return ()


def _ids(name: str, settings: Mapping[str, Any]) -> tuple[int, ...]:
    value = settings["eos_token_id"]
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(
        isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids
    ):
        raise ModelLoadError(f"{name}: eos_token_id={short_repr(value)}: expected token ids")

    return ids
