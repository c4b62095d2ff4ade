"""The command `tree`: drawing, statistics and buffers."""

from __future__ import annotations

from pathlib import Path

import pytest

from drift_sdk.cli.command_line import main
from drift_sdk.cli.drafts import describe_tree
from drift_sdk.speculation import DynamicTree, StaticTree


def test_static_tree_is_drawn_with_its_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    assert main(["tree", str(tmp_path / "tree.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "0  newest token",
        "|-- 1  rank 0",
        "|   |-- 3  rank 0",
        "|   |   `-- 5  rank 0",
        "|   `-- 4  rank 1",
        "`-- 2  rank 1",
    ]
    text = "\n".join(lines)
    assert "nodes                     6, the newest token included" in text
    assert "leaves                    3" in text
    assert "candidates after a token  2" in text
    assert "nodes of depth  1         2, with children 1" in text
    assert [line.split()[:4] for line in lines if line.endswith("bytes")] == [
        *(["1", "5", "6", "2"], ["2", "5", "12", "4"], ["4", "5", "24", "8"], ["8", "5", "48", "16"]),
        *(["16", "5", "96", "32"], ["32", "5", "192", "64"], ["64", "3", "256", "64"]),
        ["128", "1", "256", "0"],
    ]


def test_dynamic_tree_is_described() -> None:
    text = "\n".join(describe_tree(DynamicTree(top_k=3, depth=4, num_draft_tokens=20)))
    assert "the best 20 drafts of each round" in text
    assert "candidates considered     30" in text


def test_deepest_tree_fits_its_drawing() -> None:
    paths = tuple((0,) * length for length in range(1, 17))
    assert "`-- 16  rank 0" in "\n".join(describe_tree(StaticTree(paths)))


def test_wrong_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", str(tmp_path / "none.toml")]) == 1
    assert "file=" in capsys.readouterr().err
