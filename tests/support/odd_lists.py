"""Lists of callers whose classes misbehave when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any


class Unreadable(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("no such place")


class Endless(list[Any]):
    """Says that it has one item."""

    def __iter__(self) -> Iterator[Any]:
        return repeat([5])


class Uncounted(list[Any]):
    def __len__(self) -> int:
        raise ValueError("not counted")
