"""Files of a model, a draft or a tokenizer, in a folder, a .gguf file or on the hub, and their settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from drift_sdk._files import has_file, unreadable
from drift_sdk.config import EngineConfig
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.events import Report
from drift_sdk.families import original_files, read_spec
from drift_sdk.loading.file_names import HubFile, split_quant, weight_names
from drift_sdk.loading.quantised_tensors import QuantisedTensors, ScaledTensors, has_kv_scales
from drift_sdk.loading.safetensors import RenamedTensors, SafetensorsFolder
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.quantised.scheme import config_scheme
from drift_sdk.spec.model import ModelSpec

if TYPE_CHECKING:
    from drift_sdk.loading.gguf import GGUFFile
    from drift_sdk.text.tokenizer import Tokenizer


def read_object(path: Path) -> dict[str, Any]:
    """The contents of a file. Raises ModelLoadError naming it."""
    try:
        return _decoded(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not a JSON object: {error}") from error


def _decoded(content: bytes) -> dict[str, Any]:
    """A JSON object, perhaps with Infinity, -Infinity and NaN: they are not JSON, but Python writes them, and
    transformers reads them."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        try:
            settings = json.loads(content)
            msgspec.json.encode(settings)  # raises for lone surrogates, which are not JSON either
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise

        return settings


Role = Literal["model", "draft", "tokenizer"]
"""The use that files are loaded for; part of error messages."""

EXPECTED = {
    "model": "a folder or a .gguf file",
    "draft": "a folder or a .gguf file",
    "tokenizer": "a folder, a tokenizer.json or a .gguf file",
}
TOKENIZER_FILE = "tokenizer.json"
MODELOPT_FILE = "hf_quant_config.json"
NO_VOCABULARY = ("none", "no_vocab")
"""Values of tokenizer.ggml.model in a file without a tokenizer."""
# Names that end like this mean files, never hub ids.
FILE_SUFFIXES = (".bin", ".gguf", ".json", ".safetensors", ".txt")


class Source:
    """The files of a model. Each is read on first use, so an error about one is raised by its first user.

    path: the folder, or the .gguf file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of config.json; for a GGUF file the same settings, made from its metadata.

        Raises ModelLoadError naming the file.
        """
        if self._gguf is not None:
            return self._gguf.config

        if not has_file(self.path / "config.json"):
            ggufs = ", ".join(sorted(file.name for file in self.path.glob("*.gguf")))
            hint = f"; a .gguf file is given by its own path: {ggufs}" if ggufs else ""
            raise ModelLoadError(f"{self.path}: holds no config.json{hint}")

        settings = self._settings
        original = original_files(settings)
        return settings if original is None else original.settings(settings)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json; empty if there is none.

        Raises ModelLoadError naming the file.
        """
        return self._json("generation_config.json")

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The texts of the Jinja chat templates by name, empty if there are none. The usual one is "default":
        chat_template.jinja, else that of tokenizer_config.json or the GGUF file. Others come from the same
        places and from the folder additional_chat_templates.

        Raises ModelLoadError naming the file.
        """
        from drift_sdk.text.tokenizer import named_templates

        if self._gguf is not None:
            return self._gguf_templates(self._gguf.metadata)

        file = "tokenizer_config.json"
        found = named_templates(self._json(file).get("chat_template"), self.path / file)
        if has_file(self.path / "chat_template.jinja"):
            found["default"] = self._text("chat_template.jinja")
        for path in sorted((self.path / "additional_chat_templates").glob("*.jinja")):
            if has_file(path):
                found[path.stem] = self._text(str(path.relative_to(self.path)))
        return found

    def _gguf_templates(self, metadata: Mapping[str, Any]) -> dict[str, str]:
        from drift_sdk.text.tokenizer import named_templates

        key = "tokenizer.chat_template"
        found = named_templates(metadata.get(key), self.path)
        names = metadata.get(f"{key}s")
        for name in names if isinstance(names, list) else ():
            if isinstance(text := metadata.get(f"{key}.{name}"), str):
                found.setdefault(str(name), text)
        return found

    def weight_files(self) -> list[Path]:
        """The files of weights that are there. Raises ModelLoadError for a broken index, a missing part, or a
        folder that cannot be listed."""
        if self._gguf is not None:
            return self._gguf.files

        try:
            names = [file.name for file in self.path.iterdir()]
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be listed: {error.strerror}") from error

        files = [self.path / name for name in weight_names(names, self.path)]
        return [file for file in files if has_file(file)]

    def tensors(self) -> TensorSource:
        """The model's weights; ModelLoadError naming a file that is missing or broken."""
        if self._gguf is not None:
            return self._gguf.tensors()

        folder = SafetensorsFolder(self.path, is_decoder=True)
        settings = self._settings
        original = original_files(settings)
        if original is not None:
            return RenamedTensors(folder, original.tensor_name)

        scheme = config_scheme(settings)
        if scheme is not None:
            return QuantisedTensors(folder, scheme)

        return ScaledTensors(folder) if has_kv_scales(folder.names()) else folder

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json, or a GGUF file that holds a vocabulary."""
        if self._gguf is None:
            return has_file(self.path / TOKENIZER_FILE)

        return self._gguf.metadata.get("tokenizer.ggml.model", NO_VOCABULARY[0]) not in NO_VOCABULARY

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ModelLoadError naming the file it cannot be built from."""
        from drift_sdk.text.tokenizer import Tokenizer

        if self._gguf is not None:
            try:
                return Tokenizer.from_gguf(self._gguf.metadata)
            except ModelLoadError as error:
                raise ModelLoadError(f"{self.path}: {error}") from error

        return Tokenizer.from_file(self.path / TOKENIZER_FILE, self._json("tokenizer_config.json"))

    @cached_property
    def _gguf(self) -> GGUFFile | None:
        if not os.path.isfile(self.path):
            return None

        from drift_sdk.loading.gguf import GGUFFile  # imported here, as few models are GGUF files

        return GGUFFile(self.path)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The contents of config.json. ModelOpt also writes its settings to hf_quant_config.json; older
        releases of it write them there alone."""
        settings = self._json("config.json")
        modelopt = {} if settings.get("quantization_config") else self._json(MODELOPT_FILE)
        if modelopt:
            settings["quantization_config"] = modelopt | {"quant_method": "modelopt"}
        quantisation = settings.get("quantization_config")
        if isinstance(quantisation, dict) and quantisation.get("quant_method") == "gguf":
            raise ModelLoadError(
                f"{self.path / 'config.json'}: quant_method='gguf' in quantization_config, which GGUF files "
                "alone have: expected the path of one"
            )

        return settings

    def _text(self, file: str) -> str:
        try:
            return (self.path / file).read_text(encoding="utf-8")
        except OSError as error:
            raise unreadable(self.path / file, error) from error
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self.path / file}: cannot be read: {error}") from error

    def _json(self, file: str) -> dict[str, Any]:
        """The contents of a JSON file in the folder; empty if it is missing, and for a GGUF file."""
        path = self.path / file
        return {} if self._gguf is not None or not has_file(path) else read_object(path)


class Found(Struct, frozen=True, kw_only=True):
    """The files of a model, a draft or a tokenizer, perhaps without its weights yet.

    source:  config, tokenizer and template; the weights only if none are missing.
    missing: files of weights that `fetch` downloads from the hub.
    fetch:   downloads them and returns the whole source. Raises ModelLoadError.
    """

    source: Source
    missing: tuple[HubFile, ...]
    fetch: Callable[[], Source]

    def stored_bytes(self) -> int | None:
        """Bytes of the files that hold the weights, those to fetch included; None if there are none."""
        present = self.source.weight_files()
        sizes = [file.stat().st_size for file in present]
        if not self.source.path.is_file():  # copies of the headers of .gguf files have the size of the files
            sizes += [file.num_bytes or 0 for file in self.missing]
        return sum(sizes) if sizes else None


def find(
    name: str | Path,
    *,
    role: Role = "model",
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    report: Report | None = None,
) -> Found:
    """Find the files of a model, a draft or a tokenizer, and fetch the small ones if they are on the hub.

    name: an existing folder, an existing .gguf file, else, for a str alone, a hub id, with
    ":" and a quantisation for one of a repository's .gguf files. A leading "~" stands for a home directory.
    Of a .gguf file in parts, any part. The hub's local cache is tried before the network; a name with the
    suffix of a file, or of something that exists, is not looked up on the hub.
    report: called with the progress of a download.

    Raises ModelLoadError naming role and name, with the reason.
    """
    path = expand_home(name)
    found = f"{role} {short_repr(str(name))}"
    if os.path.isdir(path):
        return found_at(path)

    if os.path.isfile(path) and path.suffix == ".gguf":
        return found_at(path)

    if os.path.lexists(path):
        raise ModelLoadError(f"{found} is not {EXPECTED[role]}")

    if isinstance(name, Path):
        raise ModelLoadError(f"{found} does not exist (a Path is never a hub id)")

    if path.suffix in FILE_SUFFIXES:
        raise ModelLoadError(f"{found} does not exist (a name that ends in {path.suffix} is never a hub id)")

    # Imported here, because importing the hub's library takes longer than to find a local model.
    from drift_sdk.loading.hub import HubRepository, is_hub_id

    repo_id, quant = split_quant(name)
    if not is_hub_id(repo_id) or quant == "":
        raise ModelLoadError(f"{found} does not exist, and is not a hub id")

    repository = HubRepository(
        repo_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only, report=report
    )
    where = f" at revision {revision!r}" if revision is not None else ""
    with name_place(f"{found}{where}"):
        if quant is not None:
            model = repository.gguf_model(quant)
        elif role == "tokenizer":
            return found_at(repository.tokenizer_files())
        else:
            model = repository.folder_model(is_draft=role == "draft")

    def fetch() -> Source:
        with name_place(f"{found}{where}"):
            return Source(model.fetch())

    return Found(source=Source(model.path), missing=model.missing, fetch=fetch)


def found_at(path: Path) -> Found:
    """Files that are all there."""
    source = Source(path)
    return Found(source=source, missing=(), fetch=lambda: source)


def resolve(
    name: str | Path,
    *,
    role: Role = "model",
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    report: Report | None = None,
    judge: Callable[[Source], object] | None = None,
    has_weights: bool = True,
) -> Source:
    """All files of a model, a draft or a tokenizer, found as `find` finds them.

    judge: called before weights are downloaded, with their source as far as it is there; what it raises is
           raised, and nothing more is downloaded. Not called if there is nothing to download.
    has_weights: False leaves weights that are not in the cache on the hub.
    """
    found = find(
        name,
        role=role,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        report=report,
    )
    if found.missing and judge is not None:
        judge(found.source)
    return found.fetch() if has_weights else found.source


@contextmanager
def name_place(place: str) -> Iterator[None]:
    """Name role, name and revision in a ModelLoadError of looking for a hub id."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{place}: {error} (no such path exists either)") from None


def expand_home(name: str | Path) -> Path:
    """The path with a leading "~" or "~user" replaced by the home directory, where one is known."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:  # an unknown user, or no home directory
        return path


@contextmanager
def name_role(role: Role) -> Iterator[None]:
    """Prefix the message of a ModelLoadError raised in the block with `role`."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{role}: {error}") from error.__cause__


def eos_token_ids(source: Source, vocab_size: int) -> tuple[int, ...]:
    """The ids below `vocab_size` that end a completion: those of generation_config.json, else those of the
    config, else those of the text part in it. Empty if none names any.

    Raises ModelLoadError for a value that is no token id or list of them, and if every named id is
    `vocab_size` or above.
    """
    text = source.config.get("text_config")
    places = {"generation_config": source.generation_config, "config": source.config, "text_config": text}
    for name, settings in places.items():
        if isinstance(settings, Mapping) and settings.get("eos_token_id") is not None:
            place = f"{source.path}: {name}"
            ids = _ids(place, settings)
            # A padded or trimmed vocabulary leaves ids that cannot be generated.
            known = tuple(token_id for token_id in ids if token_id < vocab_size)
            if ids and not known:
                found = f"{place}: eos_token_id={short_repr(list(ids))}"
                raise ModelLoadError(f"{found}: expected one below vocab_size={vocab_size}")

            return known

    return ()


def _ids(place: str, settings: Mapping[str, Any]) -> tuple[int, ...]:
    value = settings["eos_token_id"]
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(
        isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids
    ):
        raise ModelLoadError(f"{place}: eos_token_id={short_repr(value)}: expected token ids")

    return ids


def read_config(source: Source, config: EngineConfig) -> ModelSpec:
    """The decoder's configuration; ModelLoadError naming the file, the setting and its value."""
    settings = source.config  # its errors name the file
    file = _settings_file(source)
    try:
        return read_spec(settings, max_model_len=config.max_model_len)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except Exception as error:  # settings of a wrong type may raise anything
        raise ModelLoadError(f"{file}: not the config of a model: {error!r}") from error


def check_kv_scheme(source: Source, config: EngineConfig, model: ModelSpec) -> None:
    """Raise ModelLoadError naming file and setting if the files' scales of the KV cache are not those of
    `EngineConfig.kv_dtype`."""
    scheme = model.quantisation
    if config.load == "auto" and config.kv_dtype == "fp8" and scheme is not None and scheme.kv_obstacle:
        raise ModelLoadError(
            f"{_settings_file(source)}: config: quantization_config with {scheme.kv_obstacle} is not "
            'implemented for kv_dtype="fp8": expected static scales of e4m3'
        )


def _settings_file(source: Source) -> Path:
    return source.path if source.path.is_file() else source.path / "config.json"


def hub_settings(config: EngineConfig) -> dict[str, Any]:
    """Arguments of `find` and `resolve` for any role."""
    return {"cache_dir": config.cache_dir, "local_files_only": config.local_files_only}
