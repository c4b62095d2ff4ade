"""The way to the engine's thread."""

from __future__ import annotations

import queue

from drift_sdk.commands import Command, Pause, Resume, Sleep, Wake
from drift_sdk.errors import EngineClosed

__all__ = ["Inbox"]


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
