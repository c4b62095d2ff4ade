"""Progress of a starting engine."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

__all__ = ["Download", "Progress", "Report", "ignore_progress"]


class Download(Struct, frozen=True, kw_only=True):
    """Files that are being fetched from the hub; those that its cache held before are not counted.

    num_files:      files to fetch.
    num_files_done: of them, those that are complete.
    num_bytes:      bytes to fetch, as far as the hub tells the sizes of files.
    num_bytes_done: of them, those received.
    """

    num_files: int
    num_files_done: int
    num_bytes: int
    num_bytes_done: int


class Progress(Struct, frozen=True, kw_only=True):
    """A stage of starting an engine.

    stage:    such as "find", "download", "load weights" or "capture graphs"; the last is "ready".
    fraction: how much of the stage is done, 0 to 1.
    download: files and bytes, while small files are fetched from the hub ("find") and while weights are
              ("download"); else None.
    """

    stage: str
    fraction: float
    download: Download | None = None


class Report(Protocol):
    """Called with a stage of starting, the fraction of it that is done (0 to 1), and what is being
    downloaded, if anything is."""

    def __call__(self, stage: str, fraction: float, download: Download | None = None) -> None: ...


def ignore_progress(stage: str, fraction: float, download: Download | None = None) -> None:
    """A `Report` that drops what it is given."""
