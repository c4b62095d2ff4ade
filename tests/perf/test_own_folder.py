"""Removal of folders of results: everything of others stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from drift_sdk import ConfigError
from perf.harness.own_folder import remove_results, result_names

NAMES = {*result_names(["decode"]), "report.md", "results/suite.state"}


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("content")


def test_folder_of_results_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    remove_results(folder, NAMES)  # there is none
    folder.mkdir()
    remove_results(folder, NAMES, ["report.md"])
    assert not folder.exists()
    fill(folder, "decode.json", "decode.json.new", "decode.log", "report.md", "results/suite.state")
    remove_results(folder, NAMES, ["report.md"])
    assert not folder.exists()


@pytest.mark.parametrize("name", ["notes.txt", "results/decode.json", "other/decode.json", "report.md/a"])
def test_folder_with_another_file_is_refused_whole(name: str, tmp_path: Path) -> None:
    fill(tmp_path, "decode.json", name)
    with pytest.raises(ConfigError) as caught:
        remove_results(tmp_path, NAMES)
    named = tmp_path / name
    assert caught.value.field == "out" and caught.value.value in (str(named), str(named.parent))
    assert named.exists() and (tmp_path / "decode.json").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "out"
    fill(outside, "decode.json")
    fill(folder, "decode.log")
    (folder / "results").symlink_to(outside)
    with pytest.raises(ConfigError):
        remove_results(folder, NAMES)
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(ConfigError):
        remove_results(tmp_path / "link", NAMES)
    with pytest.raises(ConfigError):
        remove_results(outside / "decode.json", NAMES)
    assert (outside / "decode.json").read_text() == "content" and (folder / "decode.log").exists()


def test_folder_without_the_commands_own_file_is_refused(tmp_path: Path) -> None:
    """A folder may hold a report of another tool."""
    fill(tmp_path, "report.md")
    with pytest.raises(ConfigError, match="written, with results/suite.state"):
        remove_results(tmp_path, NAMES, ["results/suite.state"])
    assert (tmp_path / "report.md").exists()
