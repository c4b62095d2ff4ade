"""SyncStream: a stream for code without an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from drift_sdk._display import html_table, state_repr
from drift_sdk._validation import check_float
from drift_sdk.driver.loops import check_no_loop
from drift_sdk.driver.stream_updates import StreamUpdates
from drift_sdk.errors import EngineClosed, RequestError
from drift_sdk.grammars import ParsedT_co
from drift_sdk.results import Chunk, Completion
from drift_sdk.stream import TokenStream, completion_within, description_of_stream, updates_of

__all__ = ["SyncStream"]

ResultT = TypeVar("ResultT")


class SyncStream(Iterator[Chunk], Generic[ParsedT_co]):
    """A submitted request: iterate over its chunks, or get its completion with `result()`, or both in turn.

    Under `with`, leaving the block cancels the request. An exception that interrupts a wait, such as
    KeyboardInterrupt, cancels it too, except in such a block. May be used from any thread, by one at a time.
    A request that has ended can be read after the engine is closed.

    request_id: the name of the request in its completion and in the log.
    """

    def __init__(self, stream: TokenStream[ParsedT_co], call: Callable[..., Any]) -> None:
        self.request_id: str = stream.request_id
        self._stream = stream
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._read(unread_chunk, next_chunk)
        if chunk is None:
            raise StopIteration

        return chunk

    def __repr__(self) -> str:
        """As that of `TokenStream`."""
        return state_repr(type(self).__name__, description_of_stream(getattr(self, "_stream", None)))

    def _repr_html_(self) -> str:
        """As that of `TokenStream`."""
        return html_table(type(self).__name__, description_of_stream(getattr(self, "_stream", None)))

    def accepted(self) -> int | None:
        """Wait until the request is accepted, and return the number of its prompt's tokens; see
        `TokenStream.accepted`."""
        return self._read(num_accepted, TokenStream.accepted)

    def result(self, timeout: float | None = None) -> Completion[ParsedT_co]:
        """Wait for the end of the request. Chunks can still be read afterwards. Raises the request's error if
        it failed: RequestError, EngineClosed or ExecutorError.

        timeout: seconds, 0 to 1,000,000, after which TimeoutError is raised, as by the `result` of a
                 `concurrent.futures.Future`. The request goes on: wait again, or `cancel()` it. None = no
                 limit. RequestError for another value.
        """
        check_float(RequestError, "timeout", timeout, ge=0.0, le=1e6, optional=True)
        return self._read(completion_of, completion_within, timeout)

    def cancel(self) -> None:
        """End the request; tokens generated so far can still be read. May be called more than once."""
        self._stream.cancel()

    def __enter__(self) -> Self:
        self._read(lambda updates: self._stream, TokenStream.__aenter__)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _read(
        self,
        read: Callable[[StreamUpdates], ResultT],
        wait: Callable[..., Awaitable[ResultT]],
        *arguments: object,
    ) -> ResultT:
        """Await `wait` with the stream and arguments on the stream's event loop, and return its result. Of a
        request that has ended, return the result of `read`: the event loop may have ended too."""
        check_no_loop()
        updates = updates_of(self._stream)
        try:
            if not updates.is_done:
                result: ResultT = self._call(wait, self._stream, *arguments)
                return result
        except EngineClosed:  # by another thread, perhaps after the end of the request
            if not updates.is_done:
                raise

        return read(updates)


async def next_chunk(stream: TokenStream) -> Chunk | None:
    """The next chunk of a stream; None at its end."""
    return await anext(stream, None)


def unread_chunk(updates: StreamUpdates) -> Chunk | None:
    """The next chunk of a request that has ended; None after the last one. Raises the request's error if it
    failed."""
    if updates.has_chunk:
        return updates.take_chunk()

    if updates.error is not None:
        raise updates.error

    return None


def completion_of(updates: StreamUpdates) -> Completion:
    """The completion of a request that has ended. Raises the request's error if it failed."""
    if updates.completion is None:
        assert updates.error is not None
        raise updates.error

    return updates.completion


def num_accepted(updates: StreamUpdates) -> int | None:
    """The number of a prompt's tokens. Raises the error of a request that has failed before it was
    accepted."""
    if updates.error is not None and not updates.is_accepted:
        raise updates.error

    return updates.num_prompt_tokens
