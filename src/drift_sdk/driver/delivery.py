"""From what steps bring to text in streams, and how requests end. Used on the engine's thread alone."""

from __future__ import annotations

from drift_sdk.driver.loop_poster import LoopPoster
from drift_sdk.driver.request import Request
from drift_sdk.driver.request_registry import RequestRegistry, failure_of
from drift_sdk.driver.stats_recorder import StatsRecorder
from drift_sdk.driver.stream_updates import Outbox, Update
from drift_sdk.driver.text_worker import TextWorker
from drift_sdk.errors import DriftError, EngineClosed
from drift_sdk.results import Chunk
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Delta, Sequence

__all__ = ["Delivery"]


class Delivery:
    """The requests that the scheduler knows, and updates for their streams until they are posted."""

    def __init__(
        self, scheduler: Scheduler, intake: RequestRegistry, recorder: StatsRecorder, text_work: TextWorker
    ) -> None:
        self._scheduler = scheduler
        self._registry = intake
        self._recorder = recorder
        self._text_worker = text_work
        self._active: dict[Sequence, Request] = {}
        self._outbox = Outbox()

    def enter(self, request: Request, error: DriftError | None) -> None:
        """A request is prepared, or could not be."""
        if error is None and not request.is_done:  # it may have been cancelled meanwhile
            assert request.sequence is not None
            self._active[request.sequence] = request
            self._scheduler.add(request.sequence)
            self._recorder.entered(request)
        self._registry.entered(self.publish_stats)
        if error is not None and not request.is_done:
            self._fail(request, error)

    def extend(self, delta: Delta) -> None:
        request = self._active[delta.sequence]
        chunk = request.extend(delta.output)
        self._recorder.extended(request, delta, chunk)
        if request.is_done:
            self._finish(request, chunk)
            return

        if delta.sequence.constraint is not None:
            delta.sequence.awaits_mask = True
            self._text_worker.advance(request, delta.output.token_ids)
        self._outbox.put(Update(feed=request.feed, chunk=chunk))

    def release(self, request: Request, error: DriftError | None) -> None:
        """What a constrained request may say next is worked out, or could not be."""
        if not request.is_done and request.sequence is not None:
            request.sequence.awaits_mask = False
            if error is not None:
                self._fail(request, error)

    def cancel(self, request: Request) -> None:
        if not request.is_done:
            self._finish(request, request.end("cancelled"))
            self._text_worker.abandon(request)

    def close(self, failure: BaseException | None) -> None:
        """End every request: it is told of the failure, or that the engine was closed."""
        for request in self._registry.live():
            cause = failure_of(failure) if failure is not None else EngineClosed("the engine was closed")
            request.is_done = True
            self._registry.leave(request)
            self._recorder.failed(request, cause)
            self._outbox.put(Update(feed=request.feed, error=cause))
        self._outbox.post()
        self._active.clear()

    @property
    def has_updates(self) -> bool:
        return self._outbox.has_updates

    def post(self) -> None:
        """Publish the newest stats and send all updates; a loop that has ended frees its requests."""
        self.publish_stats()
        for bridge in self._outbox.post():
            self._forget(bridge)

    def publish_stats(self) -> None:
        self._recorder.publish(self._scheduler)

    def _forget(self, bridge: LoopPoster) -> None:
        for request in self._registry.live(bridge):
            self._drop(request)
            self._text_worker.abandon(request)
            self._recorder.deserted(request)
        self.publish_stats()

    def _finish(self, request: Request, chunk: Chunk) -> None:
        self._drop(request)
        completion = request.completion()
        self._recorder.finished(request, completion)
        self._outbox.put(Update(feed=request.feed, chunk=chunk, completion=completion))

    def _fail(self, request: Request, error: DriftError) -> None:
        self._drop(request)
        self._recorder.failed(request, error)
        self._outbox.put(Update(feed=request.feed, error=error))

    def _drop(self, request: Request) -> None:
        """Off the books, and out of the scheduler where the device has not ended it already."""
        request.is_done = True
        self._registry.leave(request)
        if request.sequence is not None and self._active.pop(request.sequence, None) is not None:
            self._scheduler.remove(request.sequence)
