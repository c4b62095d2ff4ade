"""Tuned tables in the user's cache: bounds, versions, whole files, and processes that take turns."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drift_sdk._kernels.gemm import tuning
from drift_sdk._kernels.gemm.gemm import GemmTiles
from drift_sdk._kernels.gemm.tuning import (
    MAX_ENTRIES,
    MeasuredOn,
    TunedTable,
    TunedTiles,
    add_to_user_table,
    measured_on,
    tuning_lock,
    user_table,
    user_table_path,
)

MACHINE = MeasuredOn(gpu="NVIDIA X", driver="580.1", torch="2.11", cuda="13.0", triton="3.6", kernels="ab")
TILES = TunedTiles(((16, GemmTiles()), (64, GemmTiles(True, 64, 64, 64, 5, 4))))
TABLE = TunedTable(gemms={"4096x4096": TILES, "512x64 gated": TILES}, provenance={"4096x4096": "today"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "drift_sdk" / "gemm"


def test_measurements_are_kept_and_added_to(cache: Path) -> None:
    assert user_table(MACHINE) == TunedTable()
    path = add_to_user_table(MACHINE, TABLE)
    assert path.parent == cache and path.name.startswith("nvidia-x-")
    assert user_table(MACHINE) == TABLE
    other = TunedTiles(((1, GemmTiles()),))
    add_to_user_table(MACHINE, TunedTable(gemms={"64x64": other, "4096x4096": other}))
    assert user_table(MACHINE).gemms == {"4096x4096": other, "512x64 gated": TILES, "64x64": other}
    assert [file.name for file in cache.iterdir()] == [path.name]  # no temporary file is left


@pytest.mark.parametrize("field", MeasuredOn.__struct_fields__)
def test_other_versions_have_files_of_their_own(field: str) -> None:
    add_to_user_table(MACHINE, TABLE)
    changed = msgspec.structs.replace(MACHINE, **{field: 2 if field == "schema" else "other"})
    assert user_table_path(changed) != user_table_path(MACHINE)
    assert user_table(changed) == TunedTable()


def damaged(stored: dict[str, Any]) -> list[bytes]:
    """Contents that no file may have."""
    tiles = stored["gemms"]["4096x4096"]["by_rows"][0][1]
    too_many = {f"{64 * index}x64": stored["gemms"]["4096x4096"] for index in range(1, 4200)}
    changes = (
        {"measured_on": stored["measured_on"] | {"gpu": "NVIDIA Y"}},
        {"measured_on": stored["measured_on"] | {"schema": 0}},
        {"gemms": {"4096x4096": {"by_rows": [[16, tiles | {"num_warps": 2}]]}}, "provenance": {}},
        {"gemms": {"4096x4096": {"by_rows": [[16, tiles | {"num_slices": 4}]]}}, "provenance": {}},
        {"gemms": {"4096x4096": {"by_rows": [[16, tiles | {"tile_n": 2**40}]]}}, "provenance": {}},
        {"gemms": {"4096x4096": {"by_rows": []}}, "provenance": {}},
        {"gemms": {"../4096": stored["gemms"]["4096x4096"]}, "provenance": {}},
        {"gemms": too_many, "provenance": {}},
        {"provenance": {"4096x4096": "x" * 2000}},
        {"provenance": {"1x1": "of nothing"}},
        {"more": 1},
    )
    texts = [msgspec.json.encode(stored | change) for change in changes]
    return [*texts, b"", b"{", b"[]", b"\xff\x00", texts[0][:100], b" " * (tuning.MAX_FILE_BYTES + 1)]


@pytest.mark.parametrize("index", range(17))
def test_damaged_and_foreign_files_are_ignored_with_one_warning(
    index: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = add_to_user_table(MACHINE, TABLE)
    contents = damaged(msgspec.json.decode(path.read_bytes()))
    assert len(contents) == 17
    path.write_bytes(contents[index])
    with caplog.at_level(logging.WARNING, "drift_sdk"):
        assert user_table(MACHINE) == user_table(MACHINE) == TunedTable()
    assert len(caplog.records) == 1 and str(path) in caplog.text
    add_to_user_table(MACHINE, TABLE)  # the file is replaced
    assert user_table(MACHINE) == TABLE


def test_folder_in_place_of_the_file_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    user_table_path(MACHINE).mkdir(parents=True)
    assert user_table(MACHINE) == TunedTable()
    assert len(caplog.records) == 1


def test_fifo_in_place_of_the_file_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Opening it would wait for a writer."""
    path = user_table_path(MACHINE)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert user_table(MACHINE) == TunedTable()
    assert "not a regular file" in caplog.text


def test_cache_folder_that_cannot_be_made_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert user_table(MACHINE) == TunedTable()
    with pytest.raises(OSError), tuning_lock(MACHINE):
        pass
    with pytest.raises(OSError):
        add_to_user_table(MACHINE, TABLE)


def test_relative_cache_folder_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", os.path.abspath(os.sep))
    assert user_table_path(MACHINE).parent == Path(os.sep, ".cache", "drift_sdk", "gemm")


def test_user_without_a_home_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert user_table_path(MACHINE).parent == Path(os.sep, ".cache", "drift_sdk", "gemm")


def test_file_holds_the_most_entries() -> None:
    largest = GemmTiles(False, 256, 256, 256, 8, 4, is_library=False)
    tiles = TunedTiles(tuple((num_rows, largest) for num_rows in range(10**8, 10**8 + MAX_ENTRIES)))
    keys = [f"{999_000_000 + 64 * index}x999999936 gated" for index in range(tuning.MAX_SHAPES + 1)]
    add_to_user_table(
        MACHINE,
        TunedTable(gemms=dict.fromkeys(keys, tiles), provenance=dict.fromkeys(keys, "x" * 2000)),
    )
    assert len(user_table(MACHINE).gemms) == tuning.MAX_SHAPES


def test_writers_take_turns() -> None:
    """Threads hold the lock like processes do: each opens the file."""
    inside: list[int] = []
    most: list[int] = []

    def add(index: int) -> None:
        with tuning_lock(MACHINE):
            inside.append(index)
            most.append(len(inside))
            add_to_user_table(MACHINE, TunedTable(gemms={f"{64 * (index + 1)}x64": TILES}))
            inside.remove(index)

    threads = [threading.Thread(target=add, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(user_table(MACHINE).gemms) == 5


def test_lock_of_another_process_is_waited_for_and_given_up() -> None:
    path = user_table_path(MACHINE).with_suffix(".lock")
    path.parent.mkdir(parents=True)
    code = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_EX); "
    code += "print(flush=True); input()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        with pytest.raises(TimeoutError, match="held by another process"), tuning_lock(MACHINE, 0.0):
            pass
        process.stdin.close()
    with tuning_lock(MACHINE, 0.0):
        pass  # the lock of a process that has ended is free


def test_machine_is_described_by_all_that_measurements_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Release Build\nGCC version: 13"
    )
    monkeypatch.setattr(tuning, "DRIVER_FILE", file)
    found = measured_on("NVIDIA X")
    assert found.driver == "580.95.05" and len(found.kernels) == 16
    add_to_user_table(found, TABLE)
    assert user_table(found) == TABLE
    monkeypatch.setattr(tuning, "DRIVER_FILE", tmp_path / "none")
    assert measured_on("NVIDIA X").driver == ""
