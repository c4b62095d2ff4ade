"""TokenStream: a request as an async iterator of chunks and an awaitable completion; streams of many
prompts."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from types import TracebackType
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from drift_sdk.driver.stream_updates import StreamUpdates
from drift_sdk.errors import QueueFull, RequestError
from drift_sdk.results import Chunk, Completion

__all__ = ["TokenStream", "check_prompts", "map_prompts"]


class TokenStream(AsyncIterator[Chunk]):
    """A submitted request: iterate over its chunks with `async for`, await its completion, or both in turn.

    The request is cancelled as follows:
    - Under `async with`, when the block is left. A cancelled `__anext__` or `await` in the block (a timeout
      between tokens) does not cancel the request, and no token is lost.
    - Otherwise when a task that waits in `__anext__` or `await` is cancelled, or when the last reference to
      an unfinished stream is dropped, with a ResourceWarning.

    Unread tokens are joined into one pending chunk, so a slow reader delays neither the engine nor other
    streams. The error of a failed request is raised by the next `__anext__` or `await`. A stream is read on
    the event loop that it was made on: on another one, awaiting it and iterating over it raise RuntimeError,
    as does iterating over it in two tasks at once. After a fork, reading an unfinished stream in the child
    raises EngineClosed.

    `request_id`: the name of the request in its completion and in the log.
    """

    def __init__(self, request_id: str, updates: StreamUpdates, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._updates = updates
        self._cancel = cancel
        self._is_cancelled = False
        self._is_entered = False
        self._is_iterated = False

    def cancel(self) -> None:
        """End the request; tokens generated so far can still be read. May be called from any thread, and more
        than once."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._cancel()

    async def aclose(self) -> None:
        """Cancel the request, as leaving the `async with` block does."""
        self.cancel()

    async def completion(self) -> Completion:
        """Wait for the end of the request, as awaiting the stream does; a coroutine, for task groups and
        `create_task`. Chunks can still be read afterwards. Raises the request's error if it failed:
        RequestError, EngineClosed or ExecutorError."""
        updates = self._updates
        updates.check_loop()
        try:
            await checkpoint_if_cancelled()
            while not updates.is_done:
                await updates.wait()
        except BaseException:
            self._abandon()
            raise

        if updates.completion is None:
            assert updates.error is not None
            raise updates.error

        return updates.completion

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self.completion().__await__()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_iterated:
            raise RuntimeError("this stream is being iterated already, by another task")

        updates = self._updates
        updates.check_loop()
        self._is_iterated = True
        try:
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

    async def __aenter__(self) -> TokenStream:
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


PromptT = TypeVar("PromptT")

POLL_S = 0.01
"""Seconds between checks of a queue that the requests of others have filled."""


def check_prompts(prompts: object) -> None:
    """RequestError for what cannot be iterated over, and for a single text."""
    allowed = "an iterable of prompts"
    if isinstance(prompts, str | bytes | bytearray):
        raise RequestError.of("prompts", prompts, f"{allowed}; generate() takes a single one")

    if isinstance(prompts, AsyncIterable):
        raise RequestError.of("prompts", prompts, f"{allowed}, not an async iterable")

    if not isinstance(prompts, Iterable):
        raise RequestError.of("prompts", prompts, allowed)


async def map_prompts(
    generate: Callable[[PromptT], TokenStream],
    has_room: Callable[[], bool],
    prompts: Iterable[PromptT],
    max_concurrent: int,
) -> AsyncGenerator[Completion, None]:
    """Completions in the order of their prompts, at most `max_concurrent` submitted at a time.

    generate: submits a prompt.
    has_room: whether a prompt can be submitted now. While it cannot, this waits for its own requests, or for
              those of others if it has none.

    An error of `prompts`, or of a prompt that cannot be submitted, is raised after the completions of the
    prompts before it.
    """
    waiting = iter(prompts)
    rejected: list[PromptT] = []  # the prompt to be submitted next, if there was no room for it
    streams: deque[TokenStream] = deque()
    failure: Exception | None = None
    is_exhausted = False
    try:
        while True:
            while not is_exhausted and len(streams) < max_concurrent:
                try:
                    if not has_room():
                        break
                    if not rejected:
                        rejected.append(next(waiting))
                except StopIteration:
                    is_exhausted = True
                    continue
                except Exception as error:
                    is_exhausted, failure = True, error
                    continue

                try:
                    streams.append(generate(rejected[0]))
                    rejected.clear()
                except QueueFull:  # other requests took the room
                    break
                except Exception as error:
                    is_exhausted, failure = True, error

            if streams:
                completion = await streams[0]
                streams.popleft()
                yield completion
            elif not is_exhausted:
                await anyio.sleep(POLL_S)
            elif failure is not None:
                raise failure
            else:
                return
    finally:
        for stream in streams:
            stream.cancel()
