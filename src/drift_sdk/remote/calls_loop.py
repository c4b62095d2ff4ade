"""The event loop on which this process calls all of its remote engines."""

from __future__ import annotations

import threading

from drift_sdk.driver.loops import LoopThread
from drift_sdk.driver.process_hooks import num_forks

__all__ = ["calls_loop"]


class Shared:
    """The loop of a process, made at its first use; it lasts until the process ends."""

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.loop: LoopThread | None = None


_shared: dict[int, Shared] = {}
"""By number of forks: in a forked child the parent's lock may be held, and its loop has no thread."""


def calls_loop() -> LoopThread:
    """The loop. In a forked child it is a new one, and after it has failed."""
    shared = _shared.setdefault(num_forks(), Shared())
    with shared.lock:
        if shared.loop is None or shared.loop.has_failed:
            shared.loop = LoopThread("remote-calls")
        return shared.loop
