"""The way from the engine's thread to a stream: updates go out with one post a step, feeds take them in."""

from __future__ import annotations

import anyio
from msgspec import Struct

from drift_sdk.driver.loop_poster import LoopClosed, LoopPoster
from drift_sdk.driver.process_hooks import num_forks
from drift_sdk.errors import EngineClosed
from drift_sdk.results import Chunk, Completion

__all__ = ["Outbox", "StreamUpdates", "Update"]


class Update(Struct, frozen=True, kw_only=True, gc=False):
    """What one step of the engine brings to a stream: a chunk, and at the end how it ended."""

    feed: StreamUpdates
    chunk: Chunk | None = None
    completion: Completion | None = None
    error: BaseException | None = None


class StreamUpdates:
    """A stream's mailbox. The engine's thread posts updates to its loop; all else happens on that loop.

    The engine holds the feed and the caller holds the stream, so that dropping the stream can be noticed.
    """

    __slots__ = ("_num_forks", "_pending", "_wake", "bridge", "completion", "error")

    def __init__(self, bridge: LoopPoster) -> None:
        self._num_forks = num_forks()
        self.bridge = bridge
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self._pending: list[Chunk] = []
        self._wake: anyio.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one it was made in: nothing more will be delivered."""
        return self._num_forks != num_forks()

    @property
    def has_chunk(self) -> bool:
        return bool(self._pending)

    def deliver(self, update: Update) -> None:
        if update.chunk is not None:
            self._pending.append(update.chunk)
        self.completion = update.completion
        self.error = update.error
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def take(self) -> Chunk:
        """Everything that waits, as one chunk."""
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
        )

    async def changed(self) -> None:
        """Wait for the next update; EngineClosed if none can come."""
        if self.is_foreign:
            raise EngineClosed("the engine runs in the process that this one was forked from")

        if self._wake is None:
            self._wake = anyio.Event()

        await self._wake.wait()


class Outbox:
    """Updates of a step, gathered by event loop. Used on the engine's thread alone."""

    def __init__(self) -> None:
        self._updates: dict[object, tuple[LoopPoster, list[Update]]] = {}  # by loop

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    def put(self, update: Update) -> None:
        bridge = update.feed.bridge
        posting = self._updates.get(bridge.loop)
        if posting is None:
            posting = self._updates[bridge.loop] = (bridge, [])
        posting[1].append(update)

    def post(self) -> list[LoopPoster]:
        """Send everything, one post a loop; the loops that have ended."""
        if not self._updates:
            return []

        updates, self._updates = self._updates, {}
        closed: list[LoopPoster] = []
        for bridge, batch in updates.values():
            try:
                bridge.post(deliver, batch)
            except LoopClosed:
                closed.append(bridge)

        return closed


def deliver(batch: list[Update]) -> None:
    """Runs on the caller's loop."""
    for update in batch:
        update.feed.deliver(update)
