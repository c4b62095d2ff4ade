"""Output for a terminal: errors and the progress of a starting engine, both on stderr."""

from __future__ import annotations

import sys

from drift_sdk.progress import Download, Progress

__all__ = ["hide_progress", "print_error", "show_progress"]


def print_error(error: Exception, text: str | None = None) -> None:
    """Print one line on stderr: the name of the error's class and `text`, by default the error's message."""
    print(f"{type(error).__name__}: {text if text is not None else error}", file=sys.stderr)


def show_progress(progress: Progress) -> None:
    """Overwrite the current line of stderr with a stage, its percentage and what has been downloaded; nothing
    if it is no terminal."""
    if sys.stderr.isatty():
        line = f"{progress.stage}: {progress.fraction:.0%}"
        if progress.download is not None:
            line += f" ({describe_download(progress.download)})"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def describe_download(download: Download) -> str:
    """Files and bytes, such as "1 of 3 files, 0.40 of 4.08 GB"."""
    done, total = (num_bytes / 1e9 for num_bytes in (download.num_bytes_done, download.num_bytes))
    return f"{download.num_files_done} of {download.num_files} files, {done:.2f} of {total:.2f} GB"


def hide_progress() -> None:
    """Clear the line that `show_progress` wrote."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
