"""Calls of the hub's library on daemon threads, which a caller may stop waiting for.

The library waits for a silent hub for minutes, and for a slow one for ever, and nothing can end that: so the
threads that wait are given up. Neither a pool's shutdown nor the interpreter's exit waits for them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from drift_sdk.errors import ModelLoadError

__all__ = ["call", "call_each"]

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

MAX_THREADS = 8
"""Most files that are downloaded at a time, as in the hub's own library."""
POLL_S = 0.05
"""Seconds between two looks whether the result is still wanted."""


def call(function: Callable[[], ResultT], check: Callable[[], object]) -> ResultT:
    """Call a function on another thread, and return its result; see `call_each`."""
    (result,) = call_each(lambda _: function(), [None], check)
    return result


def call_each(
    function: Callable[[ArgumentT], ResultT],
    arguments: Sequence[ArgumentT],
    check: Callable[[], object],
) -> list[ResultT]:
    """Call a function with each of the arguments, on several threads, and return the results in order.

    check: called on this thread again and again while it waits; what it raises ends the waiting.

    Raises the first error of a call. Calls that have not begun by then, or when `check` raises, never begin.
    """
    todo = deque(enumerate(arguments))
    ended: queue.SimpleQueue[tuple[int, ResultT | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                index, argument = todo.popleft()
            except IndexError:
                return

            try:
                ended.put((index, function(argument), None))
            except BaseException as error:
                ended.put((index, None, error))

    results: dict[int, ResultT] = {}
    try:
        for _ in range(min(MAX_THREADS, len(arguments))):
            start(threading.Thread(target=work, name="drift-hub", daemon=True))
        while len(results) < len(arguments):
            check()
            try:
                index, result, error = ended.get(timeout=POLL_S)
            except queue.Empty:
                continue

            if error is not None:
                raise error

            results[index] = result  # type: ignore[assignment]  # there was no error
    finally:
        todo.clear()
    return [results[index] for index in range(len(arguments))]


def start(thread: threading.Thread) -> None:
    """Start a thread; ModelLoadError if the process may not have more."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ModelLoadError(f"no thread can be started for a download: {error}") from error
