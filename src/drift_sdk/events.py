"""Events of an engine, with which `Engine(..., on_event=...)` is called, and the progress of its start.

A request has one `RequestQueued`, then `RequestAdmitted`, `RequestFirstToken`, and at its end one of
`RequestFinished` and `RequestFailed`. A preempted one has `RequestPreempted` and `RequestAdmitted` again. A
request that ends early lacks what it did not reach. A request that is rejected at the call has
`RequestRejected` alone.

`msgspec.json.encode(event, enc_hook=str)` is a line of a log, in which the name of the event is "type" and
errors are their messages.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from msgspec import Struct

from drift_sdk.results import FinishReason, SpeculationStats, Timing, Usage

__all__ = [
    "EngineFailed",
    "EngineStarted",
    "EngineStopped",
    "Event",
    "RequestAdmitted",
    "RequestFailed",
    "RequestFinished",
    "RequestFirstToken",
    "RequestPreempted",
    "RequestQueued",
    "RequestRejected",
]


class EngineStarted(Struct, frozen=True, kw_only=True, tag=True):
    """The engine is ready to serve.

    time:     seconds since the epoch, as `time.time()` gives them; so in all events.
    executor: "graph" or "eager".
    seconds:  that opening the model took.
    """

    time: float
    executor: str
    seconds: float


class EngineFailed(Struct, frozen=True, kw_only=True, tag=True):
    """The model could not be opened, or the engine has failed while it served: `error` is the cause."""

    time: float
    error: BaseException


class EngineStopped(Struct, frozen=True, kw_only=True, tag=True):
    """An engine that had started is closed, or has failed and given its memory back. The last event."""

    time: float


class RequestQueued(Struct, frozen=True, kw_only=True, tag=True):
    """A request was submitted. Its prompt is not tokenised yet."""

    time: float
    request_id: str


class RequestRejected(Struct, frozen=True, kw_only=True, tag=True):
    """A request was not taken because the queue is full: `error` is the QueueFull that the call raised."""

    time: float
    request_id: str
    error: Exception


class RequestAdmitted(Struct, frozen=True, kw_only=True, tag=True):
    """A request has a slot, and its prompt is about to be computed.

    num_tokens: tokens of the prompt and, after a preemption, those generated so far.
    num_cached: of them, those whose KV was found in the prefix cache.
    """

    time: float
    request_id: str
    num_tokens: int
    num_cached: int


class RequestPreempted(Struct, frozen=True, kw_only=True, tag=True):
    """A request gave up its slot and KV to others, or to `sleep()`; it waits to be admitted again."""

    time: float
    request_id: str


class RequestFirstToken(Struct, frozen=True, kw_only=True, tag=True):
    """The first token of a request was generated."""

    time: float
    request_id: str


class RequestFinished(Struct, frozen=True, kw_only=True, tag=True):
    """A request ended with a completion. The fields are those of `Completion`."""

    time: float
    request_id: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    speculation: SpeculationStats | None


class RequestFailed(Struct, frozen=True, kw_only=True, tag=True):
    """A request ended with an error, which its stream raises. The message may quote the prompt."""

    time: float
    request_id: str
    error: Exception


Event: TypeAlias = (
    EngineStarted
    | EngineFailed
    | EngineStopped
    | RequestQueued
    | RequestRejected
    | RequestAdmitted
    | RequestPreempted
    | RequestFirstToken
    | RequestFinished
    | RequestFailed
)


class Download(Struct, frozen=True, kw_only=True):
    """Files that are being fetched from the hub; those that its cache held before are not counted.

    num_files:      files to fetch.
    num_files_done: of them, those that are complete.
    num_bytes:      bytes to fetch, as far as the hub tells the sizes of files.
    num_bytes_done: of them, those received.
    """

    num_files: int
    num_files_done: int
    num_bytes: int
    num_bytes_done: int


class Progress(Struct, frozen=True, kw_only=True):
    """A stage of starting an engine.

    stage:    such as "find", "download", "load weights" or "capture graphs"; the last is "ready".
    fraction: how much of the stage is done, 0 to 1.
    download: files and bytes, while small files are fetched from the hub ("find") and while weights are
              ("download"); else None.
    """

    stage: str
    fraction: float
    download: Download | None = None


class Report(Protocol):
    """Called with a stage of starting, the fraction of it that is done (0 to 1), and what is being
    downloaded, if anything is."""

    def __call__(self, stage: str, fraction: float, download: Download | None = None) -> None: ...


def ignore_progress(stage: str, fraction: float, download: Download | None = None) -> None:
    """A `Report` that drops what it is given."""
