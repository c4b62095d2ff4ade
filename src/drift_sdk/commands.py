"""What other threads tell the engine's."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk.bridge import Latch
from drift_sdk.errors import DriftError
from drift_sdk.request import Request

__all__ = ["Cancel", "Close", "Command", "Continue", "Pause", "Resume", "Sleep", "Submit", "Wake"]


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
    """End at `deadline` (of time.monotonic) at the latest."""

    deadline: float


class Pause(Struct, frozen=True):
    done: Latch


class Resume(Struct, frozen=True):
    done: Latch


class Sleep(Struct, frozen=True):
    done: Latch


class Wake(Struct, frozen=True):
    done: Latch


Command = Submit | Continue | Cancel | Close | Pause | Resume | Sleep | Wake
