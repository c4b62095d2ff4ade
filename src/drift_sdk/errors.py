"""The errors that this package raises.

DriftError
├── ConfigError          a wrong field of EngineConfig or Speculation, or a wrong argument of Engine
├── ModelLoadError       a model, draft or tokenizer that cannot be loaded
├── RequestError         a field of SamplingParams, a prompt or messages that cannot be served
│   └── PromptTooLong
├── QueueFull            as many requests waiting as max_queued_requests allows
├── EngineClosed         the engine is not open, or was closed while a stream was running
├── ExecutorError        a step failed on the device
└── ReplicaFailed        the replica of a pool that ran a started request has failed
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any

__all__ = [
    "ConfigError",
    "ConfigKeywordError",
    "DriftError",
    "EngineClosed",
    "ExecutorError",
    "ModelLoadError",
    "PromptTooLong",
    "QueueFull",
    "ReplicaFailed",
    "RequestError",
    "RequestKeywordError",
    "error_repr",
    "is_out_of_memory",
    "short_repr",
]

MAX_MESSAGE_CHARS = 4000
MAX_REPR_CHARS = 200


class DriftError(Exception):
    """Base class of the errors of this package. Messages over 4,000 characters are cut in the middle."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_shorten(message, MAX_MESSAGE_CHARS))


def short_repr(value: object) -> str:
    """The repr of a value of any type and size, cut to 200 characters. Never raises."""
    try:
        return _shorten(_Repr().repr(value), MAX_REPR_CHARS)
    except Exception:  # for an integer of too many digits, or from a __repr__
        return f"<{type(value).__name__}>"


OUT_OF_MEMORY = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "Unable to allocate")
"""Words of the system, torch, C++ and numpy."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short. On the CPU, torch says so with a plain RuntimeError."""
    found = error_repr(error)
    return isinstance(error, MemoryError) or any(words in found for words in OUT_OF_MEMORY)


def error_repr(error: BaseException) -> str:
    """The repr of an error of any class. Never raises."""
    try:
        return repr(error)
    except Exception:  # from its __repr__, or from that of an argument
        return f"<{type(error).__name__}>"


def _shorten(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text

    kept = (max_chars - 3) // 2
    return f"{text[:kept]}...{text[-kept:]}"


class _Repr(reprlib.Repr):
    """Shows the first items of a container, and MAX_REPR_CHARS values at most over all levels. reprlib itself
    sorts all items of dicts and sets, which takes seconds for millions, and writes other mappings and
    sequences whole."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        for kind in ("list", "tuple", "dict", "set", "frozenset", "deque"):
            setattr(self, f"max{kind}", 16)
        self.maxstring = self.maxlong = self.maxother = MAX_REPR_CHARS
        self._num_left = MAX_REPR_CHARS

    def repr1(self, x: object, level: int) -> str:
        self._num_left -= 1
        return super().repr1(x, level) if self._num_left >= 0 else "..."

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)

    def repr_set(self, x: set[Any], level: int) -> str:
        return super().repr_set(set(islice(x, self.maxset + 1)), level)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return super().repr_frozenset(frozenset(islice(x, self.maxfrozenset + 1)), level)

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, bytes | bytearray):
            return super().repr_instance(x[: self.maxother], level)

        shown: object = None
        if isinstance(x, Mapping):
            shown = {key: x[key] for key in islice(x, self.maxdict + 1)}
        elif isinstance(x, Sequence | Set) and not isinstance(x, str | range | memoryview):
            shown = list(islice(x, self.maxlist + 1))
        return (
            super().repr_instance(x, level)
            if shown is None
            else f"{type(x).__name__}({self.repr1(shown, level)})"
        )


class FieldError(DriftError):
    """A field or argument has a wrong value.

    field:   its name.
    value:   the wrong value, or the item of it that is wrong.
    allowed: what is allowed, in words.
    """

    def __init__(self, message: str, *, field: str = "", value: object = None, allowed: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.allowed = allowed

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> FieldError:
        """The error with the message "FIELD=VALUE: expected ALLOWED"."""
        return cls(
            f"{field}={short_repr(value)}: expected {allowed}", field=field, value=value, allowed=allowed
        )


class ConfigError(FieldError):
    """A field of the engine's configuration has a wrong value, or one that this machine or model cannot
    serve."""


class ConfigKeywordError(ConfigError, TypeError):
    """A `ConfigError` for an unknown keyword argument, which Python calls a TypeError."""


class ModelLoadError(DriftError):
    """A model's files cannot be loaded; the message names file, tensor, found and expected shape."""


class RequestError(FieldError):
    """A request has a wrong prompt, wrong messages or wrong parameters; other requests are not affected."""


class RequestKeywordError(RequestError, TypeError):
    """A `RequestError` for an unknown keyword argument, which Python calls a TypeError."""


class PromptTooLong(RequestError):
    """The prompt leaves no room for a new token within `max_model_len`."""


class QueueFull(DriftError):
    """The request was rejected because `max_queued_requests` requests are waiting already; try again
    later."""


class EngineClosed(DriftError):
    """The engine is not open: it has not been started, or was closed, perhaps while this stream was
    running."""


class ExecutorError(DriftError):
    """A step failed on the device, or the engine failed in another way.

    process_unusable: no engine can use the device again from this process, because a fatal CUDA error has
                      made its context unusable.
    ends_engine:      the engine has failed, and all its requests end; False for an error of one request.
    """

    def __init__(self, message: str, *, process_unusable: bool = False, ends_engine: bool = True) -> None:
        super().__init__(message)
        self.process_unusable = process_unusable
        self.ends_engine = ends_engine


class ReplicaFailed(DriftError):
    """The replica of an `EnginePool` that ran this request has failed, or was closed, after the stream had
    got tokens; or several replicas have, one after the other. Other requests are not affected. `__cause__`
    is the error of the replica.

    replica:    its index in the pool.
    num_tokens: tokens that the stream got.
    """

    def __init__(self, message: str, *, replica: int = 0, num_tokens: int = 0) -> None:
        super().__init__(message)
        self.replica = replica
        self.num_tokens = num_tokens
