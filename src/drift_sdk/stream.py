"""TokenStream: a request as an async iterator of chunks and an awaitable completion.

Samples: several completions of one prompt, read together or each by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, overload

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from drift_sdk._display import html_table, state_repr
from drift_sdk.driver.stream_updates import Signal, StreamUpdates
from drift_sdk.errors import short_repr
from drift_sdk.grammars import ParsedT, ParsedT_co
from drift_sdk.results import Chunk, Completion


class TokenStream(AsyncIterator[Chunk], Generic[ParsedT_co]):
    """A submitted request: iterate over its chunks with `async for`, await its completion, or both in turn.

    The request is cancelled as follows:
    - Under `async with`, when the block is left. A cancelled `__anext__` or `await` in the block (a timeout
      between tokens) does not cancel the request, and no token is lost.
    - Otherwise when a task that waits in `__anext__`, `await` or `accepted()` is cancelled, or when the last
      reference to an unfinished stream is dropped, with a ResourceWarning.

    Unread tokens are joined into one pending chunk, so a slow reader delays neither the engine nor other
    streams. A stream that nobody reads keeps what its completion will have: `max_tokens` bounds it, at some
    170 bytes a token, with log-probabilities 300, and 130 more for each of the most likely tokens.

    The error of a failed request is raised by the next `__anext__` or `await`. A stream is read on the event
    loop that it was made on: on another one, awaiting it and iterating over it raise RuntimeError, as does
    iterating over it in two tasks at once. After a fork, reading an unfinished stream in the child raises
    EngineClosed.

    `request_id`: the name of the request in its completion and in the log.
    """

    def __init__(self, request_id: str, updates: StreamUpdates, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._updates = updates
        self._cancel = cancel
        self._is_cancelled = False
        self._is_entered = False
        self._is_iterated = False

    def __reduce__(self) -> NoReturn:
        raise TypeError("TokenStream cannot be copied or pickled: a request has one reader")

    def cancel(self) -> None:
        """End the request; tokens generated so far can still be read. May be called from any thread, and more
        than once."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._cancel()

    async def aclose(self) -> None:
        """Cancel the request, as leaving the `async with` block does."""
        self.cancel()

    async def accepted(self) -> int | None:
        """Wait until the request is accepted: its prompt has been tokenised and fits, its grammar has been
        compiled, and it is in the queue of the scheduler. Returns the number of the prompt's tokens, at once
        if the request has been accepted, whatever happened afterwards; None if it is cancelled before. Raises
        its error if it failed before: PromptTooLong or another RequestError, EngineClosed or ExecutorError.

        A server awaits it before it sends the headers of a response. Several tasks may wait."""
        updates = self._updates
        updates.check_loop()
        try:
            await checkpoint_if_cancelled()
            updates.awaits_acceptance = True
            while not updates.is_accepted and not updates.is_done:
                await updates.wait()
        except BaseException:
            self._abandon()
            raise

        if updates.error is not None and not updates.is_accepted:
            raise updates.error

        return updates.num_prompt_tokens

    async def completion(self) -> Completion[ParsedT_co]:
        """Wait for the end of the request, as awaiting the stream does; a coroutine, for task groups and
        `create_task`. Chunks can still be read afterwards. Raises the request's error if it failed:
        RequestError, EngineClosed or ExecutorError."""
        return await self._completion_within(None)

    async def _completion_within(self, seconds: float | None) -> Completion[ParsedT_co]:
        """As `completion()`; TimeoutError, and the request goes on, if it has not ended after so many
        seconds (None = no limit)."""
        updates = self._updates
        updates.check_loop()
        try:
            await checkpoint_if_cancelled()
            with anyio.move_on_after(seconds):
                while not updates.is_done:
                    await updates.wait()
        except BaseException:
            self._abandon()
            raise

        if not updates.is_done:
            raise TimeoutError(f"request {self.request_id} has not ended within {seconds:g} s")

        if updates.completion is None:
            assert updates.error is not None
            raise updates.error

        return updates.completion

    def __await__(self) -> Generator[Any, Any, Completion[ParsedT_co]]:
        return self.completion().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_iterated:
            raise RuntimeError("this stream is being iterated already, by another task")

        updates = self._updates
        updates.check_loop()
        self._is_iterated = True
        try:
            if updates.has_chunk or updates.is_done:  # a wait would notice a cancellation too
                await checkpoint_if_cancelled()
            while not updates.has_chunk and not updates.is_done:
                await updates.wait()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._is_iterated = False

        if updates.has_chunk:
            return updates.take_chunk()

        if updates.error is not None:
            raise updates.error

        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        self._is_entered = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _abandon(self) -> None:
        if not self._is_entered:
            self.cancel()

    def __repr__(self) -> str:
        """The request's name and state."""
        return state_repr(type(self).__name__, description_of_stream(self))

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return html_table(type(self).__name__, description_of_stream(self))

    def __del__(self) -> None:
        updates = getattr(self, "_updates", None)
        if (
            updates is not None
            and not updates.is_done
            and not self._is_cancelled
            and not updates.is_from_parent
        ):
            self.cancel()
            message = f"stream {self.request_id} was garbage-collected before it ended, and is cancelled"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)


async def completion_within(stream: TokenStream[ParsedT], seconds: float | None) -> Completion[ParsedT]:
    """The completion of a stream, for code that has no event loop to set a timeout on: see `SyncStream`."""
    return await stream._completion_within(seconds)


def updates_of(stream: TokenStream) -> StreamUpdates:
    """The updates of a stream, for modules that wait for several streams at once."""
    return stream._updates


def description_of_stream(stream: TokenStream | None) -> dict[str, str]:
    """Name and state of a stream's request; None = there is no stream yet."""
    updates: StreamUpdates | None = getattr(stream, "_updates", None)
    if stream is None or updates is None:  # a constructor has failed
        return {"state": "not submitted"}

    state = "accepted" if updates.is_accepted else "submitted"
    if stream._is_cancelled:
        state = "cancelled"
    completion, error = updates.completion, updates.error
    if completion is not None:
        state = f"ended ({completion.finish_reason})"
    elif error is not None:
        state = f"failed ({short_repr(error)})"
    return {"request_id": stream.request_id, "state": state}


ResultT = TypeVar("ResultT")


class Samples(Sequence[TokenStream[ParsedT_co]], AsyncIterator[tuple[int, Chunk]], Generic[ParsedT_co]):
    """Submitted samples of one prompt: a sequence of their streams.

    Iterate with `async for index, chunk in samples` over the chunks of all samples as they arrive, await the
    completions of all, a tuple in order, or use the streams by themselves: `samples[0]`. A chunk is read
    once, by either way. Errors, ownership and event loop are as of `TokenStream`: leaving an `async with`
    block cancels all samples; so does, outside of such a block, the cancellation of a task that waits, or the
    error of one sample.
    """

    def __init__(self, streams: Sequence[TokenStream[ParsedT_co]], signal: Signal) -> None:
        """signal: given by every update of every stream."""
        self._streams = tuple(streams)
        self._signal = signal
        self._is_entered = False
        self._is_iterated = False
        self._first = 0  # the stream whose chunk is looked for first, so that all take turns

    def __len__(self) -> int:
        return len(self._streams)

    @overload
    def __getitem__(self, index: int) -> TokenStream[ParsedT_co]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenStream[ParsedT_co], ...]: ...
    def __getitem__(
        self, index: int | slice
    ) -> TokenStream[ParsedT_co] | tuple[TokenStream[ParsedT_co], ...]:
        return self._streams[index]

    def __repr__(self) -> str:
        """The requests' names and states."""
        return f"<{type(self).__name__} {list(self._streams)}>"

    def cancel(self) -> None:
        """End all samples; tokens generated so far can still be read. May be called from any thread, and more
        than once."""
        for stream in self._streams:
            stream.cancel()

    async def aclose(self) -> None:
        """Cancel all samples, as leaving the `async with` block does."""
        self.cancel()

    async def accepted(self) -> int | None:
        """Wait until the samples are accepted, which happens to all at once, and return the number of the
        prompt's tokens; see `TokenStream.accepted`."""
        return next(iter(await self._all(TokenStream.accepted)), None)

    async def completions(self) -> tuple[Completion[ParsedT_co], ...]:
        """Wait for the end of all samples, as awaiting does; a coroutine, for task groups and
        `create_task`."""
        return await self._all(TokenStream.completion)

    def __await__(self) -> Generator[Any, Any, tuple[Completion[ParsedT_co], ...]]:
        return self.completions().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        if self._is_iterated:
            raise RuntimeError("these samples are being iterated already, by another task")

        updates = updates_of(self._streams[0])
        updates.check_loop()
        self._is_iterated = True
        try:
            await checkpoint_if_cancelled()
            while (found := self._take()) is None and not self._are_done:
                await updates.wait(self._signal)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._is_iterated = False

        if found is None:
            raise StopAsyncIteration

        return found

    async def __aenter__(self) -> Self:
        self._is_entered = True
        for stream in self._streams:
            await stream.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    @property
    def _are_done(self) -> bool:
        return all(updates_of(stream).is_done for stream in self._streams)

    def _take(self) -> tuple[int, Chunk] | None:
        """The unread tokens of one sample with its index; None if there are none. Raises the error of a
        sample that has failed and has no unread tokens."""
        size = len(self._streams)
        for index in (number % size for number in range(self._first, self._first + size)):
            updates = updates_of(self._streams[index])
            if updates.has_chunk:
                self._first = index + 1
                return index, updates.take_chunk()

            if updates.error is not None:
                raise updates.error

        return None

    async def _all(
        self, wait: Callable[[TokenStream[ParsedT_co]], Awaitable[ResultT]]
    ) -> tuple[ResultT, ...]:
        try:
            return tuple([await wait(stream) for stream in self._streams])
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if not self._is_entered:
            self.cancel()
