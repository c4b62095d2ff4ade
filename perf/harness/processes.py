"""Command lines of child processes that run modules of this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ROOT", "module_command", "with_paths"]

ROOT = Path(__file__).parents[2]
"""The repository's root folder."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]


def with_paths(environment: Mapping[str, str], *paths: str | None) -> dict[str, str]:
    """The environment with `paths`, then the repository, put in front of its PYTHONPATH."""
    found = (*paths, str(ROOT), environment.get("PYTHONPATH"))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, found))}
