"""TokenStream: a running request as an async iterator of chunks and an awaitable completion."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable
from types import TracebackType
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from drift_sdk.driver.stream_updates import StreamUpdates
from drift_sdk.errors import QueueFull
from drift_sdk.results import Chunk, Completion

__all__ = ["TokenStream", "map_prompts"]


class TokenStream(AsyncIterator[Chunk]):
    """A request that has been submitted: iterate over its chunks, await its completion, or both in turn.

    Who owns the request:
    - Under `async with`, the block does: a cancelled `__anext__` (a timeout between tokens) keeps the request
      and loses nothing; leaving the block cancels it.
    - Otherwise the call that waits does: a cancelled `__anext__` or `await` cancels the request. Dropping the
      last reference to an unfinished stream cancels it too, with a ResourceWarning.

    Unread tokens coalesce into one pending chunk, so a slow reader slows nobody down. Errors are raised by
    the next `__anext__` or `await`. A stream is used on the event loop it was made on.
    """

    def __init__(self, request_id: str, feed: StreamUpdates, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._feed = feed
        self._cancel = cancel
        self._is_cancelled = False
        self._is_entered = False
        self._is_iterated = False

    def cancel(self) -> None:
        """Stop generating; what was generated stays readable. Idempotent, callable from any thread."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._cancel()

    async def aclose(self) -> None:
        """Cancel, as leaving the `async with` block does."""
        self.cancel()

    async def completion(self) -> Completion:
        """Wait for the end; a coroutine, for task groups and `create_task`. Chunks stay readable."""
        feed = self._feed
        try:
            await checkpoint_if_cancelled()
            while not feed.is_done:
                await feed.changed()
        except BaseException:
            self._abandon()
            raise

        if feed.completion is None:
            assert feed.error is not None
            raise feed.error

        return feed.completion

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self.completion().__await__()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_iterated:
            raise RuntimeError("this stream is being iterated already")

        feed = self._feed
        self._is_iterated = True
        try:
            await checkpoint_if_cancelled()
            while not feed.has_chunk and not feed.is_done:
                await feed.changed()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._is_iterated = False

        if feed.has_chunk:
            return feed.take()

        if feed.error is not None:
            raise feed.error

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
        feed = getattr(self, "_feed", None)
        if feed is not None and not feed.is_done and not self._is_cancelled and not feed.is_foreign:
            self.cancel()
            message = f"unfinished stream {self.request_id} was dropped"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)


PromptT = TypeVar("PromptT")

POLL_S = 0.01
"""Seconds between looks at a queue that others have filled."""


async def map_prompts(
    generate: Callable[[PromptT], TokenStream],
    has_room: Callable[[], bool],
    prompts: Iterable[PromptT],
    max_concurrent: int,
) -> AsyncGenerator[Completion, None]:
    """Completions in the order of their prompts, at most `max_concurrent` submitted at a time.

    While the queue is full (`has_room`) it waits: for its own requests, or for those of others if it has
    none. An error of `prompts`, or of a prompt that cannot be submitted, is raised after the completions of
    the prompts before it."""
    waiting = iter(prompts)
    refused: list[PromptT] = []  # the prompt to be submitted next, if there was no room
    streams: deque[TokenStream] = deque()
    failure: Exception | None = None
    is_exhausted = False
    try:
        while True:
            while not is_exhausted and len(streams) < max_concurrent:
                try:
                    if not has_room():
                        break
                    if not refused:
                        refused.append(next(waiting))
                    streams.append(generate(refused[0]))
                    refused.clear()
                except QueueFull:  # others were quicker
                    break
                except StopIteration:
                    is_exhausted = True
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
