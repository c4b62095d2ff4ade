"""Routing as a state machine: requests come, get tokens, end and are cancelled, while replicas fail, are
drained and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drift_sdk import (
    Chunk,
    Completion,
    DriftError,
    EngineClosed,
    EngineConfig,
    ExecutorError,
    QueueFull,
    ReplicaFailed,
    SamplingParams,
)
from drift_sdk.driver.prompts import TokenPrompt
from drift_sdk.driver.stream_updates import Update
from drift_sdk.pool.pool_state import MAX_ATTEMPTS, Attempt, Replica, Traffic
from drift_sdk.pool.routing import Router
from drift_sdk.results import Timing, Usage
from drift_sdk.serving import Submission

NUM_REPLICAS, NUM_SLOTS = 3, 4
TIMING = Timing(queued_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_s=0.0)


class FakeEngine:
    """An engine whose requests get the tokens 0, 1, 2 and so on, when the test says so."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.is_open = True
        self.live: dict[Attempt, int] = {}  # attempts and how many tokens they have

    def _enter(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        if not self.is_open:
            raise EngineClosed("closed")

        if len(self.live) + len(submissions) > NUM_SLOTS:
            raise QueueFull("full")

        for submission in submissions:
            assert isinstance(submission.stream_updates, Attempt)
            self.live[submission.stream_updates] = 0
        return [lambda each=each.stream_updates: self.finish(each, "cancelled") for each in submissions]

    def emit(self, attempt: Attempt, number: int) -> None:
        first = self.live[attempt]
        self.live[attempt] += number
        attempt.deliver(Update(stream_updates=attempt, chunk=chunk_of(first, number)))

    def finish(self, attempt: Attempt, reason: str) -> None:
        number = self.live.pop(attempt, None)
        if number is not None:
            completion = Completion(
                request_id=attempt.route.submission.request_id,
                text="x" * number,
                token_ids=tuple(range(number)),
                finish_reason=reason,
                stop_reason=None,
                usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=number),
                timing=TIMING,
                seed=0,
            )
            chunk = Chunk(text="", token_ids=(), finish_reason=reason)
            attempt.deliver(Update(stream_updates=attempt, chunk=chunk, completion=completion))

    def fail(self, error: type[DriftError], number: int, is_open: bool) -> None:
        """Fail. The error of each request comes with so many tokens, as those of remote engines may.

        is_open: whether it is open again when the errors come.
        """
        self.is_open = is_open
        lost, self.live = self.live, {}
        for attempt, first in lost.items():
            chunk = chunk_of(first, number) if number else None
            attempt.deliver(Update(stream_updates=attempt, chunk=chunk, error=error("failed")))


def chunk_of(first: int, number: int) -> Chunk:
    return Chunk(text="x" * number, token_ids=tuple(range(first, first + number)))


class Stream:
    """The end of a request: what its caller got."""

    def __init__(self) -> None:
        self.loop_poster = SimpleNamespace(loop=None)
        self.is_accepted = self.awaits_acceptance = False
        self.token_ids: list[int] = []
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.cancel: Callable[[], None] = lambda: None

    @property
    def is_done(self) -> bool:
        return self.completion is not None or self.error is not None

    def deliver(self, update: Update) -> None:
        assert not self.is_done
        if update.chunk is not None:
            self.token_ids += update.chunk.token_ids
        self.completion, self.error = update.completion, update.error


class Routing(RuleBasedStateMachine):
    replays = True

    def __init__(self) -> None:
        super().__init__()
        self.engines = [FakeEngine() for _ in range(NUM_REPLICAS)]
        self.router = Router(NUM_REPLICAS, 2.0)
        self.replicas = [
            Replica(index, engine, load)  # type: ignore[arg-type]
            for index, (engine, load) in enumerate(zip(self.engines, self.router.loads, strict=True))
        ]
        self.traffic = Traffic(self.replicas, self.router, replays=self.replays)
        self.streams: list[Stream] = []
        self.num_submitted = 0

    @property
    def attempts(self) -> list[tuple[FakeEngine, Attempt]]:
        return [(engine, attempt) for engine in self.engines for attempt in engine.live]

    @rule(prompt=st.integers(0, 2), number=st.integers(1, 3))
    def submit(self, prompt: int, number: int) -> None:
        streams = [Stream() for _ in range(number)]
        self.num_submitted += 1
        name = f"r{self.num_submitted}"
        submissions = [
            Submission(
                request_id=f"{name}-{index}",
                group_id=name if number > 1 else None,
                prompt=TokenPrompt((prompt,) * 100),
                params=SamplingParams(),
                seed=0,
                stream_updates=stream,
            )
            for index, stream in enumerate(streams)
        ]
        could = any(
            replica.is_in_service and len(engine.live) + number <= NUM_SLOTS
            for replica, engine in zip(self.replicas, self.engines, strict=True)
        )
        try:
            cancels = self.traffic.submit(submissions)
        except (QueueFull, EngineClosed):
            assert not could
        else:
            assert could
            for stream, cancel in zip(streams, cancels, strict=True):
                stream.cancel = cancel
            self.streams += streams

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), number=st.integers(1, 5))
    def emit(self, data: st.DataObject, number: int) -> None:
        engine, attempt = data.draw(st.sampled_from(self.attempts))
        engine.emit(attempt, number)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        engine, attempt = data.draw(st.sampled_from(self.attempts))
        engine.live[attempt] = max(engine.live[attempt], len(attempt.route.delivered.token_ids))
        missing = engine.live[attempt] - attempt.route.delivered._tokens_seen
        if missing and attempt.route.delivered._is_replayed:  # what it has not been given yet of a replay
            engine.live[attempt] -= missing
            engine.emit(attempt, missing)
        engine.finish(attempt, "length")

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.streams)).cancel()

    @rule(
        index=st.integers(0, NUM_REPLICAS - 1),
        error=st.sampled_from([ExecutorError, EngineClosed]),
        number=st.integers(0, 2),
        is_open=st.booleans(),
    )
    def fail(self, index: int, error: type[DriftError], number: int, is_open: bool) -> None:
        had_ended = [stream for stream in self.streams if stream.is_done]
        self.engines[index].fail(error, number, is_open)
        if self.replicas[index].is_in_service:  # one that takes over
            ended = [stream for stream in self.streams if stream.is_done and stream not in had_ended]
            assert not any(type(stream.error) is ExecutorError for stream in ended)

    @rule(index=st.integers(0, NUM_REPLICAS - 1))
    def reopen(self, index: int) -> None:
        self.engines[index].is_open = True
        self.router.forget(index)

    @rule(index=st.integers(0, NUM_REPLICAS - 1), is_drained=st.booleans())
    def drain_or_restore(self, index: int, is_drained: bool) -> None:
        self.replicas[index]._has_drained = is_drained

    @rule()
    def desert(self) -> None:
        """The event loop of one request ends."""
        for engine, attempt in self.attempts[:1]:
            engine.live.pop(attempt)
            attempt.desert()
            stream = attempt.route.submission.stream_updates
            assert isinstance(stream, Stream)
            self.streams.remove(stream)

    @invariant()
    def tokens_are_delivered_once_and_in_order(self) -> None:
        for stream in self.streams:
            assert stream.token_ids == list(range(len(stream.token_ids)))
            if stream.completion is not None:
                assert stream.completion.token_ids == tuple(stream.token_ids)

    @invariant()
    def every_request_is_at_one_open_replica_or_has_ended(self) -> None:
        running = [attempt.route.submission.stream_updates for _, attempt in self.attempts]
        assert len(set(map(id, running))) == len(running)
        assert {id(each) for each in running} == {id(stream) for stream in self.streams if not stream.is_done}

    @invariant()
    def loads_are_those_of_live_requests(self) -> None:
        for load, engine in zip(self.router.loads, self.engines, strict=True):
            assert load.num_requests == len(engine.live)
            assert load.num_tokens == sum(100 + number for number in engine.live.values())
        names = {route.submission.request_id for routes in self.traffic._live.values() for route in routes}
        assert names == {attempt.route.submission.request_id for _, attempt in self.attempts}

    @invariant()
    def no_request_was_given_to_more_replicas_than_allowed(self) -> None:
        assert all(attempt.route.num_attempts <= MAX_ATTEMPTS for _, attempt in self.attempts)

    @invariant()
    def errors_name_the_loss(self) -> None:
        for error in [stream.error for stream in self.streams if stream.error is not None]:
            assert isinstance(error, ReplicaFailed | QueueFull | EngineClosed | ExecutorError)


class RoutingWithoutReplay(Routing):
    replays = False

    @invariant()
    def started_requests_are_given_to_one_replica(self) -> None:
        assert not any(attempt.route.delivered._is_replayed for _, attempt in self.attempts)
        for stream in self.streams:
            if isinstance(stream.error, ReplicaFailed):
                assert stream.error.num_tokens == len(stream.token_ids)


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRouting = Routing.TestCase
TestRouting.settings = SETTINGS
TestRoutingWithoutReplay = RoutingWithoutReplay.TestCase
TestRoutingWithoutReplay.settings = SETTINGS
