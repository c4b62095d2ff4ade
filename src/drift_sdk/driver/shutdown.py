"""Steps at the end of an engine's thread, all of which run, whatever the others raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from drift_sdk.errors import error_repr

__all__ = ["log_error", "run_all"]

log: logging.Logger = logging.getLogger("drift_sdk")


def run_all(steps: Mapping[str, Callable[[], object]]) -> None:
    """Run steps in order. Errors are logged with the step's name."""
    for name, step in steps.items():
        try:
            step()
        except BaseException as error:
            log_error(f"{name} failed", error)


def log_error(what: str, error: BaseException) -> None:
    """Log an error, also if a filter or handler of the program raises then."""
    with suppress(Exception):
        log.error("%s: %s", what, error_repr(error))
