"""Cases of parametrised tests of which `make test` runs the first ones, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["slow_after", "slow_rows_after"]


def slow_after(number: int, cases: Iterable[Any]) -> list[Any]:
    """Values of one argument; those after the first `number` have the marker slow."""
    return slow_rows_after(number, ((case,) for case in cases))


def slow_rows_after(number: int, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Values of several arguments, likewise."""
    return [
        pytest.param(*row, marks=pytest.mark.slow if index >= number else ())
        for index, row in enumerate(rows)
    ]
