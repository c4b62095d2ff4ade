"""The engine's thread: schedule, launch, collect, commit, deliver, round after round."""

from __future__ import annotations

import logging
import threading
import time
import traceback

from drift_sdk.driver.commands import (
    Cancel,
    Close,
    Command,
    Continue,
    Inbox,
    Pause,
    Resume,
    Sleep,
    Submit,
    Unpause,
    Wake,
)
from drift_sdk.driver.delivery import Delivery
from drift_sdk.driver.loaded_model import OpenModel
from drift_sdk.driver.loop_poster import Latch
from drift_sdk.driver.model_opener import ModelOpener
from drift_sdk.driver.process_hooks import close_at_exit, life_cycle_lock, num_forks
from drift_sdk.driver.request import ModelText, Request
from drift_sdk.driver.request_registry import RequestRegistry
from drift_sdk.driver.stats_recorder import StatsRecorder
from drift_sdk.driver.text_worker import TextWorker
from drift_sdk.errors import EngineClosed
from drift_sdk.progress import Report
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.steps import Executor

__all__ = ["Driver"]

LAUNCH_DEPTH = 2
"""Steps in flight: one runs while the next is planned and queued behind it."""

log = logging.getLogger("drift_sdk")


class Driver:
    """Owns the engine's thread, and on it the executor and the scheduler.

    `submit`, `tell`, `close` and `recorder.read` may be used from any thread. `opened` is set when the
    model is ready (or with what went wrong), `closed` when the thread has let go of everything.

    In a forked child the thread does not exist: `is_foreign` is true there, and the driver does nothing.
    """

    def __init__(self, open_model: OpenModel, report: Report, max_queued_requests: int | None) -> None:
        self.opened = Latch()
        self.closed = Latch()
        self.model_text: ModelText | None = None
        self.executor_name: str | None = None
        self._opener = ModelOpener(open_model, report, self._check_wanted)
        self._registry = RequestRegistry(max_queued_requests)
        self.recorder = StatsRecorder(self._registry)
        self._inbox = Inbox()
        self._text_worker = TextWorker(self.tell)
        self._thread = threading.Thread(target=self._run, name="drift-engine", daemon=True)
        self._num_forks = num_forks()
        self._num_starters = 0

        self._executor: Executor | None = None  # None while asleep
        self._delivery: Delivery | None = None  # None until the model is opened
        self._deadlines: list[float] = []  # of closing, one for each time it was asked for
        self._pauses: set[Pause] = set()
        self._when_quiet: list[Pause | Sleep] = []  # handled when no step is in flight

    def start(self) -> None:
        self._thread.start()
        close_at_exit(self)

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def join_in(self) -> bool:
        """One more task wants the engine open; False if it is closing."""
        with life_cycle_lock():
            self._num_starters += not self.is_closing
            return not self.is_closing

    def leave(self) -> bool:
        """A task that has joined in was cancelled; closes, and returns True, if it was the only one."""
        with life_cycle_lock():
            self._num_starters -= 1
            if self._num_starters:
                return False

            self.close(0.0)
            return True

    def submit(self, request: Request) -> None:
        """Take a request in; QueueFull, EngineClosed or ExecutorError if that cannot be."""
        self._registry.admit(request, lambda: self.recorder.stats)
        assert self.model_text is not None
        try:
            self._text_worker.prepare(request, self.model_text)
        except BaseException as error:
            self._registry.withdraw(request)
            if not isinstance(error, EngineClosed):
                raise
        else:
            return

        raise self._registry.refusal()  # it has closed since the request was admitted

    @property
    def has_room(self) -> bool:
        """False if a request would be turned away because the queue is full."""
        return not self.is_open or self._registry.has_room(self.recorder.stats)

    @property
    def is_open(self) -> bool:
        return not self.is_foreign and self._registry.is_open

    @property
    def is_closing(self) -> bool:
        return bool(self._deadlines)

    @property
    def is_foreign(self) -> bool:
        """Whether it was started in a process of which this one is a fork."""
        return self._num_forks != num_forks()

    @property
    def is_over(self) -> bool:
        return self.is_foreign or self.closed.is_set

    def tell(self, command: Command) -> None:
        """Have the engine's thread carry out a command; one that comes too late is answered here."""
        if not self.is_foreign:
            self._inbox.put(command)

    def close(self, drain_s: float) -> None:
        """Take no more requests; end once the live ones have, after `drain_s` seconds at the latest."""
        if self.is_foreign:
            return

        # Finalisers call this, whatever locks their thread may hold.
        self._deadlines.append(time.monotonic() + drain_s)
        self._registry.close()
        self.tell(Close())

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            started_at = time.monotonic()
            model = self._opener.open()
            self.model_text, self.executor_name = model.text, model.executor_name
            self._executor = model.executor
            self._scheduler = Scheduler(model.scheduling)
            self._delivery = Delivery(self._scheduler, self._registry, self.recorder, self._text_worker)
            self.recorder.opened(model, time.monotonic() - started_at)
            self._delivery.publish_stats()
            self._registry.open()
            self.opened.set()
            self._serve(self._delivery)
        except BaseException as error:
            if self.opened.is_set:
                log.error("the engine failed: %r", error)
            clear_frames(error)
            failure = error
        finally:
            self._shut_down(failure)

    def _check_wanted(self) -> None:
        """EngineClosed once nobody waits for the model being loaded: at the deadline of closing, before it if
        there are no requests to be drained."""
        if self._has_ended():
            raise EngineClosed("the engine was closed while its model was being loaded")

    def _serve(self, delivery: Delivery) -> None:
        is_busy = False
        while True:
            self._receive(delivery, is_idle=not is_busy)
            if self._has_ended():
                return

            is_busy = self._turn(delivery)

    def _turn(self, delivery: Delivery) -> bool:
        """One round; False if nothing is left to do but to wait for commands."""
        scheduler, executor = self._scheduler, self._executor
        if executor is None:
            self._act_when_quiet()
            return False

        may_launch = not self._pauses and not self._when_quiet
        if may_launch and scheduler.num_in_flight < LAUNCH_DEPTH:
            plan = scheduler.schedule()
            if plan is not None:
                executor.launch(plan)
                if plan.assignments:
                    delivery.publish_stats()
                if scheduler.num_in_flight < LAUNCH_DEPTH:
                    return True

        if scheduler.num_in_flight:
            result = executor.collect()
            self.recorder.collected(result)
            for delta in scheduler.commit(result):
                delivery.extend(delta)
            delivery.post()
            return True

        if may_launch and scheduler.has_work and not scheduler.num_held:
            raise RuntimeError("requests wait, nothing is in flight and nothing can be scheduled")

        self._act_when_quiet()
        return False

    def _receive(self, delivery: Delivery, *, is_idle: bool) -> None:
        """Handle every command that waits; when idle, wait for one."""
        command: Command | None
        if is_idle and not self._has_ended():
            is_closing = self.is_closing
            timeout_s = max(0.0, min(self._deadlines) - time.monotonic()) if is_closing else None
            command = self._inbox.get(timeout_s)
        else:
            command = self._inbox.get_nowait()
        while command is not None:
            self._handle(command, delivery)
            command = self._inbox.get_nowait()

        if delivery.has_updates:  # requests have ended without a step
            delivery.post()

    def _handle(self, command: Command, delivery: Delivery) -> None:
        match command:
            case Submit(request, error):
                delivery.enter(request, error)
            case Continue(request, error):
                delivery.release(request, error)
            case Cancel(request):
                delivery.cancel(request)
            case Close():
                pass  # the thread is awake
            case Pause():
                self._pauses.add(command)
                self._when_quiet.append(command)
            case Unpause(pause):
                self._pauses.discard(pause)
                self._when_quiet = [each for each in self._when_quiet if each is not pause]
            case Resume(done):
                self._pauses.clear()
                done.set()
            case Sleep():
                self._when_quiet.append(command)
            case Wake(done):
                done.set(self._wake())

    def _act_when_quiet(self) -> None:
        commands, self._when_quiet = self._when_quiet, []
        for command in commands:
            if isinstance(command, Sleep) and self._executor is not None:
                started_at = time.monotonic()
                self._scheduler.forget_kv()
                self._executor.close()
                self._executor = None
                self.recorder.publish(self._scheduler)
                log.info("asleep in %.2f s: weights and KV cache are freed", time.monotonic() - started_at)
            command.done.set()

    def _wake(self) -> Exception | None:
        """Open the model again, unless it is open; what went wrong."""
        if self._executor is None:
            started_at = time.monotonic()
            try:
                model = self._opener.open_again()
            except Exception as error:
                return error

            self._executor, self.model_text = model.executor, model.text
            log.info("awake in %.2f s", time.monotonic() - started_at)
        return None

    def _has_ended(self) -> bool:
        """Whether it is closing, and the requests have ended or the time for that has."""
        if not self._deadlines:
            return False

        return self._registry.is_empty or time.monotonic() >= min(self._deadlines)

    def _shut_down(self, failure: BaseException | None) -> None:
        self._deadlines.append(time.monotonic())  # from now on no task joins in
        self._registry.close(failure if not isinstance(failure, EngineClosed) else None)
        if self._delivery is not None:
            self._delivery.close(failure)
        self._text_worker.close()
        for command in self._when_quiet:
            self.tell(command)
        self._inbox.close()
        try:
            if self._executor is not None:
                self._executor.close()
        except BaseException as error:
            log.error("closing the executor failed: %r", error)
        finally:
            self._executor = None
            if self.executor_name is not None:
                self.recorder.closed()
            self.opened.set(failure)
            self.closed.set()


def clear_frames(error: BaseException | None) -> None:
    """Clear the variables of the frames that an error and its causes were raised through: who keeps the error
    shall not keep weights and caches."""
    cleared: list[BaseException] = []
    while error is not None and error not in cleared:
        cleared.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
