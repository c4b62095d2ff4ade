"""What other threads tell the engine's."""

from __future__ import annotations

import queue

from msgspec import Struct

from drift_sdk.driver.loop_poster import Latch
from drift_sdk.driver.request import Request
from drift_sdk.errors import DriftError, EngineClosed

__all__ = [
    "Cancel",
    "Close",
    "Command",
    "Continue",
    "Inbox",
    "Pause",
    "Resume",
    "Sleep",
    "Submit",
    "Unpause",
    "Wake",
]


class Submit(Struct, frozen=True):
    """A request is prepared, or could not be."""

    request: Request
    error: DriftError | None


class Continue(Struct, frozen=True):
    """What a constrained request may say next is worked out, or could not be."""

    request: Request
    error: DriftError | None


class Cancel(Struct, frozen=True):
    request: Request


class Close(Struct, frozen=True):
    """The driver's deadline has been set, or brought forward."""


class Pause(Struct, frozen=True):
    """Holds steps back until it is taken back, or all pauses are ended by `Resume`."""

    done: Latch


class Unpause(Struct, frozen=True):
    """Takes one pause back; others stay in force."""

    pause: Pause


class Resume(Struct, frozen=True):
    done: Latch


class Sleep(Struct, frozen=True):
    done: Latch


class Wake(Struct, frozen=True):
    done: Latch


Command = Submit | Continue | Cancel | Close | Pause | Unpause | Resume | Sleep | Wake


class Inbox:
    """Commands from any thread, in order. Once closed, nobody is left waiting: whoever waits for a command
    that will not be carried out is told so."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_closed = False

    def put(self, command: Command) -> None:
        self._commands.put(command)
        if self._is_closed:
            self._answer()

    def get(self, timeout_s: float | None) -> Command | None:
        """The next command, waiting `timeout_s` seconds for it (None = for ever); None if there is none."""
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def get_nowait(self) -> Command | None:
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        self._is_closed = True
        self._answer()

    def _answer(self) -> None:
        while (command := self.get_nowait()) is not None:
            if isinstance(command, Pause | Resume | Sleep | Wake):
                command.done.set(EngineClosed("the engine was closed"))
