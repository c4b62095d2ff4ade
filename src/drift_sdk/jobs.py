"""Jobs: many prompts, each with a key, and the bounded set of them that is submitted at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, TypeAlias

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled
from msgspec import Struct

from drift_sdk._fields import RequestFields
from drift_sdk._plain_data import IdArray
from drift_sdk.conversation import Message, ToolSpec
from drift_sdk.driver.stream_updates import Signal
from drift_sdk.errors import (
    DriftError,
    EngineClosed,
    ExecutorError,
    QueueFull,
    RequestError,
    error_repr,
    short_repr,
)
from drift_sdk.grammars import ParsedT, ParsedT_co
from drift_sdk.results import Completion
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.stream import TokenStream, updates_of

__all__ = [
    "Job",
    "JobDone",
    "JobFailed",
    "JobMap",
    "JobResult",
    "PromptLike",
    "check_prompts",
    "completions_of",
    "results_of",
]

POLL_S = 0.01
"""Seconds between checks of a queue that the requests of others have filled."""
MAX_AHEAD = 32
"""Most prompts that are submitted and not yet yielded, for each of `max_concurrent`, if results are yielded
in the order of their prompts. A request that takes so many times as long as the others leaves no place
empty."""
MAX_AHEAD_UNORDERED = 2
"""The same if results are yielded as they come."""


class Job(Struct, Generic[ParsedT_co], frozen=True, kw_only=True, metaclass=RequestFields):
    """A prompt of `Engine.map`, with a key for its result.

    key:      names the result; any value.
    prompt:   as of `Engine.generate`.
    messages: as of `Engine.chat`. Either prompt or messages must be given, or RequestError is raised.
    params:   None = those of the map.
    tools, template_args, tool_choice, continue_final: as of `Engine.chat`; without messages, RequestError is
              raised.

    Other wrong values are errors of the job when it is submitted.
    """

    key: Any
    prompt: str | Sequence[int] | IdArray | None = None
    messages: Sequence[Message | Mapping[str, Any]] | None = None
    params: SamplingParams[ParsedT_co] | None = None
    tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None
    template_args: Mapping[str, Any] | None = None
    tool_choice: str = "auto"
    continue_final: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            allowed = "a prompt or messages" if self.prompt is None else "a prompt or messages, not both"
            raise RequestError.of("prompt", self.prompt, allowed)

        defaults = {"tools": None, "template_args": None, "tool_choice": "auto", "continue_final": False}
        for name, default in defaults.items():
            value = getattr(self, name)
            is_default = type(value) is type(default) and value == default
            if self.messages is None and not is_default:
                raise RequestError.of(name, value, f"{default!r} without messages")


PromptLike: TypeAlias = str | Sequence[int] | IdArray | Job[ParsedT]


class JobDone(Struct, Generic[ParsedT_co], frozen=True, kw_only=True):
    """The completion of one prompt of `Engine.map` with errors="yield".

    key:   the key of its `Job`; for a prompt without a `Job`, its index from 0.
    error: None; tells it from a `JobFailed`.
    """

    key: Any
    completion: Completion[ParsedT_co]
    error: None = None


class JobFailed(Struct, frozen=True, kw_only=True):
    """The error of one prompt of `Engine.map` with errors="yield".

    key:        the key of its `Job`; for a prompt without a `Job`, its index from 0.
    completion: None; tells it from a `JobDone`.
    """

    key: Any
    error: DriftError
    completion: None = None


JobResult: TypeAlias = JobDone | JobFailed
"""The outcome of one prompt of `Engine.map`: either a completion or an error; the other field is None. Type
checkers tell which by `isinstance`, and by `error is None`."""


class Running(NamedTuple):
    """A prompt that is submitted, and the key of its result."""

    key: Any
    prompt: PromptLike
    stream: TokenStream


class JobMap:
    """Prompts that are submitted as places become free, and their results.

    Its user alternates: `step` returns True when the next prompt is wanted, which is then given by `feed` or
    `add`, a result, or None at the end. `cancel` must be called at last. Used on one event loop.

    submit:         submits a prompt.
    has_room:       whether a prompt can be submitted now. While it cannot, `step` waits for its own requests,
                    or for those of others if it has none.
    max_concurrent: most requests submitted that have not ended.
    is_ordered:     results come in the order of their prompts, else as they end.
    yields_errors:  an error of a prompt is a result; else `step` raises it in its place.

    The errors EngineClosed and ExecutorError, which all requests share, are always raised. An error of the
    prompts themselves is raised after the results of the prompts before it.
    """

    def __init__(
        self,
        submit: Callable[[PromptLike], TokenStream],
        has_room: Callable[[], bool],
        max_concurrent: int,
        *,
        is_ordered: bool,
        yields_errors: bool,
    ) -> None:
        self._submit = submit
        self._has_room = has_room
        self._max_concurrent = max_concurrent
        self._max_ahead = max_concurrent * (MAX_AHEAD if is_ordered else MAX_AHEAD_UNORDERED)
        self._is_ordered = is_ordered
        self._yields_errors = yields_errors
        self._num_added = 0
        self._num_yielded = 0
        self._waiting: list[tuple[int, PromptLike]] = []  # prompts that there was no room for
        self._running: dict[int, Running] = {}  # by index of the prompt
        self._results: dict[int, JobResult] = {}  # unread ones by index, in the order of their ends
        self._is_complete = False  # there are no more prompts
        self._failure: Exception | None = None  # of the prompts, or of submitting one
        self._must_yield = False
        self._end_signal = Signal()

    async def step(self) -> JobResult | bool | None:
        """True if a prompt is wanted; else wait for the next result and return it, or None at the end."""
        if self._must_yield:  # a source of wrong prompts alone must not hold up the event loop
            self._must_yield = False
            await checkpoint()
        else:
            await checkpoint_if_cancelled()
        while True:
            self._collect()
            for _ in range(len(self._waiting)):
                if self._has_place():
                    self._try_submit(*self._waiting.pop(0))
            if not self._waiting and not self._is_complete and self._has_place():
                return True

            if (result := self._take()) is not None:
                return result

            if self._running:
                stream = next(iter(self._running.values())).stream
                updates_of(stream).check_loop()
                await updates_of(stream).wait(self._end_signal)
            elif self._waiting or not self._is_complete:
                await anyio.sleep(POLL_S)
            elif self._failure is not None:
                raise self._failure
            else:
                return None

    def feed(self, prompts: Iterator[PromptLike]) -> None:
        """Add the next of these prompts, or their end, or their error."""
        try:
            prompt = next(prompts)
        except StopIteration:
            self.end()
        except Exception as error:
            self.end(error)
        else:
            self.add(prompt)

    def add(self, prompt: PromptLike) -> None:
        """Submit the next prompt."""
        index = self._num_added
        self._num_added += 1
        self._try_submit(index, prompt)

    def end(self, failure: Exception | None = None) -> None:
        """There are no more prompts. `failure` is raised after the last result."""
        self._is_complete, self._failure = True, failure

    def cancel(self) -> None:
        """Cancel what has not ended."""
        for running in self._running.values():
            running.stream.cancel()

    def _has_place(self) -> bool:
        is_below = len(self._running) < self._max_concurrent and self._num_ahead < self._max_ahead
        return is_below and self._has_room()

    @property
    def _num_ahead(self) -> int:
        return len(self._running) + len(self._results)

    def _try_submit(self, index: int, prompt: PromptLike) -> None:
        key = prompt.key if isinstance(prompt, Job) else index
        try:
            stream = self._submit(prompt)
        except QueueFull:  # other requests took the room
            self._waiting.append((index, prompt))
        except RequestError as error:
            if self._yields_errors:
                self._must_yield = True
                self._results[index] = JobFailed(key=key, error=error)
            else:
                self.end(with_key(error, key))
        except DriftError as error:
            self.end(error)
        except Exception as error:  # reading a prompt may run any code
            if self._yields_errors:
                self._must_yield = True
                self._results[index] = JobFailed(key=key, error=unreadable(error))
            else:
                self.end(error)
        else:
            updates_of(stream).end_signal = self._end_signal
            self._running[index] = Running(key, prompt, stream)

    def _collect(self) -> None:
        """Turn the requests that have ended into results. Those for which an engine in another process had no
        room any more wait again."""
        ended = [index for index, each in self._running.items() if updates_of(each.stream).is_done]
        for index in ended:
            key, prompt, stream = self._running.pop(index)
            completion, error = updates_of(stream).completion, updates_of(stream).error
            assert isinstance(error, DriftError | None)
            if isinstance(error, QueueFull):
                self._waiting.append((index, prompt))
            elif error is not None:
                self._results[index] = JobFailed(key=key, error=error)
            else:
                assert completion is not None
                self._results[index] = JobDone(key=key, completion=completion)

    def _take(self) -> JobResult | None:
        """Remove and return the result that is to be yielded next; None if it is not there. Raises its error
        unless errors are yielded."""
        index = self._num_yielded if self._is_ordered else next(iter(self._results), -1)
        result = self._results.pop(index, None)
        if result is None:
            return None

        self._num_yielded += 1
        error = result.error
        if error is not None and (not self._yields_errors or isinstance(error, EngineClosed | ExecutorError)):
            raise with_key(error, result.key) if isinstance(error, RequestError) else error

        return result


def with_key(error: RequestError, key: object) -> RequestError:
    """The error of a prompt, with a note that names the prompt by its key."""
    error.add_note(f"the prompt of map() with the key {short_repr(key)}")
    return error


def unreadable(cause: Exception) -> RequestError:
    """The error of a prompt whose own methods raise."""
    allowed = f"a prompt that can be read ({error_repr(cause)})"
    error = RequestError(f"prompt: expected {allowed}", field="prompt", allowed=allowed)
    error.__cause__ = cause
    return error


def check_prompts(prompts: object) -> None:
    """RequestError for what cannot be iterated over, and for a single text."""
    allowed = "an iterable of prompts"
    if isinstance(prompts, str | bytes | bytearray):
        raise RequestError.of("prompts", prompts, f"{allowed}; generate() takes a single one")

    if isinstance(prompts, AsyncIterable):
        raise RequestError.of("prompts", prompts, f"{allowed}, not an async iterable")

    if not isinstance(prompts, Iterable):
        raise RequestError.of("prompts", prompts, allowed)


async def results_of(job_map: JobMap, prompts: Iterable[PromptLike]) -> AsyncGenerator[JobResult, None]:
    """The results of prompts. Ending the iteration cancels what was submitted."""
    waiting = iter(prompts)
    try:
        while (result := await job_map.step()) is not None:
            if isinstance(result, JobResult):
                yield result
            else:
                job_map.feed(waiting)
    finally:
        job_map.cancel()


async def completions_of(job_map: JobMap, prompts: Iterable[PromptLike]) -> AsyncGenerator[Completion, None]:
    """The completions of prompts, where errors are raised."""
    async with aclosing(results_of(job_map, prompts)) as results:
        async for result in results:
            assert result.error is None
            yield result.completion
