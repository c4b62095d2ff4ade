"""Mailbox: updates of all requests of a host, joined until they are fetched."""

from __future__ import annotations

import asyncio
import pickle

from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.stream_updates import StreamUpdates, Update
from drift_sdk.errors import DriftError
from drift_sdk.remote.messages import News

__all__ = ["Mailbox", "MailboxReceiver"]


class MailboxReceiver:
    """Receives the updates of one request and keeps them, joined, until the mailbox is emptied.

    `awaits_acceptance` is always true: the other process is told of the acceptance of every request.
    """

    awaits_acceptance = True

    def __init__(self, mailbox: Mailbox, number: int) -> None:
        self.number = number
        self.num_prompt_tokens: int | None = None
        self.loop_poster: LoopPoster = mailbox.loop_poster
        self._mailbox = mailbox
        self._updates = StreamUpdates(mailbox.loop_poster)

    def deliver(self, update: Update) -> None:
        self._updates.deliver(update)
        self._mailbox.mark(self)

    def desert(self) -> None:
        """Never called: the loop of a host outlives its engine."""

    def take(self) -> News:
        updates = self._updates
        return News(
            number=self.number,
            num_prompt_tokens=self.num_prompt_tokens,
            chunk=updates.take_chunk() if updates.has_chunk else None,
            completion=updates.completion,
            error=portable(updates.error),
        )


class Mailbox:
    """The receivers that have something to tell. Used on one asyncio loop."""

    def __init__(self) -> None:
        self.loop_poster: LoopPoster = LoopPoster.current()
        self._marked: dict[MailboxReceiver, None] = {}
        self._has_news = asyncio.Event()

    def mark(self, receiver: MailboxReceiver) -> None:
        """A receiver has something to tell."""
        self._marked[receiver] = None
        self._has_news.set()

    def wake(self) -> None:
        """End the call of `wait` in progress, if there is one."""
        self._has_news.set()

    async def wait(self, seconds: float) -> None:
        """Wait for news, so many seconds at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_news.wait()
        except TimeoutError:
            return

    def take(self) -> tuple[News, ...]:
        """All news, which are forgotten."""
        marked, self._marked = self._marked, {}
        self._has_news.clear()
        return tuple(receiver.take() for receiver in marked)


def portable(error: BaseException | None) -> BaseException | None:
    """An error that can be pickled: a DriftError with its message in place of one that cannot."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DriftError(f"{type(error).__name__}: {error}")

    return error
