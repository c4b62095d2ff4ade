"""Updates from the engine's thread to streams, posted to each event loop once a step and kept until read."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

import anyio
from msgspec import Struct

from drift_sdk.driver.loops import LoopClosed, LoopPoster, num_forks
from drift_sdk.errors import EngineClosed
from drift_sdk.results import Chunk, Completion


class UpdateReceiver(Protocol):
    """The receiver of a request's updates: `StreamUpdates`, or what forwards them to one.

    num_prompt_tokens, awaits_acceptance: as of `StreamUpdates`.
    """

    num_prompt_tokens: int | None

    @property
    def awaits_acceptance(self) -> bool: ...

    @property
    def loop_poster(self) -> LoopPoster:
        """To the event loop that `deliver` is called on."""

    def deliver(self, update: Update) -> None:
        """Take an update; called on the event loop."""

    def desert(self) -> None:
        """Called on the engine's thread, in place of the last update, when the event loop has ended."""


SLICE_UPDATES = 16
"""Most streams that one turn of an event loop resumes: about 0.2 ms of their work."""


class Update(Struct, frozen=True, kw_only=True, gc=False):
    """One step's news for one stream: a chunk, and at the end of the request its completion or its error.
    Without any of them, it resumes the tasks that wait for the request to be accepted."""

    stream_updates: UpdateReceiver
    chunk: Chunk | None = None
    completion: Completion | None = None
    error: BaseException | None = None


class Signal:
    """Resumes all tasks that wait for it, each time it is given. Used on one event loop only."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: asyncio.Event | anyio.Event | None = None  # set by the next call of `give`

    def give(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, loop_poster: LoopPoster) -> None:
        """Wait for the next call of `give`. loop_poster: to the running loop."""
        event = self._event
        if event is None:
            event = self._event = loop_poster.event()
        await event.wait()


class StreamUpdates:
    """Chunks of one stream that have not been read, and how it ended. Used on the stream's event loop only;
    the engine's thread posts `deliver` to that loop.

    The engine holds this object and the caller holds the stream, so that a dropped stream can be noticed.

    signal:     given by every update; several streams may share one. None = a signal of its own.
    end_signal: given by the last update; None = none.

    `num_prompt_tokens` is set by the engine's thread when the request has been accepted. It posts an update
    for that only if a task has set `awaits_acceptance` before, so that other requests cost no post.
    """

    __slots__ = (
        "_num_forks",
        "_pending",
        "_signal",
        "awaits_acceptance",
        "completion",
        "end_signal",
        "error",
        "loop_poster",
        "num_prompt_tokens",
    )

    def __init__(self, loop_poster: LoopPoster, signal: Signal | None = None) -> None:
        self._num_forks = num_forks()
        self.loop_poster: LoopPoster = loop_poster
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.end_signal: Signal | None = None
        self.num_prompt_tokens: int | None = None
        self.awaits_acceptance: bool = False
        self._pending: list[Chunk] = []
        self._signal = signal if signal is not None else Signal()

    @property
    def is_accepted(self) -> bool:
        return self.num_prompt_tokens is not None

    @property
    def is_done(self) -> bool:
        """Whether the request has ended; chunks may still be unread."""
        return self.completion is not None or self.error is not None

    @property
    def is_from_parent(self) -> bool:
        """Whether it was made by a process that this one is a fork of: no further update will come."""
        return self._num_forks != num_forks()

    @property
    def has_chunk(self) -> bool:
        return bool(self._pending)

    def deliver(self, update: Update) -> None:
        """Keep an update until it is read, and resume the tasks in `wait`."""
        if update.chunk is not None:
            self._pending.append(update.chunk)
        self.completion = update.completion
        self.error = update.error
        self._signal.give()
        if self.end_signal is not None and self.is_done:
            self.end_signal.give()

    def desert(self) -> None:
        """Nothing is kept for an event loop that has ended."""

    def take_chunk(self) -> Chunk:
        """Remove all unread chunks and return them as one. There must be at least one."""
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            return pending[0]

        has_logprobs = pending[-1].logprobs is not None
        return Chunk(
            text="".join(chunk.text for chunk in pending),
            token_ids=tuple(token for chunk in pending for token in chunk.token_ids),
            logprobs=tuple(entry for chunk in pending for entry in chunk.logprobs or ())
            if has_logprobs
            else None,
            finish_reason=pending[-1].finish_reason,
            reasoning="".join(chunk.reasoning for chunk in pending),
            tool_calls=tuple(call for chunk in pending for call in chunk.tool_calls),
        )

    def check_loop(self) -> None:
        """RuntimeError on another event loop than the stream's; in a forked child any loop will do."""
        if not self.loop_poster.is_current and not self.is_from_parent:
            raise RuntimeError(
                "this stream belongs to another event loop: await it, or iterate over it, on the event loop "
                "that generate() or chat() was called on"
            )

    async def wait(self, signal: Signal | None = None) -> None:
        """Wait for the next update, or for another signal that is to come from the engine; EngineClosed if
        none can come."""
        if self.is_from_parent:
            raise EngineClosed("the engine runs in the process that this one was forked from")

        await (signal or self._signal).wait(self.loop_poster)


class LoopDelivery:
    """Delivers updates on one event loop in the order of their posts, a slice in each turn of the loop.

    The tasks that a slice resumes run before the next slice, and whatever else waits on the loop with them.
    Made on the engine's thread, used on the loop's.
    """

    def __init__(self, loop_poster: LoopPoster) -> None:
        self._loop_poster = loop_poster
        self._updates: deque[Update] = deque()

    def deliver(self, batch: list[Update]) -> None:
        """Deliver a step's updates, those of earlier steps first."""
        is_running = bool(self._updates)
        self._updates.extend(batch)
        if not is_running:
            self._deliver_slice()

    def _deliver_slice(self) -> None:
        updates = self._updates
        for _ in range(min(len(updates), SLICE_UPDATES)):
            update = updates.popleft()
            update.stream_updates.deliver(update)
        if updates:
            self._loop_poster.post_here(self._deliver_slice)


class PendingUpdates:
    """Updates that have not been posted, by event loop. Used on the engine's thread only."""

    def __init__(self) -> None:
        self._updates: dict[object, tuple[LoopPoster, list[Update]]] = {}  # by loop
        self._deliveries: dict[object, LoopDelivery] = {}  # by loop

    @property
    def has_any(self) -> bool:
        return bool(self._updates)

    def add(self, update: Update) -> None:
        loop_poster = update.stream_updates.loop_poster
        of_loop = self._updates.get(loop_poster.loop)
        if of_loop is None:
            of_loop = self._updates[loop_poster.loop] = (loop_poster, [])
        of_loop[1].append(update)

    def post(self) -> list[LoopPoster]:
        """Send all updates, with one call for each loop; returns the loops that have ended."""
        if not self._updates:
            return []

        updates, self._updates = self._updates, {}
        ended: list[LoopPoster] = []
        for loop_poster, batch in updates.values():
            try:
                loop_poster.post(self._delivery(loop_poster).deliver, batch)
            except LoopClosed:
                del self._deliveries[loop_poster.loop]
                ended.append(loop_poster)

        return ended

    def _delivery(self, loop_poster: LoopPoster) -> LoopDelivery:
        found = self._deliveries.get(loop_poster.loop)
        if found is None:
            # Streams of an ended loop may all have ended before it: nothing is posted to it any more.
            for loop in [loop for loop in self._deliveries if is_closed(loop)]:
                del self._deliveries[loop]
            found = self._deliveries[loop_poster.loop] = LoopDelivery(loop_poster)
        return found


def is_closed(loop: object) -> bool:
    """Whether an event loop of asyncio has been closed; False for a token of trio."""
    return isinstance(loop, asyncio.AbstractEventLoop) and loop.is_closed()
