"""Removal of a folder of results that holds nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from drift_sdk.errors import ConfigError
from perf.harness.record import UNFINISHED

__all__ = ["remove_results", "result_names"]


def result_names(topics: Iterable[str]) -> set[str]:
    """The names of the files that commands write for topics: results and logs."""
    return {f"{topic}{suffix}" for topic in topics for suffix in (".json", f".json{UNFINISHED}", ".log")}


def remove_results(folder: Path, names: Collection[str], markers: Collection[str] = ()) -> None:
    """Remove a folder whose files all have one of the paths `names`, relative to it. Nothing is done if there
    is no such folder.

    markers: one of these files has to be there, unless the folder is empty.

    Raises ConfigError, which names the file, before anything is removed: for a file of another name, a folder
    that belongs to no name, a link to a folder, and a path that is no folder.
    """
    if not folder.exists() and not folder.is_symlink():
        return

    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError.of("out", str(folder), "a folder")

    parents = {str(parent) for name in names for parent in Path(name).parents} - {"."}
    found = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if name not in (parents if is_folder else names):
            raise ConfigError.of("out", str(path), "nothing but results of this command in the folder")
        found.add(name)

    if found and markers and found.isdisjoint(markers):
        allowed = f"a folder that this command has written, with {' or '.join(sorted(markers))}"
        raise ConfigError.of("out", str(folder), allowed)

    shutil.rmtree(folder)
