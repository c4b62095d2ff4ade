"""Progress of a starting engine."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

__all__ = ["Progress", "Report"]

Report = Callable[[str, float], None]
"""Takes a stage and how much of it is done."""


class Progress(Struct, frozen=True, kw_only=True):
    """A stage of starting, and how much of it is done (0 to 1)."""

    stage: str
    fraction: float
