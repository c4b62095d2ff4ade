"""Static trees, given by paths of ranks.

A path lists, from the root on, the rank of each token among the draft's candidates after its parent, 0 being
the best: (0, 1) is the second best candidate after the best one.
"""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from drift_sdk._validation import plain_scalar
from drift_sdk.errors import ConfigError
from drift_sdk.trees.limits import MAX_CANDIDATES, MAX_NON_LEAVES, MAX_PATH_LENGTH, MAX_TREE_DRAFTS
from drift_sdk.trees.token_tree import TokenTree

__all__ = ["RankPaths", "RankedTree", "check_paths", "rank_tree", "read_tree_file"]

RankPaths = tuple[tuple[int, ...], ...]
MAX_FILE_BYTES = 2**14
"""Largest file of a tree; 63 paths of 16 ranks take some 4 KiB. The time that tomllib takes for nested tables
grows with the square of their depth."""
FORMATS = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""Formats of files, by the ends of their names."""


class RankedTree:
    """A tree, and the rank of each node among the candidates after its parent (0 for the root).

    Nodes are numbered by the sum of (rank + 1) along their path, then by depth, then by path. A draft of few
    tokens takes the first of them: the likeliest, as far as ranks tell.
    """

    __slots__ = ("ranks", "tree")

    def __init__(self, paths: RankPaths) -> None:
        ordered = sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))
        number = {(): 0} | {path: node for node, path in enumerate(ordered, 1)}
        self.tree: TokenTree = TokenTree([-1, *(number[path[:-1]] for path in ordered)])
        self.ranks: tuple[int, ...] = (0, *(path[-1] for path in ordered))


@lru_cache(maxsize=64)
def rank_tree(paths: RankPaths) -> RankedTree:
    """The tree of checked paths."""
    return RankedTree(paths)


def check_paths(paths: object) -> RankPaths:
    """The paths as tuples of plain integers. Raises ConfigError naming `paths` for a wrong one."""
    items = _items(paths, MAX_TREE_DRAFTS)
    if not items:
        raise ConfigError.of("paths", paths, f"1 to {MAX_TREE_DRAFTS} paths")

    checked = tuple(map(_checked_path, items))
    found: set[tuple[int, ...]] = set()
    for path in checked:
        if path in found:
            raise ConfigError.of("paths", path, "each path once")

        found.add(path)

    for path in checked:
        if path[:-1] and path[:-1] not in found:
            raise ConfigError.of("paths", path, f"its prefix {path[:-1]} among the paths")

    counts = RankedTree(checked).tree.num_non_leaves
    if max(counts) > MAX_NON_LEAVES:
        depth = counts.index(max(counts))
        allowed = f"at most {MAX_NON_LEAVES} nodes of one depth with children, not {max(counts)} of {depth}"
        raise ConfigError.of("paths", paths, allowed)

    return checked


def read_tree_file(file: str | Path) -> dict[str, Any]:
    """The settings in a TOML, JSON or YAML file; a list at the top of a file is taken for `paths`.

    Raises ConfigError naming `file` if it cannot be read.
    """
    if not isinstance(file, str | Path):
        raise ConfigError.of("file", file, "a path")

    path = Path(file)
    if path.suffix not in FORMATS:
        raise ConfigError.of("file", str(file), "a name that ends in .toml, .json, .yaml or .yml")

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO may never return
            raise ConfigError.of("file", str(file), "a regular file")

        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError.of("file", str(file), f"at most {MAX_FILE_BYTES} bytes")

        settings = _parse(data, FORMATS[path.suffix])
    except (OSError, ValueError, RecursionError) as error:
        allowed = f"a readable {FORMATS[path.suffix]} file: {error}"
        raise ConfigError.of("file", str(file), allowed) from error

    if isinstance(settings, list):
        return {"paths": settings}

    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError.of("file", str(file), "a table of settings, or a list of paths")

    return settings


def _parse(data: bytes, form: str) -> object:
    """The value in a file. ValueError or RecursionError for one that is wrong."""
    if form == "TOML":
        return tomllib.loads(data.decode())

    if form == "JSON":
        return json.loads(data)

    import yaml  # 10 ms, which other files need not wait for

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Without aliases: those that are merged into each other take time without end."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias")

            return super().compose_node(parent, index)

    try:
        return yaml.load(data, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (LookupError, AttributeError) as error:  # a tag such as !!bool before other text
        raise ValueError(f"a value does not fit its tag ({error!r})") from error


def _checked_path(path: object) -> tuple[int, ...]:
    """A path as a tuple of plain integers; ConfigError naming `paths` for a wrong one."""
    ranks = _items(path, MAX_PATH_LENGTH)
    if not ranks or not all(map(_is_rank, ranks)):
        allowed = f"paths of 1 to {MAX_PATH_LENGTH} ranks from 0 to {MAX_CANDIDATES - 1}"
        raise ConfigError.of("paths", path, allowed)

    return ranks


def _items(value: object, most: int) -> tuple[Any, ...]:
    """The items of a sequence, as plain values; empty for a value that is not a sequence, cannot be read or
    has more than `most` items."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return ()

    try:
        items = tuple(islice(value, most + 1))
    except Exception:  # from a class of the caller's
        return ()

    return tuple(map(plain_scalar, items)) if len(items) <= most else ()


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_CANDIDATES
