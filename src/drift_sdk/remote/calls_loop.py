"""The event loop on which this process calls all of its remote engines."""

from __future__ import annotations

import threading

from drift_sdk.driver.loop_thread import LoopThread

__all__ = ["calls_loop"]


class Shared:
    """The loop of a process, made at its first use; it lasts until the process ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: LoopThread | None = None


_shared = Shared()


def calls_loop() -> LoopThread:
    """The loop. In a forked child it is a new one."""
    with _shared.lock:
        if _shared.loop is None or _shared.loop.is_from_parent:
            _shared.loop = LoopThread("remote-calls")
        return _shared.loop
