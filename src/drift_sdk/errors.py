"""The errors a caller can see.

DriftError
├── ConfigError          a field of EngineConfig out of range or of the wrong type
├── ModelLoadError       a model, draft or tokenizer that cannot be loaded
├── RequestError         a field of SamplingParams, a prompt or messages that cannot be served
│   └── PromptTooLong
├── QueueFull            more requests waiting than max_queued_requests allows
├── EngineClosed         the engine is not open, or closed under a stream
└── ExecutorError        a step failed on the device
"""

from __future__ import annotations

import reprlib

__all__ = [
    "ConfigError",
    "DriftError",
    "EngineClosed",
    "ExecutorError",
    "ModelLoadError",
    "PromptTooLong",
    "QueueFull",
    "RequestError",
    "short_repr",
]

MAX_MESSAGE_CHARS = 4000
MAX_REPR_CHARS = 200


class DriftError(Exception):
    """Base of every error this package raises on purpose. Long messages are cut in their middle."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_shorten(message, MAX_MESSAGE_CHARS))


def short_repr(value: object) -> str:
    """The repr of a value of any type and size, cut to what a message has room for. Never raises."""
    try:
        return _shorten(_repr.repr(value), MAX_REPR_CHARS)
    except Exception:  # an integer of too many digits, or what a __repr__ raises
        return f"<{type(value).__name__}>"


def _shorten(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text

    kept = (max_chars - 3) // 2
    return f"{text[:kept]}...{text[-kept:]}"


_repr = reprlib.Repr()
_repr.maxlevel = 4
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = _repr.maxdeque = 16
_repr.maxstring = _repr.maxlong = _repr.maxother = MAX_REPR_CHARS


class FieldError(DriftError):
    """A named field holds a value outside its range.

    Attributes: `field` (its name), `value` (what was given), `allowed` (the range, in words).
    """

    def __init__(self, message: str, *, field: str = "", value: object = None, allowed: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.allowed = allowed

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> FieldError:
        return cls(
            f"{field}={short_repr(value)}: expected {allowed}", field=field, value=value, allowed=allowed
        )


class ConfigError(FieldError):
    """A field of the engine's configuration cannot be used."""


class ModelLoadError(DriftError):
    """A model's files cannot be loaded; the message names file, tensor, found and expected shape."""


class RequestError(FieldError):
    """A request cannot be served as it stands; other requests are not affected."""


class PromptTooLong(RequestError):
    """The prompt leaves no room for a single new token within `max_model_len`."""


class QueueFull(DriftError):
    """`max_queued_requests` requests are waiting already; try again when some have started."""


class EngineClosed(DriftError):
    """The engine has not been started, or was closed while this stream was running."""


class ExecutorError(DriftError):
    """A step failed on the device. `process_unusable` is true when no engine can use the device again
    from this process (a fatal CUDA error poisons the context)."""

    def __init__(self, message: str, *, process_unusable: bool = False) -> None:
        super().__init__(message)
        self.process_unusable = process_unusable
