"""The engine's thread: schedule, launch, collect, commit, deliver, round after round."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from drift_sdk.bridge import Bridge, Latch
from drift_sdk.commands import Cancel, Close, Command, Continue, Pause, Resume, Sleep, Submit, Wake
from drift_sdk.errors import DriftError, EngineClosed
from drift_sdk.feed import Outbox, Update
from drift_sdk.inbox import Inbox
from drift_sdk.intake import Intake, failure_of
from drift_sdk.opened_model import OpenedModel
from drift_sdk.recorder import Recorder
from drift_sdk.request import ModelText, Request
from drift_sdk.results import Chunk
from drift_sdk.scheduling.delta import Delta
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import Executor
from drift_sdk.text_work import TextWork

__all__ = ["Driver"]

LAUNCH_DEPTH = 2
"""Steps in flight: one runs while the next is planned and queued behind it."""

log = logging.getLogger("drift_sdk")


class Driver:
    """Owns the engine's thread, and on it the executor and the scheduler.

    `submit`, `tell`, `close` and `recorder.read` may be used from any thread. `opened` is set when the
    model is ready (or with what went wrong), `closed` when the thread has let go of everything.
    """

    def __init__(self, open_model: Callable[[], OpenedModel], max_queued_requests: int | None) -> None:
        self.opened = Latch()
        self.closed = Latch()
        self.model_text: ModelText | None = None
        self.executor_name: str | None = None
        self._open_model = open_model
        self._intake = Intake(max_queued_requests)
        self.recorder = Recorder(self._intake)
        self._inbox = Inbox()
        self._text_work = TextWork(self.tell)
        self._thread = threading.Thread(target=self._run, name="drift-engine", daemon=True)

        self._executor: Executor | None = None  # None while asleep
        self._active: dict[Sequence, Request] = {}
        self._outbox = Outbox()
        self._deadline: float | None = None
        self._is_paused = False
        self._when_quiet: list[Pause | Sleep] = []  # handled when no step is in flight

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Take a request in; QueueFull, EngineClosed or ExecutorError if that cannot be."""
        self._intake.admit(request, lambda: self.recorder.stats)
        assert self.model_text is not None
        self._text_work.prepare(request, self.model_text)

    @property
    def is_open(self) -> bool:
        return self._intake.is_open

    def tell(self, command: Command) -> None:
        """Have the engine's thread carry out a command; one that comes too late is answered here."""
        self._inbox.put(command)

    def close(self, drain_s: float) -> None:
        """Take no more requests; end once the live ones have, after `drain_s` seconds at the latest."""
        self._intake.close()
        self.tell(Close(time.monotonic() + drain_s))

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            started_at = time.monotonic()
            model = self._open_model()
            self.model_text, self.executor_name = model.text, model.executor_name
            self._scheduler = Scheduler(model.scheduling)
            self._executor = model.executor
            self.recorder.opened(model, time.monotonic() - started_at)
            self._publish_stats()
            self._intake.open()
            self.opened.set()
            self._serve()
        except BaseException as error:
            if self.opened.is_set:
                log.error("the engine failed: %r", error)
            failure = error
        finally:
            self._shut_down(failure)

    def _serve(self) -> None:
        is_busy = False
        while True:
            self._receive(is_idle=not is_busy)
            if self._is_over():
                return

            is_busy = self._turn()

    def _turn(self) -> bool:
        """One round; False if nothing is left to do but to wait for commands."""
        scheduler, executor = self._scheduler, self._executor
        if executor is None:
            self._act_when_quiet()
            return False

        may_launch = not self._is_paused and not self._when_quiet
        if may_launch and scheduler.num_in_flight < LAUNCH_DEPTH:
            plan = scheduler.schedule()
            if plan is not None:
                executor.launch(plan)
                if plan.assignments:
                    self._publish_stats()
                if scheduler.num_in_flight < LAUNCH_DEPTH:
                    return True

        if scheduler.num_in_flight:
            result = executor.collect()
            self.recorder.collected(result)
            for delta in scheduler.commit(result):
                self._extend(delta)
            self._publish_stats()
            self._post()
            return True

        if may_launch and scheduler.has_work and not scheduler.num_held:
            raise RuntimeError("requests wait, nothing is in flight and nothing can be scheduled")

        self._act_when_quiet()
        return False

    def _receive(self, *, is_idle: bool) -> None:
        """Handle every command that waits; when idle, wait for one."""
        command: Command | None
        if is_idle and not self._is_over():
            timeout_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            command = self._inbox.get(timeout_s)
        else:
            command = self._inbox.get_nowait()
        while command is not None:
            self._handle(command)
            command = self._inbox.get_nowait()

        if self._outbox.has_updates:  # requests have ended without a step
            self._publish_stats()
            self._post()

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request, error):
                self._enter(request, error)
            case Continue(request, error):
                if not request.is_done and request.sequence is not None:
                    request.sequence.is_held = False
                    if error is not None:
                        self._fail(request, error)
            case Cancel(request):
                if not request.is_done:
                    self._finish(request, request.end("cancelled"))
            case Close(deadline):
                self._deadline = min(deadline, self._deadline or deadline)
            case Pause(done):
                self._is_paused = True
                self._when_quiet.append(command)
            case Resume(done):
                self._is_paused = False
                done.set()
            case Sleep(done):
                self._when_quiet.append(command)
            case Wake(done):
                self._wake(done)

    def _enter(self, request: Request, error: DriftError | None) -> None:
        if error is None and not request.is_done:  # it may have been cancelled meanwhile
            assert request.sequence is not None
            self._active[request.sequence] = request
            self._scheduler.add(request.sequence)
            self.recorder.entered(request)
        self._intake.entered(self._publish_stats)
        if error is not None and not request.is_done:
            self._fail(request, error)

    def _act_when_quiet(self) -> None:
        commands, self._when_quiet = self._when_quiet, []
        for command in commands:
            if isinstance(command, Sleep) and self._executor is not None:
                started_at = time.monotonic()
                self._scheduler.forget_kv()
                self._executor.close()
                self._executor = None
                self._publish_stats()
                log.info("asleep in %.2f s: weights and KV cache are freed", time.monotonic() - started_at)
            command.done.set()

    def _wake(self, done: Latch) -> None:
        if self._executor is None:
            try:
                started_at = time.monotonic()
                self._executor = self._open_model().executor
                log.info("awake in %.2f s", time.monotonic() - started_at)
            except Exception as error:
                done.set(error)
                return

        done.set()

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False

        return self._intake.is_empty or time.monotonic() >= self._deadline

    def _extend(self, delta: Delta) -> None:
        request = self._active[delta.sequence]
        chunk = request.extend(delta.output)
        self.recorder.extended(request, delta, chunk)
        if request.is_done:
            self._finish(request, chunk)
            return

        if delta.sequence.constraint is not None:
            delta.sequence.is_held = True
            self._text_work.advance(request, delta.output.token_ids)
        self._outbox.put(Update(feed=request.feed, chunk=chunk))

    def _finish(self, request: Request, chunk: Chunk) -> None:
        self._drop(request)
        completion = request.completion()
        self.recorder.finished(request, completion)
        self._outbox.put(Update(feed=request.feed, chunk=chunk, completion=completion))

    def _fail(self, request: Request, error: DriftError) -> None:
        self._drop(request)
        self.recorder.failed(request, error)
        self._outbox.put(Update(feed=request.feed, error=error))

    def _drop(self, request: Request) -> None:
        """Off the books, and out of the scheduler where the device has not ended it already."""
        request.is_done = True
        self._intake.leave(request)
        if request.sequence is not None and self._active.pop(request.sequence, None) is not None:
            self._scheduler.remove(request.sequence)

    def _post(self) -> None:
        for bridge in self._outbox.post():
            self._forget(bridge)

    def _forget(self, bridge: Bridge) -> None:
        """A loop that has ended frees its requests."""
        for request in self._intake.live(bridge):
            self._drop(request)
            self.recorder.deserted(request)
        self._publish_stats()

    def _publish_stats(self) -> None:
        self.recorder.publish(self._scheduler)

    def _shut_down(self, failure: BaseException | None) -> None:
        self._intake.close(failure)
        self._text_work.close()
        for request in self._intake.live():
            cause = failure_of(failure) if failure is not None else EngineClosed("the engine was closed")
            request.is_done = True
            self._intake.leave(request)
            self.recorder.failed(request, cause)
            self._outbox.put(Update(feed=request.feed, error=cause))
        self._outbox.post()
        for command in self._when_quiet:
            self.tell(command)
        self._inbox.close()
        try:
            if self._executor is not None:
                self._executor.close()
        except Exception as error:
            log.error("closing the executor failed: %r", error)
        finally:
            self._executor = None
            self._active.clear()
            if self.executor_name is not None:
                self.recorder.closed()
            self.opened.set(failure)
            self.closed.set()
