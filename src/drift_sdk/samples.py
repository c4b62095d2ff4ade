"""Samples: several completions of one prompt, read together or each by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

from anyio.lowlevel import checkpoint_if_cancelled

from drift_sdk.driver.stream_updates import Signal
from drift_sdk.grammars import ParsedT_co
from drift_sdk.results import Chunk, Completion
from drift_sdk.stream import TokenStream, updates_of

__all__ = ["Samples"]

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
