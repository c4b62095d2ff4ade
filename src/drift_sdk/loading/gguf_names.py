"""Names of the parts of a split GGUF file, as llama.cpp's gguf-split gives them:
"model-00001-of-00003.gguf"."""

from __future__ import annotations

import re
from collections.abc import Collection

from msgspec import Struct

__all__ = ["PartName", "missing_parts", "part_of"]

PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class PartName(Struct, frozen=True):
    """The name of one part of a split file: `stem`-`index`-of-`num_parts`.gguf, counted from 1."""

    stem: str
    index: int
    num_parts: int

    def file(self, index: int) -> str:
        """The name of another part."""
        return f"{self.stem}-{index:05}-of-{self.num_parts:05}.gguf"


def part_of(name: str) -> PartName | None:
    """The name of a part, taken apart; None for a file that is not one of several."""
    found = PART_NAME.fullmatch(name)
    if found is None:
        return None

    part = PartName(found[1], int(found[2]), int(found[3]))
    return part if 1 <= part.index <= part.num_parts else None


def missing_parts(names: Collection[str]) -> list[str]:
    """The parts that are missing of those that the names, of one model, belong to."""
    missing: list[str] = []
    for part in {(p.stem, p.num_parts): p for p in map(part_of, names) if p is not None}.values():
        wanted = [part.file(index) for index in range(1, part.num_parts + 1)]
        missing += [name for name in wanted if name not in names]

    return missing
