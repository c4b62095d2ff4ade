"""Output for a terminal: errors and the progress of a starting engine, both on stderr."""

from __future__ import annotations

import sys

from drift_sdk.progress import Progress

__all__ = ["hide_progress", "print_error", "show_progress"]


def print_error(error: Exception, text: str | None = None) -> None:
    """Print one line on stderr: the name of the error's class and `text`, by default the error's message."""
    print(f"{type(error).__name__}: {text if text is not None else error}", file=sys.stderr)


def show_progress(progress: Progress) -> None:
    """Overwrite the current line of stderr with a stage and its percentage; nothing if it is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress.stage}: {progress.fraction:.0%}", end="", file=sys.stderr, flush=True)


def hide_progress() -> None:
    """Clear the line that `show_progress` wrote."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
