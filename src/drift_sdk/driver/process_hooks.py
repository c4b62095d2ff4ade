"""State of the whole process: open engines are closed before the interpreter exits, forks are counted, and
the garbage collector is paused for imports.

A daemon thread that returns from native code while the interpreter is being finalised is ended by
`pthread_exit`, which aborts the process if there are C++ or Rust frames on its stack. `atexit` hooks run
before finalisation, while daemon threads still run, so engines are closed there.

In a forked child none of the parent's threads exist, and any lock may be held by one of them. Objects of the
parent are therefore never used in the child: they remember `num_forks()` and compare.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

EXIT_TIMEOUT_S = 20.0
"""Most seconds that all open engines together delay the exit."""
MAX_BUILTIN_FROZEN = 1000
"""Most objects that are frozen because the interpreter has frozen them: Python 3.12 starts with about 400. A
program that freezes its objects has many times as many."""
MIN_MOVED = 10_000
"""Fewest young objects that are moved when a pause ends. A collection looks at fewer within milliseconds."""


class Closable(Protocol):
    """An object that has a thread: `close` asks it to end and returns at once, `join` waits for its end."""

    def close(self, drain_s: float) -> None: ...

    def join(self, timeout_s: float | None = None) -> None: ...


class ProcessState:
    """State of this process alone; a forked child begins with a new object."""

    def __init__(self, num_forks: int) -> None:
        self.num_forks = num_forks
        # Reentrant: the garbage collector may run within a locked section, and an engine's finaliser in it.
        self.lock: threading.RLock = threading.RLock()
        self.open: WeakSet[Closable] = WeakSet()
        self.num_pauses = 0  # blocks of `without_collection`, of an enabled collector


_state = ProcessState(0)


def num_forks() -> int:
    """The number of forks between the process that imported this module and the current one."""
    return _state.num_forks


def life_cycle_lock() -> threading.RLock:
    """The lock of every engine's transitions between closed, starting, open and closing. No one waits while
    holding it."""
    return _state.lock


def close_at_exit(each: Closable) -> None:
    """Have an object closed before the interpreter exits, if it still exists then. It may have been closed
    before: closing twice must do no harm."""
    _state.open.add(each)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the collection of cyclic garbage, in all threads, for a block that makes many objects to keep,
    such as an import of torch: the collector would look at them again and again, a tenth of the time. Blocks
    of several threads may overlap. A collector that is disabled stays so.

    Objects that were made in the block, and those of other threads, count as old when the last block ends:
    the next collections of young objects would look at all of them, which takes a tenth of a second each.
    """
    state = _state
    with state.lock:
        is_pause = gc.isenabled() or state.num_pauses > 0
        state.num_pauses += is_pause
        gc.disable()
    try:
        yield
    finally:
        with state.lock:
            state.num_pauses -= is_pause
            if is_pause and not state.num_pauses:
                _count_as_old()
                gc.enable()


def _count_as_old() -> None:
    """Move all objects to the collector's oldest generation, without looking at them. Nothing is moved if few
    are young, or if the program has frozen objects, which would be thawed."""
    has_many_young = gc.get_count()[0] >= MIN_MOVED
    if has_many_young and gc.get_freeze_count() <= MAX_BUILTIN_FROZEN:  # counted one by one, so asked last
        gc.freeze()
        gc.unfreeze()


def close_all() -> None:
    """Close all open engines, and wait for their ends for `EXIT_TIMEOUT_S` seconds at most."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    open_ones = list(_state.open)
    for each in open_ones:
        each.close(0.0)
    for each in open_ones:
        each.join(max(0.0, deadline - time.monotonic()))


def begin_child() -> None:
    """Called in a forked child: no engine of the parent is open there."""
    global _state
    if _state.num_pauses:  # of threads that the child does not have
        gc.enable()
    _state = ProcessState(_state.num_forks + 1)


atexit.register(close_all)
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=begin_child)
