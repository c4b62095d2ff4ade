"""Logs of products: counts are added up, and the largest share of time comes first."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from drift_sdk._kernels.gemm.tuning import (
    LoggedProduct,
    add_products,
    read_products,
    shapes_by_time,
)

SMALL = LoggedProduct(role="output", num_rows=1, num_columns=64, inner=64)
LARGE = LoggedProduct(role="gate_up", num_rows=1, num_columns=512, inner=64, is_gated=True)
MANY_ROWS = LoggedProduct(role="output", num_rows=64, num_columns=64, inner=64)


def test_counts_are_added_and_ordered_by_time(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log.json"
    add_products(path, Counter({SMALL: 3, LARGE: 2}))
    assert list(read_products(path).items()) == [(LARGE, 2), (SMALL, 3)]
    add_products(path, Counter({SMALL: 40, MANY_ROWS: 1}))
    found = read_products(path)
    assert list(found.items()) == [(SMALL, 43), (LARGE, 2), (MANY_ROWS, 1)]
    assert shapes_by_time(found) == [(64, 64, False), (512, 64, True)]


def test_writers_take_turns(tmp_path: Path) -> None:
    """Threads hold the lock like processes do: each opens its file."""
    path = tmp_path / "log.json"
    threads = [threading.Thread(target=add_products, args=(path, {SMALL: 1})) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_products(path) == Counter({SMALL: 16})


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"{}",
        b'[{"count": 1}]',
        b'[{"product": {"role": "x", "num_rows": 0, "num_columns": 1, "inner": 1}}]',
    ],
)
def test_other_files_are_refused_and_kept(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match="no log of products"):
        add_products(path, Counter({SMALL: 1}))
    assert path.read_bytes() == contents


def test_log_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    for path in (tmp_path / "fifo.json", tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            read_products(path)
