"""Progress of a download from the hub, counted by the progress bars that huggingface_hub makes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # not marked as public

from drift_sdk.loading.hub_files import HubFile
from drift_sdk.progress import Download, Report

__all__ = ["DownloadCounter"]


class DownloadCounter:
    """Reports a stage of starting while its files are fetched, on threads of huggingface_hub. An error that
    the report raises ends the download.

    stage:   name of the stage.
    files:   what is fetched.
    is_done: whether a file, given by its path in the repository, is whole in the cache.

    Versions of huggingface_hub before 1.0 do not count bytes on such bars: nothing is reported with them, and
    a download goes on to its end.
    """

    def __init__(
        self, stage: str, files: Sequence[HubFile], is_done: Callable[[str], bool], report: Report | None
    ) -> None:
        self._stage = stage
        self._files = files
        self._is_done = is_done
        self._report = report
        self._lock = threading.Lock()  # several files are downloaded at a time, each on a thread
        self._num_bytes = sum(file.num_bytes or 0 for file in files)
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

            def update(self, n: float | None = 1) -> None:
                counter.add((n or 0) if self._counts_bytes else 0)

        return SilentBar

    def add(self, num_bytes: float) -> None:
        """Count received bytes, or look which files are whole, and report."""
        if self._report is None:
            return

        with self._lock:
            self._num_received += num_bytes
            done = [file for file in self._files if self._is_done(file.name)]
            whole = sum(file.num_bytes or 0 for file in done)
            received = min(max(int(self._num_received), whole), self._num_bytes)
            download = Download(
                num_files=len(self._files),
                num_files_done=len(done),
                num_bytes=self._num_bytes,
                num_bytes_done=received,
            )

        fraction = received / self._num_bytes if self._num_bytes else len(done) / max(len(self._files), 1)
        self._report(self._stage, fraction, download)
