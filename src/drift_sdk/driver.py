"""The engine's thread: schedule, launch, collect, commit, deliver, round after round."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from drift_sdk.bridge import Bridge, Latch
from drift_sdk.errors import DriftError, EngineClosed, ExecutorError, QueueFull
from drift_sdk.feed import Outbox, Update
from drift_sdk.metrics import EngineStats
from drift_sdk.request import ModelText, Request
from drift_sdk.scheduling.scheduler import Delta, Scheduler, SchedulerConfig
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import Executor

__all__ = ["Driver", "OpenedModel"]

LAUNCH_DEPTH = 2
"""Steps in flight: one runs while the next is planned and queued behind it."""

log = logging.getLogger("drift_sdk")


class OpenedModel(Struct, frozen=True, kw_only=True):
    """A model ready to serve: how it runs, how it is scheduled, and its text."""

    executor: Executor
    scheduling: SchedulerConfig
    text: ModelText


class Submit(Struct, frozen=True):
    request: Request
    error: DriftError | None


class Cancel(Struct, frozen=True):
    request: Request


class Close(Struct, frozen=True):
    deadline: float


Command = Submit | Cancel | Close


class Driver:
    """Owns the engine's thread, and on it the executor and the scheduler.

    `submit`, `cancel`, `close` and `stats` may be called from any thread. `opened` is set when the model is
    ready (or with what went wrong), `closed` when the thread has let go of everything.
    """

    def __init__(self, open_model: Callable[[], OpenedModel], max_queued_requests: int | None) -> None:
        self.opened = Latch()
        self.closed = Latch()
        self.stats = EngineStats()
        self.model_text: ModelText | None = None
        self._open_model = open_model
        self._max_queued_requests = max_queued_requests
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # Prompts are tokenised here: neither the caller's loop nor the engine's thread stands still for it.
        self._text_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drift-text")
        self._thread = threading.Thread(target=self._run, name="drift-engine", daemon=True)
        self._lock = threading.Lock()  # guards the fields up to the blank line
        self._live: dict[Request, None] = {}
        self._num_entering = 0
        self._is_accepting = False
        self._failure: BaseException | None = None

        self._deadline: float | None = None
        self._active: dict[Sequence, Request] = {}
        self._outbox = Outbox()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Take a request in; QueueFull, EngineClosed or ExecutorError if that cannot be."""
        with self._lock:
            if self._failure is not None:
                raise failure_of(self._failure)

            if not self._is_accepting:
                raise EngineClosed("the engine is not open")

            stats, limit = self.stats, self._max_queued_requests
            num_waiting = self._num_entering + stats.num_queued - stats.num_free_slots
            if limit is not None and num_waiting >= limit:
                raise QueueFull(f"max_queued_requests={limit} requests are waiting already")

            self._num_entering += 1
            self._live[request] = None
            self._text_thread.submit(self._prepare, request)

    def cancel(self, request: Request) -> None:
        self._inbox.put(Cancel(request))

    def close(self, drain_s: float) -> None:
        """Take no more requests; end once the live ones have, after `drain_s` seconds at the latest."""
        with self._lock:
            self._is_accepting = False

        self._inbox.put(Close(time.monotonic() + drain_s))

    def _prepare(self, request: Request) -> None:
        assert self.model_text is not None
        error: DriftError | None = None
        try:
            request.prepare(self.model_text)
        except DriftError as exc:
            error = exc
        except Exception as exc:
            error = DriftError(f"request {request.request_id} could not be prepared: {exc!r}")
            error.__cause__ = exc

        self._inbox.put(Submit(request, error))

    def _run(self) -> None:
        executor: Executor | None = None
        try:
            model = self._open_model()
            executor = model.executor
            self.model_text = model.text
            self._scheduler = Scheduler(model.scheduling)
            self._executor = executor
            self._max_num_seqs = model.scheduling.max_num_seqs
            self._publish_stats()
            self._is_accepting = True
            self.opened.set()
            self._serve()
        except BaseException as error:
            if executor is not None:
                log.error("the engine failed: %r", error)
            self._failure = error
        finally:
            self._shut_down(executor)

    def _serve(self) -> None:
        scheduler, executor = self._scheduler, self._executor
        while True:
            self._receive(is_idle=not (scheduler.has_work or scheduler.num_in_flight))
            if self._is_over():
                return

            plan = scheduler.schedule() if scheduler.num_in_flight < LAUNCH_DEPTH else None
            if plan is not None:
                executor.launch(plan)
                self._publish_stats()
                if scheduler.num_in_flight < LAUNCH_DEPTH:
                    continue

            if scheduler.num_in_flight:
                result = executor.collect()
                for delta in scheduler.commit(result):
                    self._extend(delta)
                self._publish_stats(result.duration_s)
                self._post()
            elif scheduler.has_work and plan is None:
                raise RuntimeError("requests wait, nothing is in flight and nothing can be scheduled")

    def _receive(self, *, is_idle: bool) -> None:
        """Handle every command that waits; when idle, wait for one."""
        try:
            if is_idle and not self._is_over():
                timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                self._handle(self._inbox.get(timeout=timeout))
            while True:
                self._handle(self._inbox.get_nowait())
        except queue.Empty:
            pass

        self._post()

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request, error):
                with self._lock:
                    self._num_entering -= 1
                    if not request.is_done and error is None:
                        assert request.sequence is not None
                        self._active[request.sequence] = request
                        self._scheduler.add(request.sequence)
                    self._publish_stats()

                if not request.is_done and error is not None:
                    request.is_done = True
                    self._finish(request, Update(error=error))
            case Cancel(request):
                if not request.is_done:
                    chunk = request.end("cancelled")
                    self._finish(request, Update(chunk=chunk, completion=request.completion()))
            case Close(deadline):
                self._deadline = min(deadline, self._deadline or deadline)

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False

        return not self._live or time.monotonic() >= self._deadline

    def _extend(self, delta: Delta) -> None:
        request = self._active[delta.sequence]
        chunk = request.extend(delta.token_ids, delta.logprobs, delta.finish)
        if not request.is_done:
            self._outbox.put(request.feed, Update(chunk=chunk))
            return

        self._finish(request, Update(chunk=chunk, completion=request.completion()))

    def _finish(self, request: Request, update: Update) -> None:
        self._drop(request)
        self._outbox.put(request.feed, update)

    def _drop(self, request: Request) -> None:
        """Off the books, and out of the scheduler where the device has not ended it already."""
        with self._lock:
            self._live.pop(request, None)
        if request.sequence is not None and self._active.pop(request.sequence, None) is not None:
            self._scheduler.remove(request.sequence)

    def _post(self) -> None:
        for bridge in self._outbox.post():
            self._forget(bridge)

    def _forget(self, bridge: Bridge) -> None:
        """A loop that has ended frees its requests."""
        with self._lock:
            orphans = [request for request in self._live if request.feed.bridge == bridge]
        for request in orphans:
            request.is_done = True
            self._drop(request)

    def _publish_stats(self, step_s: float | None = None) -> None:
        scheduler, last = self._scheduler, self.stats
        self.stats = EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_queued=scheduler.num_queued,
            num_free_slots=self._max_num_seqs - scheduler.num_running,
            num_free_blocks=scheduler.num_free_blocks,
            num_cached_blocks=scheduler.num_cached_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_steps=last.num_steps + (step_s is not None),
            step_seconds=last.step_seconds + (step_s or 0.0),
        )

    def _shut_down(self, executor: Executor | None) -> None:
        with self._lock:
            self._is_accepting = False
        self._text_thread.shutdown(wait=True, cancel_futures=True)
        failure = self._failure
        for request in list(self._live):
            if not request.is_done:
                request.is_done = True
                cause = failure_of(failure) if failure is not None else EngineClosed("the engine was closed")
                self._outbox.put(request.feed, Update(error=cause))
        self._live.clear()
        self._active.clear()
        self._post()
        try:
            if executor is not None:
                executor.close()
        except Exception as error:
            log.error("closing the executor failed: %r", error)
        finally:
            self.opened.set(failure)
            self.closed.set()


def failure_of(cause: BaseException) -> ExecutorError:
    """A fresh error for one stream."""
    is_unusable = isinstance(cause, ExecutorError) and cause.process_unusable
    error = ExecutorError(f"the engine failed: {cause!r}", process_unusable=is_unusable)
    error.__cause__ = cause
    return error
