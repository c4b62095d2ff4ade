"""The engine's thread: it schedules, launches, collects, commits and delivers, round after round.

`Delivery` turns results of steps into text in streams.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Struct

from drift_sdk.driver.callbacks import EventSender
from drift_sdk.driver.life_cycle import LoadedModel, ModelOpener, OpenModel, Startable, clear_frames
from drift_sdk.driver.loops import Latch, LoopPoster, close_at_exit
from drift_sdk.driver.prompts import ModelText, Prompt
from drift_sdk.driver.requests import Request, RequestRegistry, failure_of
from drift_sdk.driver.stats_recorder import StatsRecorder
from drift_sdk.driver.step_timers import MaskTimer, PlanTimer
from drift_sdk.driver.stream_updates import PendingUpdates, Update
from drift_sdk.driver.text_worker import MasksComputed, NewTokens, Prepared, TextWorker
from drift_sdk.errors import DriftError, EngineClosed, ExecutorError, RequestError, error_repr
from drift_sdk.events import Event, Report
from drift_sdk.results import Chunk
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Delta, Sequence
from drift_sdk.steps import VIOLATIONS, Executor, TakesWeights


class Driver(Startable):
    """Owns the engine's thread and, on that thread, the executor and the scheduler.

    `submit`, `send`, `close` and `stats_recorder.read` may be called from any thread. `closed` is set by the
    thread, which does not exist in a forked child.
    """

    def __init__(
        self,
        open_model: OpenModel,
        report: Report,
        max_queued_requests: int | None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        super().__init__()
        self.model_text: ModelText | None = None
        self.executor_name: str | None = None
        self._opener = ModelOpener(open_model, report, self._check_is_wanted)
        self._events = EventSender(on_event)
        self._registry = RequestRegistry(max_queued_requests, self._events)
        self.stats_recorder: StatsRecorder = StatsRecorder(self._registry, self._events)
        self._commands = CommandQueue()
        self._text_worker = TextWorker(self.send)
        self._thread = threading.Thread(target=self._run, name="drift-engine", daemon=True)
        self._executor: Executor | None = None  # None while asleep
        self._delivery: Delivery | None = None  # None until the model is opened
        self._timer = PlanTimer()
        self._mask_timer = MaskTimer()
        self._deadlines: list[float] = []  # one for each call of `close`; the earliest counts
        self._pauses: set[Pause] = set()
        self._deferred: list[Deferred] = []  # carried out when no step is in flight

    def start(self) -> None:
        """Start the engine's thread, which opens the model first. Called once."""
        self._events.open()
        try:
            self._thread.start()
        except BaseException:
            self._events.close()
            raise

        close_at_exit(self)

    def join(self, timeout_s: float | None = None) -> None:
        """Block until the thread has ended, `timeout_s` seconds at most (None = no limit)."""
        self._thread.join(timeout_s)

    def submit(self, requests: Items[Request]) -> None:
        """Admit requests of one prompt, all or none, and have the first prepared; the others follow when its
        prompt is in the prefix cache. QueueFull, EngineClosed, ExecutorError or RequestError if they are
        rejected."""
        first, *others = requests
        first.followers = tuple(others)
        self._registry.admit(requests)
        try:
            self._prepare(first)
        except BaseException as error:
            self._registry.withdraw(requests)
            if not isinstance(error, EngineClosed):
                raise
        else:
            return

        raise self._registry.rejection()  # the engine has closed since the request was admitted

    def _prepare(self, request: Request) -> None:
        assert self.model_text is not None
        self._text_worker.prepare(request, self.model_text)

    def cancel(self, request_id: str) -> bool:
        """End the live requests of this id with finish reason "cancelled". Returns False if there is none."""
        requests = self._registry.find(request_id)
        for request in requests:
            self.cancel_request(request)
        return bool(requests)

    def cancel_request(self, request: Request) -> None:
        """End a request with finish reason "cancelled", unless it has ended. Its place in the queue is free
        at once."""
        if not self.is_from_parent:
            self._registry.leave(request)
            self._commands.put(Cancel(request))

    async def count_tokens(self, prompt: Prompt) -> int:
        """The number of tokens of a prompt, counted on a text thread."""
        if not self.is_open:
            raise self._registry.rejection()

        assert self.model_text is not None
        return await self._text_worker.count_tokens(prompt, self.model_text)

    @property
    def has_room(self) -> bool:
        """False if a request would be rejected because the queue is full."""
        return not self.is_open or self._registry.has_room()

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted."""
        return not self.is_from_parent and self._registry.is_open

    @property
    def is_closing(self) -> bool:
        return bool(self._deadlines)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs on the engine's thread, as functions of requests do."""
        return threading.current_thread() is self._thread

    def send(self, command: Command) -> None:
        """Queue a command for the engine's thread. If that has ended, the command's latch, if it has one, is
        set with EngineClosed, or with ExecutorError if the engine has failed."""
        if not self.is_from_parent:
            self._commands.put(command)

    def close(self, drain_s: float) -> None:
        """Reject new requests, and end the thread once the live ones have ended, after `drain_s` seconds at
        the latest. Returns at once. May be called again; the earliest deadline counts."""
        if self.is_from_parent:
            return

        # Finalisers call this, whatever locks their thread may hold.
        self._deadlines.append(time.monotonic() + drain_s)
        self._registry.close()
        self.send(Close())

    def _run(self) -> None:
        """The thread's function: open the model, serve, shut down."""
        failure: BaseException | None = None
        try:
            self._serve(self._open())
        except BaseException as error:
            failure = error
            if self.opened.is_set:
                log_error("the engine failed", error)
            clear_frames(error)
            if not isinstance(error, EngineClosed):
                self._events.engine_failed(error)
        finally:
            self._shut_down(failure)

    def _open(self) -> Delivery:
        """Open the model and admit requests."""
        started_at = time.monotonic()
        model = self._opener.open()
        self.model_text, self.executor_name = model.text, model.executor_name
        self._executor = model.executor
        self._scheduler = Scheduler(model.scheduling, self._events if self._events.is_on else None)
        delivery = Delivery(
            self._scheduler, self._registry, self.stats_recorder, self._text_worker, self._prepare
        )
        self._delivery = delivery
        self.stats_recorder.opened(model, time.monotonic() - started_at)
        delivery.publish_stats()
        self._registry.open(model.scheduling.max_num_seqs)
        self.opened.set()
        return delivery

    def _check_is_wanted(self) -> None:
        """Raise EngineClosed while the model is loaded if loading has become pointless: the deadline of
        closing has passed, or the driver is closing and there are no requests to drain."""
        if self._has_ended():
            raise EngineClosed("the engine was closed while its model was being loaded")

    def _serve(self, delivery: Delivery) -> None:
        is_busy = False
        while True:
            self._handle_commands(delivery, is_idle=not is_busy)
            if self._executor is not None:
                self._wait_to_plan(self._executor, delivery)
            if self._has_ended():
                return

            is_busy = self._advance(delivery)

    def _wait_to_plan(self, executor: Executor, delivery: Delivery) -> None:
        """Handle commands until the next step has to be planned, so that requests among them are in it."""
        while self._may_launch and not self._has_ended() and not executor.is_done:
            wait_s = self._timer.wait_s(time.monotonic())
            if wait_s <= 0.0:
                return

            if delivery.has_updates:  # nothing has to be launched first
                delivery.post()
            command = self._commands.get(min(wait_s, POLL_S))
            if command is not None:
                self._handle(command, delivery)

    def _advance(self, delivery: Delivery) -> bool:
        """Launch one step and collect one, where there are such. Returns False if there is nothing to do
        until a command comes."""
        if self._executor is None:
            return self._carry_out_deferred()

        has_launched = self._launch_step(self._executor, delivery)
        if has_launched and self._scheduler.num_in_flight < LAUNCH_DEPTH:
            return True

        # Event loops that wake up want the interpreter's lock. This thread needs it least while it waits for
        # the device.
        if delivery.has_updates:
            delivery.post()
        if self._scheduler.num_in_flight:
            self._collect_step(self._executor, delivery)
            return True

        if self._may_launch and self._scheduler.has_work and not self._scheduler.num_awaiting_masks:
            raise RuntimeError("requests wait, nothing is in flight and nothing can be scheduled")

        return self._carry_out_deferred()

    @property
    def _may_launch(self) -> bool:
        return not self._pauses and not self._deferred

    def _launch_step(self, executor: Executor, delivery: Delivery) -> bool:
        """Plan a step and launch it. Returns False if no step may be launched or there is nothing to plan."""
        if not self._may_launch or self._scheduler.num_in_flight >= LAUNCH_DEPTH:
            return False

        now = time.monotonic()
        if self._mask_timer.holds(self._scheduler.count_rows(now, self._mask_timer.most_mask_s), now):
            return False

        plan = self._scheduler.schedule()
        if plan is None:
            return False

        executor.launch(plan)
        self._timer.launched(plan, time.monotonic())
        if plan.assignments:
            delivery.publish_stats()
        return True

    def _collect_step(self, executor: Executor, delivery: Delivery) -> None:
        """Block until the oldest step in flight is done, and turn its tokens into updates, which are posted
        when the next step has been launched."""
        result = executor.collect()
        self._timer.collected(result, time.monotonic())
        self._mask_timer.collected(result)
        self.stats_recorder.collected(result)
        for delta in self._scheduler.commit(result):
            delivery.extend(delta)
        delivery.compute_masks()

    def _handle_commands(self, delivery: Delivery, *, is_idle: bool) -> None:
        """Handle every queued command; when idle, block until there is one or the deadline has passed."""
        command: Command | None
        if is_idle and delivery.has_updates:  # requests have ended without a step
            delivery.post()
        if is_idle and not self._has_ended():
            times = [*self._deadlines, *self._mask_timer.take_deadline()]
            command = self._commands.get(max(0.0, min(times) - time.monotonic()) if times else None)
        else:
            command = self._commands.get_nowait()
        while command is not None:
            self._handle(command, delivery)
            command = self._commands.get_nowait()

    def _handle(self, command: Command, delivery: Delivery) -> None:
        match command:
            case Prepared(request, error):
                delivery.enter(request, error)
            case MasksComputed(outcomes, computed_at):
                for request, error in outcomes:
                    delivery.mask_computed(request, error, computed_at)
            case Cancel(request):
                delivery.cancel(request)
            case Close():
                pass  # it was sent to wake the thread
            case Pause():
                self._pauses.add(command)
                self._deferred.append(command)
            case Unpause(pause):
                self._pauses.discard(pause)
                self._deferred = [each for each in self._deferred if each is not pause]
                self._note_state()
            case Resume(done):
                self._pauses.clear()
                self._note_state()
                done.set()
            case Sleep() | Wake() | UpdateWeights():
                self._deferred.append(command)

    def _carry_out_deferred(self) -> bool:
        """Carry out the commands that waited until no step is in flight, in their order. Returns False if
        there are none; else a pause that a command behind it took back may have held up steps."""
        commands, self._deferred = self._deferred, []
        for number, command in enumerate(commands):
            try:
                if isinstance(command, Sleep):
                    self._fall_asleep()
                error = self._wake() if isinstance(command, Wake) else None
                if isinstance(command, UpdateWeights):
                    error = self._update_weights(command.tensors)
                self._note_state()
            except BaseException:
                self._deferred = commands[number:]  # `_shut_down` ends them
                raise

            command.done.set(error)
        return bool(commands)

    def _note_state(self) -> None:
        """Publish whether steps may run. A pause that steps in flight hold up does not count yet."""
        is_paused = any(pause not in self._deferred for pause in self._pauses)
        self.stats_recorder.set_state(self._scheduler, is_paused=is_paused, is_asleep=self._executor is None)

    def _fall_asleep(self) -> None:
        """Free weights and KV cache, unless they are freed already."""
        if self._executor is None:
            return

        started_at = time.monotonic()
        self._scheduler.forget_kv()
        self._close_executor()
        log.info("asleep in %.2f s: weights and KV cache are freed", time.monotonic() - started_at)

    def _wake(self) -> Exception | None:
        """Open the model again, unless it is open. Returns the error if that fails."""
        if self._executor is not None:
            return None

        started_at = time.monotonic()
        try:
            model: LoadedModel = self._opener.open_again()
        except Exception as error:
            return error

        self._executor, self.model_text = model.executor, model.text
        self.stats_recorder.weights_version += 1
        log.info("awake in %.2f s", time.monotonic() - started_at)
        return None

    def _update_weights(self, tensors: Mapping[str, Any]) -> Exception | None:
        """Replace weights, and have all requests compute their context again. Returns the error of a wrong
        tensor, which changes nothing."""
        if self._executor is None or not isinstance(self._executor, TakesWeights):
            allowed = f"an engine that computes a model: this one has the executor {self.executor_name!r}"
            if self._executor is None:
                allowed = "an engine that is awake: this one is asleep, until wake()"
            return RequestError(f"tensors: expected {allowed}", field="tensors", allowed=allowed)

        started_at = time.monotonic()
        try:
            self._executor.update_weights(tensors)
        except RequestError as error:
            return error

        self._scheduler.forget_kv()
        self.stats_recorder.weights_version += 1
        log.info("%d tensors of weights replaced in %.2f s", len(tensors), time.monotonic() - started_at)
        return None

    def _has_ended(self) -> bool:
        """Whether the driver is closing, and either the last request has ended or the deadline has passed."""
        if not self._deadlines:
            return False

        return self._registry.is_empty or time.monotonic() >= min(self._deadlines)

    def _shut_down(self, failure: BaseException | None) -> None:
        """End all requests, text threads and commands, and free the executor."""
        self._deadlines.append(time.monotonic())  # from now on `add_starter` returns False
        self._registry.close(failure if not isinstance(failure, EngineClosed) else None)
        for command in self._deferred:
            self.send(command)
        steps: dict[str, Callable[[], object]] = {}
        if self._delivery is not None:
            steps["ending the requests"] = partial(self._delivery.close, failure)
        steps["ending the text threads"] = self._text_worker.close
        steps["ending the commands"] = partial(self._commands.close, self._registry.rejection)
        steps["closing the executor"] = self._close_executor
        if self.executor_name is not None:
            steps["logging the statistics"] = self.stats_recorder.closed
        steps["ending the events"] = self._events.close
        run_all(steps)
        self.opened.set(failure)
        self.closed.set()

    def _close_executor(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()


class Cancel(Struct, frozen=True):
    """End a request with finish reason "cancelled"."""

    request: Request


class Close(Struct, frozen=True):
    """The driver's deadline has been set or brought forward: the engine's thread is to look at it."""


class Pause(Struct, frozen=True):
    """Launch no steps until this pause is taken back by `Unpause`, or all pauses are ended by `Resume`.
    `done` is set when no step is in flight."""

    done: Latch


class Unpause(Struct, frozen=True):
    """Take one pause back; others stay in force."""

    pause: Pause


class Resume(Struct, frozen=True):
    """End all pauses."""

    done: Latch


class Sleep(Struct, frozen=True):
    """Close the executor once no step is in flight."""

    done: Latch


class Wake(Struct, frozen=True):
    """Open the model again; `done` is set with the error if that fails."""

    done: Latch


class UpdateWeights(Struct, frozen=True):
    """Replace weights once no step is in flight; `done` is set with the error if that fails.

    tensors: of torch, by the names of the model's files.
    """

    done: Latch
    tensors: Mapping[str, Any]


Deferred = Pause | Sleep | Wake | UpdateWeights
"""Commands that are carried out when no step is in flight."""
Command = Prepared | MasksComputed | Cancel | Close | Unpause | Resume | Deferred


class CommandQueue:
    """Commands in the order in which they are put, from any thread; one thread gets them.

    Once it is closed, the latch of every command still in it, or put later, is set with an error, so that no
    caller waits for a command that will not be carried out.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._rejection: Callable[[], DriftError] | None = None

    def put(self, command: Command) -> None:
        self._queue.put(command)
        if self._rejection is not None:
            self._reject_all(self._rejection)

    def get(self, timeout_s: float | None) -> Command | None:
        """The next command. Blocks until there is one, `timeout_s` seconds at most (None = no limit); None if
        there is none by then."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def get_nowait(self) -> Command | None:
        """The next command; None if there is none."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def close(self, rejection: Callable[[], DriftError]) -> None:
        """rejection: makes an error for each command."""
        self._rejection = rejection
        self._reject_all(rejection)

    def _reject_all(self, rejection: Callable[[], DriftError]) -> None:
        while (command := self.get_nowait()) is not None:
            if isinstance(command, Resume | Deferred):
                command.done.set(rejection())


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
        self._new_tokens: list[NewTokens] = []  # of requests whose masks are to be computed

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

            request.note_weights(self._stats_recorder.weights_version)
            chunk = request.extend(delta.output, delta.verification)
        except RequestError as error:  # of a function of the request
            self._fail(request, error)
            return

        self._stats_recorder.extended(request, delta, chunk)
        if request.is_done:
            self._finish(request, chunk)
            return

        self._updates.add(Update(stream_updates=request.stream_updates, chunk=chunk))
        if delta.sequence.constraint is not None:
            self._advance(request, delta)

    def _advance(self, request: Request, delta: Delta) -> None:
        """Advance a request's constraint by its newest tokens: at once, as a row after them may be in flight,
        or by `compute_masks`."""
        token_ids = delta.output.token_ids
        if not request.can_advance_at_once:
            delta.sequence.await_mask(time.monotonic())
            self._new_tokens.append((request, token_ids))
            return

        try:
            request.advance(token_ids)
        except RequestError as error:
            self._fail(request, error)

    def compute_masks(self) -> None:
        """Have a text thread compute the masks after a step's tokens."""
        if not self._new_tokens:
            return

        steps, self._new_tokens = self._new_tokens, []
        try:
            self._text_worker.advance(steps)
        except RequestError as error:  # there is no thread for it
            for request, _ in steps:
                self._fail(request, copy_of(error))

    def mask_computed(self, request: Request, error: DriftError | None, computed_at: float) -> None:
        """Let a constrained request be scheduled again now that its next mask is computed, or end it with the
        error of computing it."""
        if not request.is_done and request.sequence is not None:
            request.sequence.end_mask(computed_at)
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


POLL_S = 0.005
"""Most seconds to wait before asking whether the step that runs has ended, earlier than predicted."""

log: logging.Logger = logging.getLogger("drift_sdk")


def run_all(steps: Mapping[str, Callable[[], object]]) -> None:
    """Run steps in order. Errors are logged with the step's name."""
    for name, step in steps.items():
        try:
            step()
        except BaseException as error:
            log_error(f"{name} failed", error)


def log_error(what: str, error: BaseException) -> None:
    """Log an error, also if a filter or handler of the program raises then."""
    with suppress(Exception):
        log.error("%s: %s", what, error_repr(error))


LAUNCH_DEPTH = 2
"""Most steps in flight: one runs while the next is planned and queued behind it."""
