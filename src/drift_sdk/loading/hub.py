"""Models from the Hugging Face hub, through its local cache.

Headers of GGUF files are fetched without the rest of the files.
"""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked as public
    build_hf_headers,
    filter_repo_objects,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)
from msgspec import Struct

from drift_sdk._files import has_file
from drift_sdk.errors import DriftError, ModelLoadError
from drift_sdk.loading.draft import TORCH_FILE
from drift_sdk.loading.file_names import (
    SMALL_PATTERNS,
    HubFile,
    choose_gguf,
    gguf_quants,
    hub_file,
    weight_names,
)
from drift_sdk.loading.gguf_config import ROPE_FACTORS
from drift_sdk.loading.gguf_file import GGUFHeader, read_header
from drift_sdk.loading.hub_download import DownloadCounter, call, download
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, read_index
from drift_sdk.progress import Report, ignore_progress

FIRST_BYTES = 1 << 23
"""Bytes of a file that are fetched first. A header takes 2 to 8 MiB, nearly all of it the vocabulary."""
MAX_HEADER_BYTES = 1 << 28
MAX_SETTING_BYTES = 1 << 20
"""The most bytes of a tensor that is a setting: factors of a rotation take some hundreds."""
MAX_SKIPPED_BYTES = 1 << 28
"""The most bytes that are read to get to a part of a file, from a hub that sends whole files."""
READ_BYTES = 1 << 16
TIMEOUT_S = 30.0
PARTIAL_CONTENT = 206
SIZE = re.compile("[0-9]{1,18}")
CONTENT_RANGE = re.compile("bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")


def copy_headers(repo_id: str, revision: str | None, names: Iterable[str], folder: Path) -> None:
    """Write a sparse copy of each file into `folder`: it has the file's size, header and settings, and holes
    in place of the weights.

    Raises ModelLoadError for a file that is not a GGUF file, and errors of the hub and its network library.
    """
    for name in names:
        url = huggingface_hub.hf_hub_url(repo_id, name, revision=revision)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data, num_bytes, header = fetch_header(url, name)
        with path.open("wb") as copy:
            copy.write(data)
            copy.truncate(num_bytes)
            for stored, tensor in header.tensors.items():
                if stored in ROPE_FACTORS and tensor.num_bytes <= MAX_SETTING_BYTES:
                    copy.seek(tensor.offset)
                    copy.write(fetch_range(url, tensor.offset, tensor.num_bytes)[0])


def fetch_header(url: str, name: str) -> tuple[bytes, int, GGUFHeader]:
    """The first bytes of a file, at least its header; the file's size; and the header."""
    wanted = FIRST_BYTES
    while True:
        data, num_bytes = fetch_range(url, 0, wanted)
        try:
            return data, num_bytes, read_header(data, num_bytes=num_bytes)
        except ValueError as error:
            if len(data) >= num_bytes or wanted >= MAX_HEADER_BYTES:
                raise ModelLoadError(f"{name}: not a whole GGUF file: {error}") from error

        wanted *= 4


def fetch_range(url: str, start: int, num_bytes: int) -> tuple[bytes, int]:
    """Bytes of a file on the hub, fewer at its end, and the size of the file.

    Of a hub that sends the whole file, no more is read than these bytes and those before them. Raises
    ModelLoadError if many lie before them, or if the hub does not tell the size, and errors of the hub and
    its network library.
    """
    end = start + num_bytes
    headers = {**build_hf_headers(), "range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
    with streamed(url, headers) as (response, parts):
        hf_raise_for_status(response)
        offset, size = sent_part(response)
        if not 0 <= start - offset <= MAX_SKIPPED_BYTES:
            wrong = f"asked for byte {start}, got byte {offset} first"
            raise ModelLoadError(f"the hub does not send parts of files: {wrong}")

        data = bytearray()
        while offset < end and (part := next(parts, None)) is not None:
            data += part[max(start - offset, 0) : end - offset]
            offset += len(part)

    if size is None and offset >= end:
        raise ModelLoadError("the hub does not tell the size of the file")

    return bytes(data), offset if size is None else size


@contextmanager
def streamed(url: str, headers: dict[str, str]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """The response to a request, and its contents as they arrive."""
    session: Any = get_session()
    if callable(session.stream):  # of httpx
        with session.stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            yield response, response.iter_bytes()
    else:  # of requests, before version 1.0 of the library
        with session.get(url, headers=headers, timeout=TIMEOUT_S, stream=True) as response:
            yield response, response.iter_content(READ_BYTES)


def sent_part(response: Any) -> tuple[int, int | None]:
    """The first byte of a file that a response sends, and the size of the file; None if it does not tell."""
    if response.status_code == PARTIAL_CONTENT:
        found = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None:
            raise ModelLoadError("the hub sends a part of the file, and does not tell which")

        return int(found[1]), int(found[2])

    length = response.headers.get("content-length", "")
    is_plain = response.headers.get("content-encoding", "identity") == "identity"
    return 0, int(length) if is_plain and SIZE.fullmatch(length) else None


ResultT = TypeVar("ResultT")

LISTING_TIMEOUT_S = 30.0
"""Most seconds without a byte of the list of files."""
# Raised for a snapshot of which some files are cached; older versions of the library have no such class.
INCOMPLETE_ERRORS: Any = getattr(errors, "IncompleteSnapshotError", ())


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, "name" or "owner/name". Nothing is looked up."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False

    return True


class HubModel(Struct, frozen=True, kw_only=True):
    """A model that was found on the hub or in its cache.

    path:    the folder or .gguf file to read config, tokenizer and template from. While files are missing, a
             folder has no weights, and a .gguf file is a copy of the header alone.
    missing: the files of weights that `fetch` downloads.
    fetch:   downloads them and returns the whole folder, or the .gguf file. Raises ModelLoadError.
    """

    path: Path
    missing: tuple[HubFile, ...]
    fetch: Callable[[], Path]


class HubRepository:
    """A repository on the hub, and what the local cache holds of it.

    The hub is asked only if the cache does not hold everything, and never with `local_files_only`.

    report: called on the caller's thread while it waits for the hub, with the stage "download" while weights
            are fetched and with "find" before. What it raises ends the waiting, and the download.

    Methods raise ModelLoadError with the state of the cache and the reason why the hub did not help; messages
    do not name the repository.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        revision: str | None,
        cache_dir: str | Path | None,
        local_files_only: bool,
        report: Report | None = None,
    ) -> None:
        self._repo_id = repo_id
        self._revision = revision
        self._cache_dir = cache_dir
        self._local_files_only = local_files_only
        self._report = report

    def tokenizer_files(self) -> Path:
        """The folder of the repository's settings and tokenizer, without its weights."""
        folder, cache_state = self._cached(SMALL_PATTERNS)
        if folder is not None and has_file(folder / "tokenizer.json"):
            return folder

        files = self._listed_files(cache_state)
        return self._download("find", small_names(files), files, cache_state)

    def folder_model(self, *, is_draft: bool) -> HubModel:
        """The model that a config.json describes, or a draft. Its small files are fetched here."""
        cached, cache_state = self._cached(SMALL_PATTERNS)
        if cached is not None and (self._local_files_only or is_complete(cached, is_draft=is_draft)):
            return whole(cached)

        try:
            files = self._listed_files(cache_state)
        except ModelLoadError:
            if cached is not None and is_whole(cached, is_draft=is_draft):
                return whole(cached)  # without the hub, what is cached is taken as it is
            raise

        names = [file.name for file in files]
        quants = gguf_quants(names)
        if "config.json" not in names and quants:
            raise ModelLoadError(
                f"it holds .gguf files and no config.json; name one as {self._repo_id}:QUANT, of {quants}"
            )

        folder = self._download("find", small_names(files), files, cache_state)
        weights = weight_names(names, folder)

        def fetch() -> Path:
            if not weights:
                return folder  # whoever reads it says what is missing

            return self._download("download", weights, files, cache_state, revision=folder.name)

        return HubModel(path=folder, missing=self._missing(weights, files), fetch=fetch)

    def gguf_model(self, quant: str) -> HubModel:
        """The model in the .gguf file, or split file, whose name ends with `quant`."""
        folder, cache_state = self._cached([])
        if folder is not None:
            found = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
            try:
                first = folder / choose_gguf(found, quant)[0]
            except ModelLoadError as error:
                cache_state = f"not in the cache ({error})"
            else:
                return whole(first)

        files = self._listed_files(cache_state)
        names = choose_gguf([file.name for file in files], quant)
        temporary = Path(tempfile.mkdtemp(prefix="drift-gguf-"))
        headers = temporary / self._repo_id  # errors of reading a file name its path

        def fetch() -> Path:
            return self._download("download", names, files, cache_state) / names[0]

        weakref.finalize(fetch, shutil.rmtree, temporary, ignore_errors=True)
        missing = self._missing(names, files)
        copy = partial(copy_headers, self._repo_id, self._revision, names, headers)
        self._ask(copy, cache_state)
        return HubModel(path=headers / names[0], missing=missing, fetch=fetch)

    def _cached(self, patterns: Sequence[str]) -> tuple[Path | None, str]:
        """The folder in the cache that holds at least the files that the cache knows and the patterns match,
        None without; and the state of the cache in words."""
        try:
            folder = huggingface_hub.snapshot_download(
                self._repo_id,
                revision=self._revision,
                cache_dir=self._cache_dir,
                local_files_only=True,
                allow_patterns=list(patterns),
            )
            return Path(folder), "only partly in the cache"
        except Exception as error:  # besides errors of the library, those of its network library
            return None, cache_state_of(error)

    def _listed_files(self, cache_state: str) -> list[HubFile]:
        """The files of the repository, by the hub."""
        if self._local_files_only:
            raise ModelLoadError(f"{cache_state}, and local_files_only is set")

        ask = partial(huggingface_hub.HfApi().model_info, self._repo_id, revision=self._revision)
        info = self._ask(partial(ask, timeout=LISTING_TIMEOUT_S, files_metadata=True), cache_state)
        return [hub_file(file.rfilename, file.size) for file in info.siblings or ()]

    def _ask(self, function: Callable[[], ResultT], cache_state: str) -> ResultT:
        """The result of a function that asks the hub."""
        report = self._report or ignore_progress
        with named_problems(cache_state):
            return call(function, lambda: report("find", 0.0))

    def _missing(self, names: Collection[str], files: Sequence[HubFile]) -> tuple[HubFile, ...]:
        return tuple(file for file in files if file.name in names and not self._is_cached(file.name))

    def _is_cached(self, name: str) -> bool:
        found = huggingface_hub.try_to_load_from_cache(
            self._repo_id, name, cache_dir=self._cache_dir, revision=self._revision
        )
        return isinstance(found, str)

    def _download(
        self,
        stage: str,
        names: Sequence[str],
        files: Sequence[HubFile],
        cache_state: str,
        *,
        revision: str | None = None,
    ) -> Path:
        """Fetch files of a revision (None: the configured one); returns the repository's folder in the
        cache."""
        counter = DownloadCounter(stage, self._missing(names, files), self._report)
        revision = self._revision if revision is None else revision
        with named_problems(cache_state):
            return download(self._repo_id, names, counter, revision=revision, cache_dir=self._cache_dir)


@contextmanager
def named_problems(cache_state: str) -> Iterator[None]:
    """Raise errors of the hub's library, and of its network library, as ModelLoadError."""
    try:
        yield
    except DriftError:
        raise
    except Exception as error:
        # The library's own chain of errors is long and ends in advice about its parameters.
        raise ModelLoadError(f"{cache_state}, and {hub_problem(error)}") from None


def small_names(files: Sequence[HubFile]) -> list[str]:
    """The files that are fetched before the config is judged. Raises ModelLoadError if there are none."""
    names = list(filter_repo_objects([file.name for file in files], allow_patterns=SMALL_PATTERNS))
    if not names:
        raise ModelLoadError(f"it holds none of {', '.join(SMALL_PATTERNS)}")

    return names


def whole(path: Path) -> HubModel:
    """A model whose files are all in the cache."""
    return HubModel(path=path, missing=(), fetch=lambda: path)


def cache_state_of(error: Exception) -> str:
    """The message for an error of a look-up in the cache."""
    if isinstance(error, INCOMPLETE_ERRORS):
        return "only partly in the cache"

    if isinstance(error, LocalEntryNotFoundError):
        return "not in the cache"

    return f"the cache cannot be read ({describe(error)})"


def hub_problem(error: Exception) -> str:
    """The cause of a failed download in words."""
    # The library wraps the cause in an error about the local cache.
    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__

    if isinstance(error, HfHubHTTPError):
        return f"the hub answers: {describe(error)}"

    is_network = isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
    if isinstance(error, OSError) and error.errno is not None and not is_network:
        return f"it cannot be downloaded: {describe(error)}"

    return f"the hub cannot be reached: {describe(error)}"


def describe(error: Exception) -> str:
    """The error's type and the first line of its text; all lines of an answer of the hub."""
    text = str(error).strip()
    text = " ".join(text.split()) if isinstance(error, HfHubHTTPError) else text.partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_complete(folder: Path, *, is_draft: bool) -> bool:
    """Whether a folder holds all that an engine needs, also the tokenizer of a model: other programs may have
    fetched the weights alone."""
    return is_whole(folder, is_draft=is_draft) and (is_draft or has_file(folder / "tokenizer.json"))


def is_whole(folder: Path, *, is_draft: bool) -> bool:
    """Whether a folder holds a config and all weights: an interrupted download leaves only some files."""
    try:
        if not has_file(folder / "config.json"):
            return False

        if has_file(folder / SINGLE_FILE) or (is_draft and has_file(folder / TORCH_FILE)):
            return True

        return has_file(folder / INDEX_FILE) and all(
            has_file(folder / shard) for shard in set(read_index(folder).values())
        )
    except ModelLoadError:
        return False
