"""What other threads tell the engine's."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk.bridge import Latch
from drift_sdk.errors import DriftError
from drift_sdk.request import Request

__all__ = ["Cancel", "Close", "Command", "Continue", "Pause", "Resume", "Sleep", "Submit", "Unpause", "Wake"]


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
