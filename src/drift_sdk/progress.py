"""Progress of a starting engine."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

__all__ = ["Progress", "Report"]

Report = Callable[[str, float], None]
"""Called with a stage of starting and the fraction of it that is done, 0 to 1."""


class Progress(Struct, frozen=True, kw_only=True):
    """A stage of starting an engine.

    stage:    such as "find", "load weights" or "capture graphs"; the last is "ready".
    fraction: how much of the stage is done, 0 to 1.
    """

    stage: str
    fraction: float
