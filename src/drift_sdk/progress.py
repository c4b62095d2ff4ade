"""What a starting engine reports, stage by stage."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

from drift_sdk.bridge import Bridge, LoopClosed

__all__ = ["Progress", "reporter"]

log = logging.getLogger("drift_sdk")


class Progress(Struct, frozen=True, kw_only=True):
    """A stage of starting, and how much of it is done (0 to 1)."""

    stage: str
    fraction: float


def reporter(on_progress: Callable[[Progress], None] | None) -> Callable[[str, float], None]:
    """Passes (stage, fraction), called on any thread, to `on_progress` on the running loop: each whole
    percent once."""
    bridge = Bridge.current()
    last: tuple[str, int] | None = None

    def report(stage: str, fraction: float) -> None:
        nonlocal last
        percent = int(fraction * 100)
        if (stage, percent) == last:
            return

        last = stage, percent
        log.debug("%s: %d%%", stage, percent)
        if on_progress is not None:
            try:
                bridge.post(on_progress, Progress(stage=stage, fraction=fraction))
            except LoopClosed:
                return

    return report
