"""The connection to an engine's host, and the other process from its start to its end.

Everything of a `Connection` but `submit`, `cancel` and `send` runs on the event loop that calls the channel.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
from msgspec.structs import replace

from drift_sdk.driver.life_cycle import Startable
from drift_sdk.driver.loops import LoopClosed, LoopPoster, LoopThread, close_at_exit
from drift_sdk.driver.prompts import ModelText
from drift_sdk.driver.stream_updates import Update, UpdateReceiver
from drift_sdk.errors import EngineClosed, ExecutorError, ModelLoadError, QueueFull, RequestError, error_repr
from drift_sdk.grammars import JsonSchema
from drift_sdk.remote.host import (
    Batch,
    CancelRequest,
    Channel,
    Command,
    HostLost,
    HostUnavailable,
    News,
    Opened,
    RemoteRequest,
    SubmitRequests,
)
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.serving import Submission
from drift_sdk.stats import EngineMetrics, EngineStats, counts_of

RETRY_S = 30.0
"""Seconds for which calls of a host that cannot be reached are repeated, before it counts as lost."""
RETRY_PAUSE_S = 0.2
SILENCE_S = 120.0
"""Seconds without news after which a host counts as lost. It answers once a second, unless its process is
stopped, or native code keeps the lock of its interpreter."""
LOOP_LAG_S = 0.05
"""Seconds for which a batch waits until the callers' event loops have taken the one before. A loop that is
slower gets fewer and larger chunks, so its unread tokens are joined on the host."""

log: logging.Logger = logging.getLogger("drift_sdk")


class Connection:
    """A host whose engine is open.

    limit: most live requests that are not being cancelled; None = unbounded.
    ended: set when no more news will come; the loss of the host is then `failure`.
    """

    def __init__(self, channel: Channel, metrics: EngineMetrics, loop: LoopThread, limit: int | None) -> None:
        self._is_host_open = True
        self.failure: HostLost | None = None
        self.ended: asyncio.Event = asyncio.Event()
        self._channel = channel
        self._loop = loop
        self._limit = limit
        self._lock = threading.RLock()
        self._metrics = metrics  # the newest of the host
        self._num_rejected = 0  # requests that the host has not seen
        self._num_ended: Counter[str] = Counter()  # accepted ones, by finish reason, or "error"
        self._live: dict[int, Submission] = {}
        self._leaving: set[int] = set()  # live ones that are being cancelled
        self._numbers = itertools.count()
        self._outbox: list[Command] = []
        self._num_lists = 0
        self._is_sending = False
        self._is_closing = False

    def submit(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        """Send requests of one prompt to the host; from any thread. QueueFull, EngineClosed or ExecutorError
        if they are rejected here."""
        params = [sent_params(each.params) for each in submissions]
        with self._lock:
            self._check_open()
            if not self.has_room(len(submissions)):
                self._num_rejected += len(submissions)
                raise QueueFull(
                    f"{self._num_staying} requests are live, which fills slots and queue; try again later"
                )

            numbers = [next(self._numbers) for _ in submissions]
            self._live.update(zip(numbers, submissions, strict=True))
        requests = tuple(
            RemoteRequest(
                number=number,
                request_id=each.request_id,
                group_id=each.group_id,
                params=own_params,
                seed=each.seed,
            )
            for number, each, own_params in zip(numbers, submissions, params, strict=True)
        )
        self.send(SubmitRequests(prompt=submissions[0].prompt, requests=requests))
        return [partial(self._cancel, number) for number in numbers]

    def cancel(self, request_id: str) -> bool:
        """Cancel the live requests of this id; whether there are such. From any thread."""
        with self._lock:
            found = [
                number
                for number, each in self._live.items()
                if request_id in (each.request_id, each.group_id)
            ]
        for number in found:
            self._cancel(number)
        return bool(found)

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number in self._live:
                self._leaving.add(number)
        self.send(CancelRequest(number))

    def send(self, command: Command) -> None:
        """Send a command after those before; from any thread. Without effect when the host is lost."""
        with self._lock:
            self._outbox.append(command)
        self._loop.post(self._send_soon)

    def has_room(self, num_requests: int = 1) -> bool:
        """Return True if so many more requests would be admitted, as far as is known here."""
        return self._limit is None or self._num_staying + num_requests <= self._limit

    @property
    def is_open(self) -> bool:
        """True if the host admits requests, as far as is known here."""
        return self._is_host_open and not self._is_closing

    @property
    def _num_staying(self) -> int:
        return len(self._live) - len(self._leaving)

    @property
    def metrics(self) -> EngineMetrics:
        """The newest metrics of the host, with the requests that were rejected here."""
        stats = self._metrics.stats
        return replace(
            self._metrics, stats=replace(stats, num_rejected=stats.num_rejected + self._num_rejected)
        )

    def close(self) -> None:
        """Reject new requests. Live ones that are cut off from now on raise EngineClosed; from any thread."""
        self._is_closing = True

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the host once. HostLost or HostUnavailable if it cannot be reached."""
        if self.failure is not None:
            raise self.failure

        return await self._channel.call(method, *arguments)

    async def follow(self) -> None:
        """Fetch batches and hand out their news until the engine is closed or the host is lost."""
        number = 0
        try:
            while True:
                batch = await self._next_batch(number)
                number = batch.number
                await self._hand_out(batch)
                if batch.is_last:
                    break
        except HostLost as failure:
            self.failure = failure
            if not self._is_closing:
                log.error("the host of an engine is lost: %s", failure)
        except Exception as error:  # a batch that cannot be unpickled, say
            self.failure = HostLost(repr(error))
            log.exception("the news of an engine's host cannot be read")
        finally:
            self._is_host_open = False
            self._end_all()
            self.ended.set()

    async def _next_batch(self, number: int) -> Batch:
        """The batch after that of this number. HostLost if the host does not answer."""
        try:
            async with asyncio.timeout(SILENCE_S):
                batch: Batch = await self._repeat("updates", number)
                return batch
        except TimeoutError:
            raise HostLost(f"it has not answered for {SILENCE_S:g} s") from None

    async def _repeat(self, method: str, *arguments: object) -> Any:
        """Call a method of the host that may be repeated. HostLost if the host cannot be reached."""
        deadline = time.monotonic() + RETRY_S
        while True:
            try:
                return await self._channel.call(method, *arguments)
            except HostUnavailable as error:
                if time.monotonic() > deadline:
                    raise HostLost(f"not reached for {RETRY_S:g} s: {error}") from error

                await asyncio.sleep(RETRY_PAUSE_S)

    def rejection(self) -> EngineClosed | ExecutorError:
        """The error for a request when the host is not open."""
        if self.failure is not None and not self._is_closing:
            error = ExecutorError(f"the engine's host is lost: {self.failure}")
            error.__cause__ = self.failure
            return error

        return EngineClosed("the engine was closed")

    def _check_open(self) -> None:
        if not self.is_open:
            raise self.rejection()

    def _send_soon(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """Send commands, one list at a time, until there are none. Of a lost host, `follow` ends the
        requests."""
        try:
            while self._outbox:
                with self._lock:
                    commands, self._outbox = self._outbox, []
                await self._send_list(commands)
        except HostLost:
            return
        finally:
            self._is_sending = False

    async def _send_list(self, commands: Sequence[Command]) -> None:
        """Send commands. If they cannot be sent together, because one cannot be pickled, say, each is sent by
        itself, and the requests of those that cannot be sent end."""
        self._num_lists += 1
        try:
            await self._repeat("send", self._num_lists, commands)
        except HostLost:
            raise
        except Exception as error:
            if len(commands) == 1:
                self._fail(commands[0], error)
            else:
                for command in commands:
                    await self._send_list([command])

    def _fail(self, command: Command, error: Exception) -> None:
        if isinstance(command, SubmitRequests):
            cause = unsendable(error)
            self._post([News(number=request.number, error=cause) for request in command.requests])

    async def _hand_out(self, batch: Batch) -> None:
        """Post the news of a batch to the streams' loops, and wait a moment until they have come."""
        self._is_host_open &= batch.is_open
        if batch.metrics is not None:
            self._metrics = batch.metrics
        taken = self._post(batch.news)
        try:
            async with asyncio.timeout(LOOP_LAG_S):
                for each in taken:
                    await each.wait()
        except TimeoutError:
            pass

    def _post(self, news: Sequence[News]) -> list[asyncio.Event]:
        """Post news to the streams' loops. Returns an event for each loop, which is set when they are
        delivered. The requests of loops that have ended are cancelled."""
        own_loop = asyncio.get_running_loop()
        by_loop: dict[object, tuple[LoopPoster, list[tuple[UpdateReceiver, News]]]] = {}
        for each in news:
            with self._lock:
                is_last = each.completion is not None or each.error is not None
                submission = self._end(each) if is_last else self._live.get(each.number)
            if submission is not None:
                receiver = submission.stream_updates
                poster = receiver.loop_poster
                found = with_own_schema(each, submission.params)
                by_loop.setdefault(poster.loop, (poster, []))[1].append((receiver, found))

        taken: list[asyncio.Event] = []
        for poster, updates in by_loop.values():
            event = asyncio.Event()
            try:
                poster.post(deliver, updates, partial(own_loop.call_soon_threadsafe, event.set))
            except LoopClosed:
                for receiver, each in updates:
                    self._desert(receiver, each.number)
            else:
                taken.append(event)
        return taken

    def _desert(self, receiver: UpdateReceiver, number: int) -> None:
        with self._lock:
            if self._forget(number) is not None:
                self._num_ended["cancelled"] += 1
        receiver.desert()
        self.send(CancelRequest(number))

    def _end(self, news: News) -> Submission | None:
        """Remove and count a request that has ended, unless it was removed before; the lock is held."""
        submission = self._forget(news.number)
        if submission is not None:
            if news.completion is not None:
                self._num_ended[news.completion.finish_reason] += 1
            elif news.num_prompt_tokens is not None:
                self._num_ended["error"] += 1
        return submission

    def _forget(self, number: int) -> Submission | None:
        """Remove a request that has ended; the lock is held."""
        self._leaving.discard(number)
        return self._live.pop(number, None)

    def _end_all(self) -> None:
        """End the requests that are left: the host is lost, or was closed without telling."""
        with self._lock:
            numbers = list(self._live)
        self._metrics = replace(self._metrics, stats=self._last_stats(len(numbers)))
        self._post([News(number=number, error=self.rejection()) for number in numbers])

    def _last_stats(self, num_lost: int) -> EngineStats:
        """The statistics of the host after its end, at which so many requests were lost. The newest ones that
        it sent may lack requests that ended since: those are counted here."""
        stats, ended = counts_of(self._metrics.stats), self._num_ended
        num_stopped = max(stats.num_stopped, ended["stop"])
        num_length_limited = max(stats.num_length_limited, ended["length"])
        num_cancelled = max(stats.num_cancelled, ended["cancelled"])
        num_failed = max(stats.num_failed, ended["error"]) + num_lost
        return replace(
            stats,
            num_submitted=num_stopped + num_length_limited + num_cancelled + num_failed,
            num_stopped=num_stopped,
            num_length_limited=num_length_limited,
            num_cancelled=num_cancelled,
            num_failed=num_failed,
        )


def sent_params(params: SamplingParams) -> SamplingParams:
    """Parameters for the host: with a JSON schema in place of a type, which the host may be unable to
    import."""
    grammar = params.grammar
    if not isinstance(grammar, JsonSchema) or isinstance(grammar.schema, str):
        return params

    return replace(params, grammar=JsonSchema(grammar.definition))


def with_own_schema(news: News, params: SamplingParams) -> News:
    """News of a request, with the type that its own parameters have in place of the JSON schema."""
    completion = news.completion
    if completion is None or completion.schema is None or not isinstance(params.grammar, JsonSchema):
        return news

    return replace(news, completion=replace(completion, schema=params.grammar))


def deliver(updates: Sequence[tuple[UpdateReceiver, News]], done: Callable[[], object]) -> None:
    """Deliver news; runs on the streams' loop."""
    for receiver, news in updates:
        if news.num_prompt_tokens is not None:
            receiver.num_prompt_tokens = news.num_prompt_tokens
        receiver.deliver(
            Update(stream_updates=receiver, chunk=news.chunk, completion=news.completion, error=news.error)
        )
    done()


def unsendable(cause: Exception) -> RequestError:
    """The error of a request that cannot be pickled."""
    allowed = f"a request that can be sent to the engine's host ({error_repr(cause)})"
    return RequestError(f"prompt: expected {allowed}", field="prompt", allowed=allowed)


CLOSE_S = 30.0
"""Most seconds, after those of draining, that closing waits for the engine in the other process. A process
that does not answer, because it is stopped or hangs, is then ended."""
FLUSH_S = 10.0
"""Most seconds that closing waits for the last news of a closed engine."""


class HostLink(Startable):
    """What a `Driver` is to an `Engine`, for an engine in another process: it starts the process and the
    engine there, follows its news, and ends it. `start` and `close` may be called from any thread; everything
    else happens on `loop`.

    open_channel: starts the process. If it is cancelled, it leaves none.
    model:        the engine's, for messages.
    max_queued:   of the engine's config.

    channel:    None until the process has been started.
    host:       what is known of the engine; None until it is open, as are connection and model_text.
    connection: carries the requests.
    """

    def __init__(
        self,
        open_channel: Callable[[], Awaitable[Channel]],
        loop: LoopThread,
        model: str,
        max_queued: int | None,
    ) -> None:
        super().__init__()
        self.loop = loop
        self.channel: Channel | None = None
        self.host: Opened | None = None
        self.connection: Connection | None = None
        self.model_text: ModelText | None = None
        self._open_channel = open_channel
        self._model = model
        self._max_queued = max_queued
        self._is_closing = False
        self._scope: anyio.CancelScope | None = None  # of opening, then of serving
        self._close_error: Exception | None = None
        self._has_ended = threading.Event()
        self._at_exit = AtExit(self)

    def start(self) -> None:
        close_at_exit(self._at_exit)
        self.loop.spawn(self._run)

    def close(self, drain_s: float) -> None:
        if not self.is_from_parent:
            self._reject_requests()
            self.loop.spawn(self._close_host, drain_s)

    def end(self) -> None:
        """End the other process, whatever it does, and the requests that it has. Returns at once; from any
        thread."""
        if not self.is_from_parent:
            self._reject_requests()
            self.loop.post(self._cancel)

    def join(self, timeout_s: float | None = None) -> None:
        self._has_ended.wait(timeout_s)

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted, as far as is known here."""
        connection = self.connection
        if self.is_from_parent or self._is_closing or connection is None:
            return False

        return connection.is_open

    def add_starter(self) -> bool:
        """As of every `Startable`. An engine that has failed is ended, so that another one can be started."""
        if self.connection is not None and not self.connection.is_open and not self._is_closing:
            self.end()
        return super().add_starter()

    def _reject_requests(self) -> None:
        self._is_closing = True
        if self.connection is not None:
            self.connection.close()

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _run(self) -> None:
        """Start the other process, follow its news, and end it."""
        try:
            await self._open()
            assert self.connection is not None
            with anyio.CancelScope() as self._scope:
                await self.connection.follow()
        except Exception as error:
            self._is_closing = True  # before the tasks that start it go on
            self.opened.set(error)
        finally:
            self._is_closing = True
            try:
                if self.channel is not None:
                    await self.channel.kill()
            finally:
                self._has_ended.set()
                self.closed.set(self._close_error)

    async def _open(self) -> None:
        """Start the other process and the engine there. ModelLoadError or ConfigError if that fails,
        EngineClosed if the link is closed meanwhile."""
        with anyio.CancelScope() as self._scope:
            if not self._is_closing:
                self.channel = await self._open_channel()
                try:
                    self.host = await self.channel.call("start")
                except (HostLost, HostUnavailable) as error:
                    raise ModelLoadError(
                        f"{self._model}: the process ended while it started: {error}"
                    ) from error
        host = self.host
        if self._is_closing or self.channel is None or host is None:
            raise EngineClosed("the engine was closed while it was starting")

        self.model_text = ModelText(
            tokenizer=host.tokenizer,
            chat_template=None,  # conversations are rendered by the host
            eos_token_ids=host.eos_token_ids,
            max_model_len=host.kind.max_model_len,
            vocab_size=host.vocab_size,
            default_params=host.kind.default_params,
            has_drafts=host.has_drafts,
        )
        limit = None if self._max_queued is None else host.num_slots + self._max_queued
        self.connection = Connection(self.channel, host.metrics, self.loop, limit)
        self.opened.set()

    async def _close_host(self, drain_s: float) -> None:
        """Close the engine there, and then end the other process. What is being opened is given up."""
        connection = self.connection
        if connection is None or self.channel is None:
            self._cancel()
            return

        connection.close()  # it may have been opened since the link was closed
        try:
            with anyio.move_on_after(drain_s + CLOSE_S):
                await self.channel.call("aclose", drain_s)
                with anyio.move_on_after(FLUSH_S):
                    await connection.ended.wait()
        except (HostLost, HostUnavailable):
            pass  # it is ended
        except Exception as error:
            self._close_error = error
        finally:
            self._cancel()


class AtExit:
    """Ends the other process of a link at the interpreter's exit, without closing the engine there."""

    def __init__(self, link: HostLink) -> None:
        self._link = link

    def close(self, drain_s: float) -> None:
        self._link.end()

    def join(self, timeout_s: float | None = None) -> None:
        self._link.join(timeout_s)
