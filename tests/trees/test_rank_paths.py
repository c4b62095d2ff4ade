"""Static trees: numbering, checks of paths, and files."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drift_sdk import ConfigError, DynamicTree, StaticTree, load_tree
from drift_sdk.trees import check_paths, rank_tree

EXAMPLE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


@st.composite
def paths(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Paths with all their prefixes, in any order."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 25))):
        path = (*draw(st.sampled_from(found)), draw(st.integers(0, 3)))
        if path not in found:
            found.append(path)
    return tuple(draw(st.permutations(found[1:])))


@given(paths())
@settings(max_examples=100)
def test_nodes_are_numbered_by_preference(given_paths: tuple[tuple[int, ...], ...]) -> None:
    ranked = rank_tree(check_paths(given_paths))
    tree = ranked.tree
    found = [tuple(ranked.ranks[each] for each in tree.path(node)[1:]) for node in range(tree.num_nodes)]
    assert sorted(found[1:]) == sorted(given_paths)
    costs = [(sum(path) + len(path), len(path), path) for path in found]
    assert costs == sorted(costs)
    for node in range(tree.num_nodes):
        ranks = [ranked.ranks[child] for child in tree.children(node)]
        assert ranks == sorted(ranks)


def test_order_of_the_example() -> None:
    ranked = rank_tree(EXAMPLE)
    assert ranked.tree.parents == (-1, 0, 0, 1, 0, 1, 2, 3)
    assert ranked.ranks == (0, 0, 1, 0, 2, 1, 0, 0)


WRONG = {
    "none": ((), "1 to 63 paths"),
    "text": ("00", "1 to 63 paths"),
    "too many": (tuple((a, b) for a in range(8) for b in range(8)), "1 to 63 paths"),
    "an empty path": (((0,), ()), "paths of 1 to 16 ranks from 0 to 15"),
    "a long path": (tuple((0,) * length for length in range(1, 18)), "paths of 1 to 16 ranks"),
    "a high rank": (((16,),), "from 0 to 15"),
    "a negative rank": (((-1,),), "from 0 to 15"),
    "a bool": (((True,),), "from 0 to 15"),
    "a float": (((0.0,),), "from 0 to 15"),
    "twice": (((0,), (1,), (0,)), "each path once"),
    "no prefix": (((0,), (1, 0)), r"its prefix \(1,\) among the paths"),
    "a flat path": ((0, 1), "paths of 1 to 16 ranks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_paths_are_rejected(case: str) -> None:
    value, allowed = WRONG[case]
    with pytest.raises(ConfigError, match=allowed) as caught:
        StaticTree(value)
    assert caught.value.field == "paths"


class OwnRank(int):
    """A rank that cannot be compared."""

    def fail(self, other: object = None) -> Any:
        raise RuntimeError("no")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __add__ = __radd__ = __hash__ = fail  # type: ignore[assignment]


class Unreadable(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("no")


def test_ranks_of_an_own_class_become_plain_ones() -> None:
    tree = StaticTree(((OwnRank(0),), [OwnRank(0), OwnRank(1)]))  # type: ignore[arg-type]
    assert tree.paths == ((0,), (0, 1))
    assert {type(rank) for path in tree.paths for rank in path} == {int}


@pytest.mark.parametrize("paths", [Unreadable([[0]]), [Unreadable([0])], range(2**70), [range(2**70)]])
def test_paths_that_cannot_be_read_are_rejected(paths: Any) -> None:
    with pytest.raises(ConfigError, match="^paths=.*: expected"):
        StaticTree(paths)


def test_too_many_nodes_with_children_at_one_depth_are_rejected() -> None:
    wide = [(0,), (1,), *itertools.product(range(2), range(9))]
    deep = [(*path, 0) for path in wide if len(path) == 2]
    assert StaticTree((*wide, *deep[:16])).num_draft_tokens == 36
    with pytest.raises(ConfigError, match="at most 16 nodes of one depth with children, not 17 of 2"):
        StaticTree((*wide, *deep[:17]))


def test_trees_of_files(tmp_path: Path) -> None:
    lists = [list(path) for path in EXAMPLE]
    (tmp_path / "list.json").write_text(json.dumps(lists))
    (tmp_path / "table.json").write_text(json.dumps({"paths": lists}))
    (tmp_path / "static.toml").write_text(f"paths = {lists}")
    (tmp_path / "dynamic.toml").write_text("top_k = 3\ndepth = 4\nnum_draft_tokens = 12")
    (tmp_path / "default.json").write_text("{}")
    (tmp_path / "list.yaml").write_text("\n".join(f"- {each}" for each in lists))
    (tmp_path / "static.yml").write_text("# the example\npaths:\n" + "".join(f"- {each}\n" for each in lists))
    (tmp_path / "dynamic.yaml").write_text("top_k: 3\ndepth: 4\nnum_draft_tokens: 12")
    for name in ("list.json", "table.json", "static.toml", "list.yaml", "static.yml"):
        assert load_tree(tmp_path / name) == StaticTree(EXAMPLE)
    for name in ("dynamic.toml", "dynamic.yaml"):
        assert load_tree(str(tmp_path / name)) == DynamicTree(top_k=3, depth=4, num_draft_tokens=12)
    assert load_tree(tmp_path / "default.json") == DynamicTree()


MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 30)
)
"""A mapping of 9**29 merged mappings."""
FILES = {
    "tree.ini": ("paths = []", "file", r"ends in .toml, .json, .yaml or .yml"),
    "broken.yaml": ("paths: [[0]", "file", "a readable YAML file"),
    "object.yaml": ("!!python/object/apply:os.getcwd []", "file", "could not determine a constructor"),
    "endless.yaml": ("paths: &a [*a]", "file", "it has an alias"),
    "merges.yaml": (MERGES, "file", "it has an alias"),
    "bool.yaml": ("top_k: !!bool maybe", "file", "a value does not fit its tag"),
    "int.yaml": ('top_k: !!int ""', "file", "a value does not fit its tag"),
    "time.yaml": ("top_k: !!timestamp soon", "file", "a value does not fit its tag"),
    "keys.yaml": ("1: 2", "file", "a table of settings, or a list of paths"),
    "empty.yaml": ("", "file", "a table of settings, or a list of paths"),
    "deep.yaml": ("[" * 2_000, "file", "a readable YAML file"),
    "broken.json": ("[[0]", "file", "a readable JSON file"),
    "broken.toml": ("paths = [[0]", "file", "a readable TOML file"),
    "number.json": ("7", "file", "a table of settings, or a list of paths"),
    "deep.json": ("[" * 16_000, "file", "a readable JSON file"),
    "large.json": (" " * 2**14 + "7", "file", "at most 16384 bytes"),
    "unknown.toml": ("top_k = 2\nwidth = 3", "width", "unknown field"),
    "misspelt.json": ('{"pathz": [[0]]}', "pathz", r"\(did you mean paths\?\), expected one of depth"),
    "both.json": ('{"paths": [[0]], "depth": 2}', "depth", "unknown field"),
    "wrong.toml": ("top_k = 0", "top_k", "an integer from 1 to 16"),
    "wrong.json": ('[["0"]]', "paths", "from 0 to 15"),
    "missing.json": (None, "file", "a readable JSON file"),
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_files_are_rejected(name: str, tmp_path: Path) -> None:
    text, field, message = FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_tree(tmp_path / name)
    assert caught.value.field == field


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_file_that_is_no_regular_one_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("fifo.json", "folder.json"):
        with pytest.raises(ConfigError, match="a regular file"):
            load_tree(tmp_path / name)


@pytest.mark.parametrize("file", [None, 5, b"tree.json"])
def test_wrong_path_is_rejected(file: Any) -> None:
    with pytest.raises(ConfigError, match="a path") as caught:
        load_tree(file)
    assert caught.value.field == "file"
