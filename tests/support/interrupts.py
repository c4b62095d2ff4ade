"""Ctrl-C in the main thread, once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RESEND_S = 0.05


@contextmanager
def one_interrupt() -> Iterator[Callable[[], None]]:
    """Yield a function, for another thread to call, that raises one KeyboardInterrupt in the main thread.

    A signal that arrives just before the main thread blocks is noticed when the next one wakes it up, so
    signals are sent until the exception has been raised.
    """
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    is_raised, sending = threading.Event(), threading.Lock()

    def handle(number: int, frame: object) -> None:
        if not is_raised.is_set():
            is_raised.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        while not is_raised.is_set():
            with sending:
                if not is_raised.is_set():
                    signal.pthread_kill(main_thread, signal.SIGINT)
            is_raised.wait(RESEND_S)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        is_raised.set()
        with sending:  # no signal is on its way
            pass
        signal.signal(signal.SIGINT, before)
