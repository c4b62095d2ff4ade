"""Download of files of a repository on the hub into its cache, and its progress.

Progress is counted by the progress bars that huggingface_hub makes.

The library is called on daemon threads, which a caller may stop waiting for. It waits for a silent hub for
minutes, and for a slow one for ever, and nothing can end that: so the threads that wait are given up.
Neither a pool's shutdown nor the interpreter's exit waits for them.
"""

from __future__ import annotations

import inspect
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub.utils import get_session, tqdm  # type: ignore[attr-defined]  # not marked as public

from drift_sdk._files import is_inside
from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.loading.file_names import HubFile
from drift_sdk.progress import Download, Report

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
