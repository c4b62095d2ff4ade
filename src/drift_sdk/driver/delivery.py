"""Delivery: step results to text in streams, and the end of requests. Used on the engine's thread only."""

from __future__ import annotations

import copy
from collections.abc import Callable

from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.requests import Request, RequestRegistry, failure_of
from drift_sdk.driver.stats_recorder import StatsRecorder
from drift_sdk.driver.stream_updates import PendingUpdates, Update
from drift_sdk.driver.text_worker import TextWorker
from drift_sdk.errors import DriftError, EngineClosed, ExecutorError, RequestError
from drift_sdk.results import Chunk
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Delta, Sequence
from drift_sdk.steps import VIOLATIONS


class Delivery:
    """The requests that the scheduler knows, and the updates of their streams until they are posted.

    Of several samples of one prompt, the first is scheduled, and the others, its followers, are held until
    the prompt's KV is in the prefix cache: until the first token. If the first ends before that, the next
    takes its place.

    prepare: has a request prepared that was held.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: RequestRegistry,
        stats_recorder: StatsRecorder,
        text_worker: TextWorker,
        prepare: Callable[[Request], None],
    ) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._stats_recorder = stats_recorder
        self._text_worker = text_worker
        self._prepare = prepare
        self._requests: dict[Sequence, Request] = {}  # those that the scheduler knows
        self._updates = PendingUpdates()

    def enter(self, request: Request, error: DriftError | None) -> None:
        """Hand a prepared request to the scheduler, or end it with the error that preparing it has raised. A
        request that has been cancelled meanwhile is dropped."""
        if error is None and not request.is_done:
            assert request.sequence is not None
            self._requests[request.sequence] = request
            self._scheduler.add(request.sequence)
            self._stats_recorder.entered(request)
            self._accept(request)
        self.publish_stats()
        if error is not None and not request.is_done:
            followers, request.followers = request.followers, ()
            self._fail(request, error)
            for follower in followers:  # their prompt is the same
                if not follower.is_done:
                    self._fail(follower, copy_of(error))

    def extend(self, delta: Delta) -> None:
        """Turn a sequence's new tokens into text, and end its request if they end it."""
        request = self._requests[delta.sequence]
        violation = delta.output.violation
        if violation is not None and violation.is_fatal:
            meaning = f"{VIOLATIONS[violation.reason]} ({violation.details})"
            message = f"a check of speculation has failed: {meaning}"
            self._fail(request, ExecutorError(message, ends_engine=False))
            return

        if request.followers:
            self._prepare_followers(request)
        try:
            if delta.output.error is not None:
                raise delta.output.error

            chunk = request.extend(delta.output, delta.verification)
        except RequestError as error:  # of a function of the request
            self._fail(request, error)
            return

        self._stats_recorder.extended(request, delta, chunk)
        if request.is_done:
            self._finish(request, chunk)
            return

        if delta.sequence.constraint is not None:
            delta.sequence.awaits_mask = True
            self._text_worker.advance(request, delta.output.token_ids)
        self._updates.add(Update(stream_updates=request.stream_updates, chunk=chunk))

    def mask_computed(self, request: Request, error: DriftError | None) -> None:
        """Let a constrained request be scheduled again now that its next mask is computed, or end it with the
        error of computing it."""
        if not request.is_done and request.sequence is not None:
            request.sequence.awaits_mask = False
            if error is not None:
                self._fail(request, error)

    def cancel(self, request: Request) -> None:
        """End a request with finish reason "cancelled", unless it has ended already."""
        if not request.is_done:
            self._finish(request, request.end("cancelled"))
            self._text_worker.abandon(request)

    def close(self, failure: BaseException | None) -> None:
        """End every request, with an ExecutorError that names the failure or with EngineClosed if there is
        none."""
        for request in self._registry.live_requests():
            cause = failure_of(failure) if failure is not None else EngineClosed("the engine was closed")
            request.is_done = True
            self._registry.remove(request)
            self._stats_recorder.failed(request, cause)
            self._updates.add(Update(stream_updates=request.stream_updates, error=cause))
        self.publish_stats()
        self._stats_recorder.ended()
        self._updates.post()
        self._requests.clear()

    @property
    def has_updates(self) -> bool:
        return self._updates.has_any

    def post(self) -> None:
        """Publish the newest statistics and send all updates. The requests of an event loop that has ended
        are dropped."""
        self.publish_stats()
        for loop_poster in self._updates.post():
            self._drop_requests_of(loop_poster)

    def publish_stats(self) -> None:
        self._stats_recorder.publish(self._scheduler)

    def _drop_requests_of(self, loop_poster: LoopPoster) -> None:
        for request in self._registry.live_requests(loop_poster):
            self._remove(request)
            self._text_worker.abandon(request)
            self._stats_recorder.deserted(request)
            request.stream_updates.desert()
        self.publish_stats()

    def _accept(self, request: Request) -> None:
        """Mark a request as accepted that the scheduler has queued, and its followers with it."""
        sequence = request.sequence
        assert sequence is not None
        for accepted in (request, *request.followers):
            updates = accepted.stream_updates
            if accepted.is_done or updates.num_prompt_tokens is not None:
                continue

            updates.num_prompt_tokens = sequence.num_prompt_tokens
            if updates.awaits_acceptance:
                self._updates.add(Update(stream_updates=updates))
        # The last token of a prompt is always computed, so a prompt of one block shares nothing.
        if sequence.num_prompt_tokens <= self._scheduler.config.block_size:
            self._prepare_followers(request)

    def _prepare_followers(self, request: Request) -> None:
        followers, request.followers = request.followers, ()
        for follower in followers:
            if not follower.is_done:
                self._prepare_held(follower)

    def _prepare_held(self, request: Request) -> None:
        """Queue a held request for preparation."""
        try:
            self._prepare(request)
        except DriftError as error:
            self._fail(request, error)

    def _finish(self, request: Request, chunk: Chunk) -> None:
        self._remove(request)
        completion = request.completion()
        self._stats_recorder.finished(request, completion)
        self._updates.add(Update(stream_updates=request.stream_updates, chunk=chunk, completion=completion))

    def _fail(self, request: Request, error: DriftError) -> None:
        self._remove(request)
        self._stats_recorder.failed(request, error)
        self._updates.add(Update(stream_updates=request.stream_updates, error=error))

    def _remove(self, request: Request) -> None:
        """Remove a request from the registry, and from the scheduler if the device has not ended it
        already."""
        request.is_done = True
        self._registry.remove(request)
        if request.sequence is not None and self._requests.pop(request.sequence, None) is not None:
            self._scheduler.remove(request.sequence)
        followers = [follower for follower in request.followers if not follower.is_done]
        request.followers = ()
        if followers:
            next_one = followers[0]
            next_one.followers = tuple(followers[1:])
            self._prepare_held(next_one)


def copy_of(error: DriftError) -> DriftError:
    """An equal error, for another stream: each raises its own."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied
