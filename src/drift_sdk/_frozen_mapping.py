"""An immutable mapping that has a hash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

__all__ = ["FrozenMapping"]

K = TypeVar("K")
V = TypeVar("V", covariant=True)


class FrozenMapping(Mapping[K, V]):
    """An immutable mapping, sorted by its keys. It has a hash, so that a frozen Struct that holds one has one
    too."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V]) -> None:
        self._items = {key: items[key] for key in sorted(items)}  # type: ignore[type-var]  # keys can be sorted

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
