"""Models from the Hugging Face hub, through its local cache; of GGUF files, headers without the rest.

The library is called on daemon threads, which a caller may stop waiting for. It waits for a silent hub for
minutes, and for a slow one for ever, and nothing can end that: so the threads that wait are given up.
Neither a pool's shutdown nor the interpreter's exit waits for them.

Progress is counted by the progress bars that huggingface_hub makes.
"""

from __future__ import annotations

import inspect
import queue
import re
import shutil
import socket
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked as public
    build_hf_headers,
    filter_repo_objects,
    get_session,
    hf_raise_for_status,
    tqdm,
    validate_repo_id,
)
from msgspec import Struct

from drift_sdk._files import has_file, is_inside
from drift_sdk.errors import DriftError, ModelLoadError, short_repr
from drift_sdk.events import Download, Report, ignore_progress
from drift_sdk.loading.draft import TORCH_FILE
from drift_sdk.loading.file_names import (
    SMALL_PATTERNS,
    HubFile,
    choose_gguf,
    gguf_quants,
    hub_file,
    weight_names,
)
from drift_sdk.loading.gguf_file import ROPE_FACTORS, GGUFHeader, read_header
from drift_sdk.loading.safetensors import INDEX_FILE, SINGLE_FILE, read_index

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

MAX_THREADS = 8
"""Most files that are downloaded at a time, as in the hub's own library."""
POLL_S = 0.05
"""Seconds between two looks whether the result is still wanted."""


def call(function: Callable[[], ResultT], check: Callable[[], object]) -> ResultT:
    """Call a function on another thread, and return its result; see `call_each`."""
    (result,) = call_each(lambda _: function(), [None], check)
    return result


def call_each(
    function: Callable[[ArgumentT], ResultT],
    arguments: Sequence[ArgumentT],
    check: Callable[[], object],
) -> list[ResultT]:
    """Call a function with each of the arguments, on several threads, and return the results in order.

    check: called on this thread again and again while it waits; what it raises ends the waiting.

    Raises the first error of a call. Calls that have not begun by then, or when `check` raises, never begin.
    """
    todo = deque(enumerate(arguments))
    ended: queue.SimpleQueue[tuple[int, ResultT | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                index, argument = todo.popleft()
            except IndexError:
                return

            try:
                ended.put((index, function(argument), None))
            except BaseException as error:
                ended.put((index, None, error))

    results: dict[int, ResultT] = {}
    try:
        for _ in range(min(MAX_THREADS, len(arguments))):
            start(threading.Thread(target=work, name="drift-hub", daemon=True))
        while len(results) < len(arguments):
            check()
            try:
                index, result, error = ended.get(timeout=POLL_S)
            except queue.Empty:
                continue

            if error is not None:
                raise error

            results[index] = result  # type: ignore[assignment]  # there was no error
    finally:
        todo.clear()
    return [results[index] for index in range(len(arguments))]


def start(thread: threading.Thread) -> None:
    """Start a thread; ModelLoadError if the process may not have more."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ModelLoadError(f"no thread can be started for a download: {error}") from error


class Unwanted(Exception):
    """Ends a download whose result nobody waits for."""


class DownloadCounter:
    """Counts the files and bytes of a download. `stopped`: set when the result is not wanted any more, which
    ends the downloads of files whose bars are of `bar_class`.

    stage: name of the stage of starting that is reported.
    files: what is fetched.
    """

    def __init__(self, stage: str, files: Sequence[HubFile], report: Report | None) -> None:
        self.stopped: threading.Event = threading.Event()
        self._stage = stage
        self._sizes = {file.name: file.num_bytes or 0 for file in files}
        self._report = report
        self._lock = threading.Lock()  # several files are downloaded at a time, each on a thread
        self._done: set[str] = set()
        self._num_received = 0.0

    def bar_class(self) -> type[Any]:
        """A class of progress bars that print nothing and tell this counter of received bytes."""
        counter = self

        class SilentBar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                # Of the two bars of bytes, that of the network leaves out what another process has fetched.
                is_transfer = str(kwargs.get("name")).endswith(".transfer")
                self._counts_bytes = kwargs.get("unit") == "B" and not is_transfer
                super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]
                self.update(kwargs.get("initial"))  # bytes that an interrupted download has left

            def update(self, n: float | None = 1) -> None:
                counter.add((n or 0) if self._counts_bytes else 0)

        return SilentBar

    def add(self, num_bytes: float) -> None:
        """Count received bytes. Raises an exception that ends the download once it is `stopped`."""
        if self.stopped.is_set():
            raise Unwanted

        with self._lock:
            self._num_received += num_bytes

    def file_done(self, name: str) -> None:
        """Count a file that is whole in the cache."""
        if name in self._sizes:
            self._done.add(name)

    def report(self) -> None:
        """Report the state of the download."""
        if self._report is None:
            return

        total, num_files = sum(self._sizes.values()), len(self._sizes)
        done = list(self._done)
        whole = sum(self._sizes[name] for name in done)
        received = min(max(int(self._num_received), whole), total)
        download = Download(
            num_files=num_files, num_files_done=len(done), num_bytes=total, num_bytes_done=received
        )
        fraction = received / total if total else len(done) / max(num_files, 1)
        self._report(self._stage, fraction, download)


COMMIT = re.compile("[0-9a-f]{40}")
NAMING_HEADERS = ("etag", "x-linked-etag", "x-repo-commit")
"""Headers of the hub from which its library makes paths in the cache, without a check."""
LAST_FILE = "tokenizer.json"
"""Fetched last: a look-up in the cache takes it as a sign that the other files are there."""


def download(
    repo_id: str,
    names: Collection[str],
    counter: DownloadCounter,
    *,
    revision: str | None,
    cache_dir: str | Path | None,
) -> Path:
    """Fetch files of one commit that are not in the cache; returns the repository's folder there.

    names:    their paths in the repository, one at least.
    revision: of the first file. The others are of the same commit, whatever the revision names later.

    Raises what the counter's report and the hub's library raise. Like the library's own function, but that
    downloads in a pool of threads, which the interpreter's exit waits for.
    """
    options: dict[str, Any] = {"cache_dir": cache_dir}
    if "tqdm_class" in inspect.signature(huggingface_hub.hf_hub_download).parameters:
        options["tqdm_class"] = counter.bar_class()

    def fetch(revision: str | None, name: str) -> Path:
        check_responses()
        path = huggingface_hub.hf_hub_download(repo_id, name, revision=revision, **options)
        counter.file_done(name)
        return Path(path).parents[len(PurePosixPath(name).parts) - 1]

    first, *others = sorted(names, key=lambda name: (name == LAST_FILE, name))
    last = [others.pop()] if others and others[-1] == LAST_FILE else []
    groups = [[first], others, last]
    if revision is not None and COMMIT.fullmatch(revision):
        groups = [[first, *others], last]
    try:
        folders: set[Path] = set()
        for group in groups:
            folders.update(call_each(partial(fetch, revision), group, counter.report))
            if len(folders) > 1:
                raise ModelLoadError("the hub sends files of several commits")

            (folder,) = folders
            revision = folder.name
    finally:
        counter.stopped.set()
    counter.report()
    return folder


def check_responses() -> None:
    """Have the library's session, on this thread, raise ModelLoadError for headers that name a path outside
    of the cache: the library would write there."""
    session: Any = get_session()
    hooks = session.event_hooks if hasattr(session, "event_hooks") else session.hooks  # httpx, requests
    if check_names not in hooks["response"]:
        hooks["response"].append(check_names)


def check_names(response: Any, *_: object, **__: object) -> None:
    """Raise ModelLoadError for a response that names a path outside of the cache."""
    for header in NAMING_HEADERS:
        value = response.headers.get(header)
        # The library takes all leading W and / from a tag, and older versions none.
        names = (value.lstrip("W/").strip('"'), value.strip('"')) if value else ()
        if not all(map(is_inside, names)):
            raise ModelLoadError(
                f"the hub sends {header} {short_repr(value)}, expected the name of a file in the cache"
            )


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

    return f"the hub cannot be reached: {describe(error)}; a folder or a .gguf file needs no hub"


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
