"""Commands from other threads to the engine's thread, and the queue that carries them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from drift_sdk.driver.loops import Latch
from drift_sdk.driver.requests import Request
from drift_sdk.errors import DriftError


class Prepared(Struct, frozen=True):
    """A request has been prepared (`error` is None), or preparing it has failed."""

    request: Request
    error: DriftError | None


class MaskComputed(Struct, frozen=True):
    """The next token mask of a constrained request has been computed (`error` is None), or that has
    failed."""

    request: Request
    error: DriftError | None


class Cancel(Struct, frozen=True):
    """End a request with finish reason "cancelled"."""

    request: Request


class Close(Struct, frozen=True):
    """The driver's deadline has been set or brought forward: the engine's thread is to look at it."""


class Pause(Struct, frozen=True):
    """Launch no steps until this pause is taken back by `Unpause`, or all pauses are ended by `Resume`.
    `done` is set when no step is in flight."""

    done: Latch


class Unpause(Struct, frozen=True):
    """Take one pause back; others stay in force."""

    pause: Pause


class Resume(Struct, frozen=True):
    """End all pauses."""

    done: Latch


class Sleep(Struct, frozen=True):
    """Close the executor once no step is in flight."""

    done: Latch


class UpdateWeights(Struct, frozen=True):
    """Replace weights once no step is in flight; `done` is set with the error if that fails.

    tensors: of torch, by the names of the model's files.
    """

    done: Latch
    tensors: Mapping[str, Any]


class Wake(Struct, frozen=True):
    """Open the model again; `done` is set with the error if that fails."""

    done: Latch


Deferred = Pause | Sleep | Wake | UpdateWeights
"""Commands that are carried out when no step is in flight."""
Command = Prepared | MaskComputed | Cancel | Close | Unpause | Resume | Deferred


class CommandQueue:
    """Commands in the order in which they are put, from any thread; one thread gets them.

    Once it is closed, the latch of every command still in it, or put later, is set with an error, so that no
    caller waits for a command that will not be carried out.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._rejection: Callable[[], DriftError] | None = None

    def put(self, command: Command) -> None:
        self._queue.put(command)
        if self._rejection is not None:
            self._reject_all(self._rejection)

    def get(self, timeout_s: float | None) -> Command | None:
        """The next command. Blocks until there is one, `timeout_s` seconds at most (None = no limit); None if
        there is none by then."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def get_nowait(self) -> Command | None:
        """The next command; None if there is none."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def close(self, rejection: Callable[[], DriftError]) -> None:
        """rejection: makes an error for each command."""
        self._rejection = rejection
        self._reject_all(rejection)

    def _reject_all(self, rejection: Callable[[], DriftError]) -> None:
        while (command := self.get_nowait()) is not None:
            if isinstance(command, Resume | Deferred):
                command.done.set(rejection())
