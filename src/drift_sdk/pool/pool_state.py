"""The state of a pool: its replicas, their statistics, and the requests that they serve.

A request (`Route`) goes to one replica and, after a failure, to another: each time an `Attempt`. `Delivered`
is what its stream has been given, so that a replay gives it the rest.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import fields, replace

from drift_sdk.base_engine import BaseEngine
from drift_sdk.driver.loops import Latch, LoopPoster, num_forks
from drift_sdk.driver.stream_updates import Update
from drift_sdk.errors import DriftError, EngineClosed, ExecutorError, QueueFull, ReplicaFailed, RequestError
from drift_sdk.pool.routing import Load, PromptBlocks, Router, Routing
from drift_sdk.results import Chunk, Completion, TokenLogprobs, ToolCall
from drift_sdk.serving import Submission
from drift_sdk.stats import EngineMetrics, EngineStats, Histogram, Histograms


class ReplayDiverged(Exception):
    """A replay has other tokens than the stream has been given."""


class Delivered:
    """Tokens, text and tool calls that a stream has been given by all attempts at its request.

    A further attempt begins with `begin_again`; `rest_of` takes the chunks of an attempt in order and returns
    what is new in them. Chunks of two attempts may be cut differently.
    """

    __slots__ = (
        "_calls_seen",
        "_chars_seen",
        "_is_replayed",
        "_logprobs",
        "_num_chars",
        "_reasoning",
        "_text",
        "_tokens_seen",
        "_tool_calls",
        "token_ids",
    )

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tool_calls: list[ToolCall] = []
        self._num_chars = [0, 0]  # of text and of reasoning
        self._is_replayed = False
        # Of the current attempt, until it has caught up:
        self._tokens_seen = self._calls_seen = 0
        self._chars_seen = [0, 0]

    @property
    def has_any(self) -> bool:
        """Whether the stream has been given anything."""
        return bool(self.token_ids or self._text)

    def begin_again(self) -> None:
        """An attempt begins that repeats everything."""
        self._is_replayed = self.has_any
        self._tokens_seen = self._calls_seen = 0
        self._chars_seen = [0, 0]

    def rest_of(self, chunk: Chunk) -> Chunk | None:
        """The part of a chunk that the stream does not have; None if it has all of it. Raises ReplayDiverged
        if the chunk has other tokens than the stream."""
        if self._is_replayed:
            rest = self._without_known(chunk)
            if rest is None:
                return None

            chunk = rest
        self.token_ids.extend(chunk.token_ids)
        self._text.append(chunk.text)
        self._reasoning.append(chunk.reasoning)
        self._num_chars[0] += len(chunk.text)
        self._num_chars[1] += len(chunk.reasoning)
        self._logprobs.extend(chunk.logprobs or ())
        self._tool_calls.extend(chunk.tool_calls)
        return chunk

    def completed(self, completion: Completion) -> Completion:
        """The completion of the last attempt, with the stream's tool calls: a replay draws other ids. One
        that was cancelled may have fewer tokens. Its raw text is its own if text was split: chunks have no
        markers. Raises ReplayDiverged for other tokens."""
        if not self._is_replayed:
            return completion

        completion = replace(completion, tool_calls=tuple(self._tool_calls))
        token_ids = tuple(self.token_ids)
        if token_ids == completion.token_ids:
            return completion

        num_replayed = len(completion.token_ids)
        if completion.finish_reason != "cancelled" or token_ids[:num_replayed] != completion.token_ids:
            raise ReplayDiverged

        text, reasoning = "".join(self._text), "".join(self._reasoning)
        is_split = reasoning or self._tool_calls or completion.raw_text != completion.text
        return replace(
            completion,
            text=text,
            raw_text=completion.raw_text if is_split else text,
            reasoning=reasoning,
            token_ids=token_ids,
            logprobs=tuple(self._logprobs) if completion.logprobs is not None else None,
            usage=replace(completion.usage, completion_tokens=len(token_ids)),
        )

    def _without_known(self, chunk: Chunk) -> Chunk | None:
        """The part of a replayed chunk that is new."""
        num_known = max(0, min(len(self.token_ids) - self._tokens_seen, len(chunk.token_ids)))
        known = self.token_ids[self._tokens_seen : self._tokens_seen + num_known]
        if tuple(known) != chunk.token_ids[:num_known]:
            raise ReplayDiverged

        num_calls = max(0, min(len(self._tool_calls) - self._calls_seen, len(chunk.tool_calls)))
        rest = replace(
            chunk,
            token_ids=chunk.token_ids[num_known:],
            text=self._new_chars(0, chunk.text),
            reasoning=self._new_chars(1, chunk.reasoning),
            logprobs=chunk.logprobs[num_known:] if chunk.logprobs is not None else None,
            tool_calls=chunk.tool_calls[num_calls:],
        )
        self._tokens_seen += len(chunk.token_ids)
        self._calls_seen += len(chunk.tool_calls)
        is_new = rest.token_ids or rest.text or rest.reasoning or rest.tool_calls or rest.finish_reason
        return rest if is_new else None

    def _new_chars(self, kind: int, text: str) -> str:
        num_known = max(0, self._num_chars[kind] - self._chars_seen[kind])
        self._chars_seen[kind] += len(text)
        return text[num_known:]


class Route:
    """A request of a pool. `attempt` is what runs now; updates of earlier ones are dropped.

    num_attempts: replicas that it was given to, one after the other.
    """

    def __init__(self, submission: Submission, blocks: PromptBlocks, traffic: Traffic) -> None:
        self.submission = submission
        self.blocks = blocks
        self.traffic = traffic
        self.delivered: Delivered = Delivered()
        self.attempt: Attempt | None = None
        self.num_attempts: int = 0
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """End the request; from any thread."""
        self._is_cancelled = True
        attempt = self.attempt
        if attempt is not None:
            attempt.cancel()

    def follow(self, attempt: Attempt, cancel: Callable[[], None]) -> None:
        """Count the updates of this attempt from now on. cancel: ends it."""
        attempt.cancel = cancel
        self.num_attempts += 1
        self.delivered.begin_again()
        self.attempt = attempt
        if self._is_cancelled:  # meanwhile, by another thread
            cancel()


class Attempt:
    """A request at one replica: it receives the replica's updates and forwards them to the stream.

    index:      of the replica.
    num_tokens: of the prompt, estimated, and of the completion so far.
    """

    __slots__ = ("_is_over", "cancel", "index", "num_tokens", "route")

    def __init__(self, route: Route, index: int) -> None:
        self.route: Route = route
        self.index: int = index
        self.num_tokens: int = route.blocks.num_tokens
        self.cancel: Callable[[], None] = do_nothing
        self._is_over = False

    @property
    def loop_poster(self) -> LoopPoster:
        return self.route.submission.stream_updates.loop_poster

    @property
    def awaits_acceptance(self) -> bool:
        return self.route.submission.stream_updates.awaits_acceptance

    @property
    def num_prompt_tokens(self) -> int | None:
        return self.route.submission.stream_updates.num_prompt_tokens

    @num_prompt_tokens.setter
    def num_prompt_tokens(self, value: int | None) -> None:
        self.route.submission.stream_updates.num_prompt_tokens = value

    def deliver(self, update: Update) -> None:
        """Forward an update, or have the request go on elsewhere. Runs on the stream's event loop."""
        route = self.route
        if self._is_over or route.attempt is not self:
            return

        chunk, completion, error = update.chunk, update.completion, update.error
        if chunk is not None and chunk.token_ids:
            self.num_tokens += len(chunk.token_ids)
            route.traffic.grown(self, len(chunk.token_ids))
        if completion is not None or error is not None:
            self.leave()
        try:
            if chunk is not None:
                chunk = route.delivered.rest_of(chunk)
            if completion is not None:
                completion = route.delivered.completed(completion)
        except ReplayDiverged:
            self.cancel()
            self.leave()
            chunk, completion, error = None, None, diverged(route)
        receiver = route.submission.stream_updates
        if isinstance(error, DriftError) and update.error is not None:
            error = route.traffic.recover(self, error)
            if error is None:  # the last chunk of a remote engine may come with its error
                if chunk is not None:
                    receiver.deliver(Update(stream_updates=receiver, chunk=chunk))
                return

        if completion is not None or error is not None:
            route.traffic.finished(route)
        is_wake_up = update.chunk is None and completion is None and error is None
        if chunk is not None or completion is not None or error is not None or is_wake_up:
            receiver.deliver(Update(stream_updates=receiver, chunk=chunk, completion=completion, error=error))

    def desert(self) -> None:
        self.leave()
        self.route.traffic.finished(self.route)

    def leave(self) -> None:
        """The replica has ended the request, or is of no interest any more."""
        if not self._is_over:
            self._is_over = True
            self.route.traffic.left(self)


def do_nothing() -> None:
    """Cancels an attempt that has not been submitted yet."""


def is_loss(error: DriftError) -> bool:
    """True if an error of a request means that its replica has failed or was closed. It may have been started
    again meanwhile."""
    return isinstance(error, EngineClosed) or (isinstance(error, ExecutorError) and error.ends_engine)


def diverged(route: Route) -> ExecutorError:
    """The error of a stream whose replay has other tokens."""
    return ExecutorError(
        f"request {route.submission.request_id} was replayed after a failure, and the replica has generated "
        f"other tokens than the {len(route.delivered.token_ids)} that its stream has",
        ends_engine=False,
    )


class ReplicaStats(Struct, frozen=True, kw_only=True):
    """A snapshot of a replica of a pool.

    index:         its place in the pool.
    device:        of its config.
    state:         "open"; "drained" (it gets no new requests); "closed" (it was closed or has failed).
    num_requests:  live requests of the pool that it has.
    num_tokens:    tokens of their prompts and completions, as the router counts them: estimated for
                   texts.
    num_routed:    requests that it was given.
    num_by_prefix: of them, requests whose beginning it had got before.
    num_moved:     unstarted requests that went from it to another replica.
    num_replayed:  started requests that were run again on another replica.
    num_lost:      requests that it ended by failing.
    engine:        its own statistics; None if it is not open.
    """

    index: int
    device: str
    state: Literal["open", "drained", "closed"]
    num_requests: int
    num_tokens: int
    num_routed: int
    num_by_prefix: int
    num_moved: int
    num_replayed: int
    num_lost: int
    engine: EngineStats | None


def summed_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Sums of all counters and of the current state. `mean_active`, `min_active` and `max_active` are sums
    too: of replicas whose steps overlap. `is_paused` and `is_asleep` hold if they hold for all.
    `weights_version` is the lowest, `start_seconds` come from the replica that took longest, and
    `kv_dtype` is given if all have the same."""
    found: dict[str, Any] = {}
    for field in fields(EngineStats):
        values = [getattr(stats, field.name) for stats in each]
        match field.name:
            case "accepted_at":
                found[field.name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
            case "violations":
                found[field.name] = summed_pairs(values)
            case "start_seconds":
                found[field.name] = max(values, key=lambda stages: sum(s for _, s in stages), default=())
            case "is_paused" | "is_asleep":
                found[field.name] = bool(values) and all(values)
            case "weights_version":
                found[field.name] = min(values, default=0)
            case "kv_dtype":
                found[field.name] = values[0] if len(set(values)) == 1 else ""
            case _:
                found[field.name] = sum(values)
    return EngineStats(**found)


def summed_pairs(each: Iterable[Iterable[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    total: Counter[str] = Counter()
    for pairs in each:
        total.update(dict(pairs))
    return tuple(total.items())


def summed_histograms(each: Iterable[Histograms]) -> Histograms:
    """New histograms with the counts of all."""
    total = Histograms()
    for histograms in each:
        for name in Histograms.__slots__:
            add(getattr(total, name), getattr(histograms, name))
    return total


def add(total: Histogram, other: Histogram) -> None:
    total.counts = [a + b for a, b in zip(total.counts, other.counts, strict=True)]
    total.total += other.total


class Replica:
    """An engine of a pool. Used from any thread.

    num_moved, num_replayed, num_lost: as of `ReplicaStats`.
    """

    def __init__(self, index: int, engine: BaseEngine, load: Load) -> None:
        self.index = index
        self.engine = engine
        self._has_drained = False
        self._drains: list[object] = []  # calls of `drain` that wait
        self.is_restarting: bool = False
        self.num_moved = self.num_replayed = self.num_lost = 0
        self._load = load
        self._lock = threading.RLock()
        self._idle: list[Latch] = []

    @property
    def is_in_service(self) -> bool:
        """Whether it gets new requests."""
        return not self.is_drained and self.engine.is_open

    @property
    def is_drained(self) -> bool:
        """Whether `drain` keeps the replica out of service."""
        return self._has_drained or bool(self._drains)

    def restore(self) -> None:
        """Take it back into service, also if calls of `drain` wait."""
        with self._lock:
            self._has_drained = False
            self._drains.clear()

    def became_idle(self) -> None:
        """Its last request has ended."""
        with self._lock:
            latches, self._idle = self._idle, []
        for latch in latches:
            latch.set()

    async def drain(self) -> None:
        """Take it out of service and wait until it has no requests. If the task is cancelled, it is back in
        service, unless another task has drained it or waits for that."""
        drain, idle = object(), Latch()
        with self._lock:
            self._drains.append(drain)
            self._idle.append(idle)
        if not self._load.num_requests:
            self.became_idle()
        has_drained = False
        try:
            await idle.wait()
            has_drained = True
        finally:
            with self._lock:
                if drain in self._drains:  # else it was restored
                    self._drains.remove(drain)
                    self._has_drained |= has_drained

    async def restart(self, check: Callable[[], None]) -> None:
        """Close the engine and start it again. DriftError if that is being done already.

        check: called between the two; raises an error if the engine is to stay closed."""
        with self._lock:
            if self.is_restarting:
                raise DriftError(f"replica {self.index} is being restarted already")

            self.is_restarting = True
        try:
            await self.engine.aclose()
            check()
            await self.engine.start()
        finally:
            self.is_restarting = False

    def engine_metrics(self) -> EngineMetrics | None:
        """The engine's statistics and histograms; None if it is not open and has not failed."""
        try:
            return self.engine.metrics()
        except EngineClosed:
            return None

    def engine_stats(self) -> EngineStats | None:
        """The engine's statistics; None if it is not open and has not failed."""
        try:
            return self.engine.stats()
        except EngineClosed:
            return None

    def stats(self) -> ReplicaStats:
        is_open = self.engine.is_open
        return ReplicaStats(
            index=self.index,
            device=self.engine.config.device,
            state="closed" if not is_open else "drained" if self.is_drained else "open",
            num_requests=self._load.num_requests,
            num_tokens=self._load.num_tokens,
            num_routed=self._load.num_routed,
            num_by_prefix=self._load.num_by_prefix,
            num_moved=self.num_moved,
            num_replayed=self.num_replayed,
            num_lost=self.num_lost,
            engine=self.engine_stats(),
        )


MAX_ATTEMPTS = 3
"""Most replicas that a request is given to, so that one that makes replicas fail does not end all of them."""

log: logging.Logger = logging.getLogger("drift_sdk")


class Traffic:
    """Submits requests to replicas. Used from any thread.

    replays:      whether started requests are run again.
    is_closing:   set while the pool ends its requests.
    num_rejected: requests that were rejected with QueueFull: no replica took them.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, *, replays: bool) -> None:
        self._replicas = replicas
        self._router = router
        self._replays = replays
        self.is_closing = False
        self.num_rejected: int = 0
        self._lock = threading.RLock()
        self._live: dict[str, list[Route]] = {}  # by request_id and by group_id

    def submit(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        """Submit requests of one prompt to the best replica that takes them, all or none."""
        blocks = PromptBlocks.of(submissions[0].prompt, submissions[0].params.cache_salt)
        routes = [Route(submission, blocks, self) for submission in submissions]
        self._add(routes)
        try:
            self._place(routes)
        except BaseException as error:
            for route in routes:
                self.finished(route)
            if isinstance(error, QueueFull):
                with self._lock:
                    self.num_rejected += len(routes)
            raise

        return [route.cancel for route in routes]

    def cancel(self, request_id: str) -> bool:
        """Cancel the live requests of this id; whether there are such."""
        with self._lock:
            routes = list(self._live.get(request_id, ()))
        for route in routes:
            route.cancel()
        return bool(routes)

    def grown(self, attempt: Attempt, num_tokens: int) -> None:
        """A request has got `num_tokens` more."""
        self._router.grow(attempt.index, num_tokens)

    def left(self, attempt: Attempt) -> None:
        """A request has left a replica. Called once for each attempt, from any thread."""
        if self._router.end(attempt.index, attempt.num_tokens):
            self._replicas[attempt.index].became_idle()

    def recover(self, attempt: Attempt, error: DriftError) -> DriftError | None:
        """Have a request that a replica has ended with this error go on elsewhere. Returns the error for its
        stream if that is not possible, or if the error is the request's own."""
        replica, route = self._replicas[attempt.index], attempt.route
        is_refused = isinstance(error, QueueFull)  # by a replica that refuses late
        if self.is_closing or not (is_refused or is_loss(error)):
            return error

        is_started = route.delivered.has_any
        if not is_refused:
            replica.num_lost += 1
            log.debug("%s has lost replica %d: %r", route.submission.request_id, replica.index, error)
        if not any(each.is_in_service for each in self._replicas):
            return error

        if route.is_cancelled or (is_started and not self._replays) or route.num_attempts >= MAX_ATTEMPTS:
            return error if is_refused else replica_failed(attempt, error)

        try:
            self._place([route], avoided=attempt.index)
        except DriftError as refusal:
            refusal.__cause__ = error
            return refusal

        replica.num_replayed += is_started
        replica.num_moved += not is_started
        return None

    def _place(self, routes: Sequence[Route], avoided: int | None = None) -> None:
        """Give routes of one prompt to a replica. avoided: the last one to be tried. Raises the error of the
        replicas if none takes them."""
        found: DriftError = EngineClosed("all replicas of the pool are drained")
        blocks = routes[0].blocks
        indices = [replica.index for replica in self._replicas if replica.is_in_service]
        if not indices:  # an engine that is not open says why
            indices = [replica.index for replica in self._replicas if not replica.is_drained][:1]
        for index in sorted(self._router.order(blocks, indices), key=lambda index: index == avoided):
            try:
                self._give(routes, index)
                return
            except (QueueFull, EngineClosed, ExecutorError) as error:
                found = error if not isinstance(found, QueueFull) else found

        raise found

    def _give(self, routes: Sequence[Route], index: int) -> None:
        """Submit routes to a replica. They count before that, so that its idleness is noticed afterwards."""
        attempts = [Attempt(route, index) for route in routes]
        for route in routes:
            self._router.begin(index, route.blocks)
        submissions = [
            replace(attempt.route.submission, stream_updates=attempt, group_id=group_of(routes, attempt))
            for attempt in attempts
        ]
        try:
            if self._replicas[index].is_drained:  # since it was chosen: `drain` has not waited for these
                raise EngineClosed(f"replica {index} is drained")

            cancels = self._replicas[index].engine._enter(submissions)
        except BaseException:
            for attempt in attempts:
                if self._router.end(index, attempt.num_tokens):
                    self._replicas[index].became_idle()
            raise

        for route, attempt, cancel in zip(routes, attempts, cancels, strict=True):
            self._router.remember(index, route.blocks)
            route.follow(attempt, cancel)

    def _add(self, routes: Sequence[Route]) -> None:
        """Make routes live, all or none: RequestError if a live request has one of their ids."""
        with self._lock:
            taken = next((name for route in routes for name in names_of(route) if name in self._live), None)
            if taken is not None:
                raise RequestError.of("request_id", taken, "an id that no live request has")

            for route in routes:
                for name in names_of(route):
                    self._live.setdefault(name, []).append(route)

    def finished(self, route: Route) -> None:
        """A request has ended for its stream. From any thread; may be called again."""
        with self._lock:
            for name in names_of(route):
                found = self._live.get(name, [])
                if route in found:
                    found.remove(route)
                if not found:
                    self._live.pop(name, None)


def names_of(route: Route) -> tuple[str, ...]:
    """The ids that a request can be found by."""
    submission = route.submission
    group_id = submission.group_id
    return (submission.request_id,) if group_id is None else (submission.request_id, group_id)


def group_of(routes: Sequence[Route], attempt: Attempt) -> str | None:
    """The name of samples that a replica gets together; one that moves alone is no group there."""
    return attempt.route.submission.group_id if len(routes) > 1 else None


def replica_failed(attempt: Attempt, cause: DriftError) -> ReplicaFailed:
    route = attempt.route
    num_tokens = len(route.delivered.token_ids)
    times = f", the last of {route.num_attempts} that failed," if route.num_attempts > 1 else ""
    error = ReplicaFailed(
        f"replica {attempt.index}{times} has failed after {num_tokens} tokens of this request: {cause}",
        replica=attempt.index,
        num_tokens=num_tokens,
    )
    error.__cause__ = cause
    return error


class PoolPause:
    """A pause of the replicas of a pool, also of those that are started while it lasts."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], None]] = []
        self._has_ended = False

    async def add(self, engine: BaseEngine) -> None:
        """Pause a replica, unless the pause ends before that is done."""
        undo = await engine._pause()
        if self._has_ended:
            undo()
        else:
            self._undos.append(undo)

    def end(self) -> None:
        """Pause no further replica. Those that are paused resume by `resume`."""
        self._has_ended = True

    def undo(self) -> None:
        """Take the pauses of all replicas back."""
        self.end()
        for undo in self._undos:
            undo()


class PoolState:
    """The state of a pool in one process. A forked child begins with a new one: the requests are those of its
    parent, whose threads may hold the locks.

    num_closing:  calls of `aclose` in progress.
    num_closed:   calls of `aclose` that have begun.
    num_starting: calls of `start` in progress.
    pauses:       those that have not ended.
    is_asleep:    whether the replicas are to sleep.
    """

    def __init__(self, engines: Sequence[BaseEngine], routing: Routing) -> None:
        self._num_forks = num_forks()
        self.num_closing = self.num_closed = self.num_starting = 0
        self.is_started = False
        self.is_asleep: bool = False
        self.router: Router = Router(len(engines), routing.affinity)
        self.replicas: list[Replica] = [
            Replica(index, engine, load)
            for index, (engine, load) in enumerate(zip(engines, self.router.loads, strict=True))
        ]
        self.traffic: Traffic = Traffic(self.replicas, self.router, replays=routing.replay)
        self.pauses: list[PoolPause] = []

    async def apply_to(self, engine: BaseEngine) -> None:
        """Pause a replica that has been started, and have it sleep, as the others do."""
        for pause in list(self.pauses):
            await pause.add(engine)
        if self.is_asleep:
            await engine.sleep()

    def end_pauses(self) -> None:
        """End all pauses."""
        pauses, self.pauses = self.pauses, []
        for pause in pauses:
            pause.end()

    def begin_again(self) -> None:
        """All replicas are closed: forget pauses, sleep, drains and prefixes."""
        self.pauses.clear()
        self.is_asleep = False
        for replica in self.replicas:
            replica.restore()
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """The caches of all replicas are empty."""
        for replica in self.replicas:
            self.router.forget(replica.index)

    @property
    def is_from_parent(self) -> bool:
        """True in a forked child, if the parent made this state."""
        return self._num_forks != num_forks()
