"""Progress of a download from the hub, counted by the progress bars that huggingface_hub makes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # not marked as public

from drift_sdk.loading.hub_files import HubFile
from drift_sdk.progress import Download, Report

__all__ = ["DownloadCounter"]


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
