"""EngineHost: an engine in a process of its own, used from another one by messages.

Messages can be pickled. On a socket a frame is a message with its length before it. The host's `Mailbox`
joins the updates of all requests until they are fetched.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec import Struct

from drift_sdk.base_engine import BaseEngine, EngineKind
from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.prompts import Prompt
from drift_sdk.driver.stream_updates import StreamUpdates, Update
from drift_sdk.errors import DriftError, EngineClosed
from drift_sdk.results import Chunk, Completion
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.serving import Submission
from drift_sdk.stats import EngineMetrics

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer  # imports tokenizers, which `import drift_sdk` does not


class RemoteRequest(Struct, frozen=True, kw_only=True):
    """A request. number: names it between the two processes, whatever its id is."""

    number: int
    request_id: str
    group_id: str | None
    params: SamplingParams
    seed: int


class SubmitRequests(Struct, frozen=True, kw_only=True):
    """Submit requests of one prompt, all or none."""

    prompt: Prompt
    requests: tuple[RemoteRequest, ...]


class CancelRequest(Struct, frozen=True):
    """Cancel a request."""

    number: int


class TakeBackPause(Struct, frozen=True):
    """Take one pause back; others stay in force."""

    pause: int


Command: TypeAlias = SubmitRequests | CancelRequest | TakeBackPause


class News(Struct, frozen=True, kw_only=True):
    """Events of a request since the last news of it: it was accepted, it has new tokens, or it has
    ended with a completion or an error.

    num_prompt_tokens: None before the request was accepted.
    """

    number: int
    num_prompt_tokens: int | None = None
    chunk: Chunk | None = None
    completion: Completion | None = None
    error: BaseException | None = None


class Batch(Struct, frozen=True, kw_only=True):
    """All news since the last batch.

    number:  of the batch, from 1.
    news:    at most one of each request.
    is_open: whether the engine admits requests.
    is_last: whether the engine is closed and no more news will come.
    metrics: None if they were sent not long ago.
    """

    number: int
    news: tuple[News, ...]
    is_open: bool
    is_last: bool
    metrics: EngineMetrics | None


class Opened(Struct, frozen=True, kw_only=True):
    """An engine that has been started.

    num_slots: most sequences that run at once.
    """

    kind: EngineKind
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    has_drafts: bool
    num_slots: int
    metrics: EngineMetrics


class HostLost(Exception):
    """The host's process has ended, or cannot be reached any more."""


class HostUnavailable(Exception):
    """The host could not be reached; the call may be repeated."""


class Channel(Protocol):
    """Calls the methods of an `EngineHost` in another process."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method. Raises the method's DriftError, HostLost or HostUnavailable."""

    async def kill(self) -> None:
        """End the host's process, whatever it does."""


LENGTH_BYTES = 8
MAX_FRAME_BYTES = 2**30
"""Largest message. A greater length is read only from a process that sends something else."""


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; EOFError or OSError if the other process has ended. Any other exception for what is
    no message."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    check_length(length)
    return pickle.loads(await reader.readexactly(length))


async def write_frame(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    """Send a message, and wait while too much has not been taken by the other process. OSError if that has
    ended, and ValueError before anything is sent if the message is too large."""
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    check_length(len(packed))
    writer.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
    await writer.drain()


def check_length(length: int) -> None:
    """ValueError for a message that is too large."""
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes: expected at most {MAX_FRAME_BYTES}")


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


WAIT_S = 1.0
"""Most seconds that a call of `updates` waits for news."""
METRICS_S = 0.25
"""Least seconds between two batches that have the metrics, while requests are live."""


class EngineHost:
    """Holds an engine. Its methods are called from another process, on one asyncio loop.

    Commands come in numbered lists and news go in numbered batches, so that a call that was lost on its way
    can be repeated: nothing is submitted twice and no token is lost. One process uses a host.

    make_engine: makes the engine.
    """

    def __init__(self, make_engine: Callable[[], BaseEngine]) -> None:
        self._engine = make_engine()
        self._mailbox: Mailbox | None = None
        self._cancels: dict[int, Callable[[], None]] = {}  # of live requests, by number
        self._num_lists = 0  # lists of commands that were carried out
        self._batch: Batch | None = None  # the last one
        self._fetching = asyncio.Lock()  # a repeated call may meet the one that was given up
        self._pauses: dict[int, Callable[[], None]] = {}
        self._pause_numbers = itertools.count()
        self._metrics_at = 0.0
        self._is_closed = False

    async def start(self) -> Opened:
        """Start the engine."""
        self._mailbox = Mailbox()
        await self._engine.start()
        model_text = self._engine._model_text()
        metrics = self._engine.metrics()
        return Opened(
            kind=await self._engine._kind(),
            tokenizer=model_text.tokenizer,
            eos_token_ids=model_text.eos_token_ids,
            vocab_size=model_text.vocab_size,
            has_drafts=model_text.has_drafts,
            num_slots=metrics.stats.num_free_slots,
            metrics=metrics,
        )

    async def aclose(self, drain: float) -> None:
        """Close the engine. The last batch of `updates` has what is left."""
        await self._engine.aclose(drain)
        await asyncio.sleep(0)  # updates that were posted to this loop come first
        self._is_closed = True
        self._opened_mailbox.wake()

    async def send(self, number: int, commands: Sequence[Command]) -> None:
        """Carry out a list of commands, unless that has been done. number: of the list, from 1."""
        if number <= self._num_lists:
            return

        self._num_lists = number
        for command in commands:
            match command:
                case SubmitRequests():
                    self._submit(command)
                case CancelRequest():
                    self._cancels.get(command.number, do_nothing)()
                case TakeBackPause():
                    self._pauses.pop(command.pause, do_nothing)()

    async def updates(self, last: int) -> Batch:
        """The news after the batch of this number, as soon as there are some, or after a second none. The
        same batch again if it has been made already."""
        async with self._fetching:
            if self._batch is None or self._batch.number == last:
                self._batch = await self._next_batch(last + 1)
            return self._batch

    async def pause(self) -> int:
        """Pause, and return the number of this pause."""
        undo = await self._engine._pause()
        number = next(self._pause_numbers)
        self._pauses[number] = undo
        return number

    async def resume(self) -> None:
        self._pauses.clear()
        await self._engine.resume()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def count_tokens(self, prompt: Prompt) -> int:
        return await self._engine._count_tokens(prompt)

    async def kind(self) -> EngineKind:
        return await self._engine._kind()

    @property
    def _opened_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            raise EngineClosed("the engine is not open")

        return self._mailbox

    async def _next_batch(self, number: int) -> Batch:
        mailbox = self._opened_mailbox
        if not self._is_closed:
            await mailbox.wait(WAIT_S)
        is_last = self._is_closed  # read before the news are taken
        news = mailbox.take()
        for each in news:
            if each.completion is not None or each.error is not None:
                self._cancels.pop(each.number, None)
        return Batch(
            number=number,
            news=news,
            is_open=self._engine.is_open,
            is_last=is_last,
            metrics=self._new_metrics(),
        )

    def _submit(self, command: SubmitRequests) -> None:
        """Submit requests; what is raised is the error of each."""
        mailbox = self._opened_mailbox
        receivers = [MailboxReceiver(mailbox, request.number) for request in command.requests]
        submissions = [
            Submission(
                request_id=request.request_id,
                group_id=request.group_id,
                prompt=command.prompt,
                params=request.params,
                seed=request.seed,
                stream_updates=receiver,
            )
            for request, receiver in zip(command.requests, receivers, strict=True)
        ]
        try:
            cancels = self._engine._enter(submissions)
        except Exception as error:
            cause = error if isinstance(error, DriftError) else DriftError(repr(error))
            for receiver in receivers:
                receiver.deliver(Update(stream_updates=receiver, error=cause))
        else:
            self._engine._warn_of_template(command.prompt)
            self._cancels.update(
                (request.number, cancel) for request, cancel in zip(command.requests, cancels, strict=True)
            )

    def _new_metrics(self) -> EngineMetrics | None:
        now = time.monotonic()
        if self._cancels and now - self._metrics_at < METRICS_S:
            return None

        self._metrics_at = now
        try:
            return self._engine.metrics()
        except EngineClosed:
            return None


def do_nothing() -> None:
    """Cancels a request that has ended."""
