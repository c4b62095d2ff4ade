"""Text threads, which run tokenizer, chat template and grammar beside the engine's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

from msgspec import Struct

from drift_sdk.driver.prompts import ModelText, Prompt, TokenCount
from drift_sdk.driver.requests import Request
from drift_sdk.errors import DriftError, EngineClosed, RequestError, error_repr

NUM_PARALLEL = 2
"""Most jobs in progress at a time. More than one, so that a long prompt does not delay a grammar."""

JOB_TIMEOUT_S = 60.0
"""Most seconds a job may take before its request fails."""

MAX_ABANDONED = 4
"""Most threads that are left to finish a job whose result is not needed while other threads replace them."""

CLOSE_TIMEOUT_S = 5.0
"""Most seconds that `close` waits for jobs in progress."""

log: logging.Logger = logging.getLogger("drift_sdk")


class Prepared(Struct, frozen=True):
    """A request has been prepared (`error` is None), or preparing it has failed."""

    request: Request
    error: DriftError | None


class MasksComputed(Struct, frozen=True):
    """The next token masks of constrained requests have been computed (the error is None), or that has
    failed. computed_at: time.monotonic() then."""

    outcomes: tuple[tuple[Request, DriftError | None], ...]
    computed_at: float


NewTokens = tuple[Request, tuple[int, ...]]
"""A request and its newest tokens, by which its constraint moves on."""


class Client(Protocol):
    """A request, or a count of tokens, that text work is done for.

    request_id: its name in the log.
    text_field: the argument of the caller that is worked on.
    is_done:    whether the outcome is of no interest any more.
    """

    request_id: str
    text_field: str

    @property
    def is_done(self) -> bool: ...


class MaskBatch:
    """The next masks of several requests, computed one after another: most take less time than to wake a
    thread.
    """

    text_field = "grammar"

    def __init__(self, steps: Items[NewTokens]) -> None:
        self.request_id: str = ", ".join(request.request_id for request, _ in steps)
        self._steps = deque(steps)  # whose masks are not computed
        self._outcomes: list[tuple[Request, DriftError | None]] = []
        self._current: Request | None = None
        self._changed = threading.Lock()

    @property
    def is_done(self) -> bool:
        return all(request.is_done for request, _ in [*self._steps])

    def run(self) -> None:
        """Compute the masks, until all are or `end` has been called."""
        while (step := self._next()) is not None:
            request, token_ids = step
            error = None if request.is_done else attempt(request, partial(request.advance, token_ids))
            self._note(error)

    def is_about(self, client: Client) -> bool:
        """Whether a request's mask is being computed."""
        return self._current is client

    def end(self, error: DriftError | None) -> tuple[MasksComputed, tuple[NewTokens, ...]]:
        """End the batch. Returns the outcomes, and the requests whose masks were not begun. The error is the
        outcome of the request whose mask is being computed; before the batch has begun, of all."""
        with self._changed:
            if self._current is not None:
                self._outcomes.append((self._current, error))
            elif not self._outcomes:
                self._outcomes += [(request, error) for request, _ in self._steps]
                self._steps.clear()
            rest = tuple(self._steps)
            self._current = None
            self._steps.clear()
            return MasksComputed(tuple(self._outcomes), time.monotonic()), rest

    def _next(self) -> NewTokens | None:
        with self._changed:
            step = self._steps.popleft() if self._steps else None
            self._current = step[0] if step is not None else None
            return step

    def _note(self, error: DriftError | None) -> None:
        with self._changed:
            if self._current is not None:
                self._outcomes.append((self._current, error))
                self._current = None


class TextJob:
    """Work for a client.

    work:     does it; an exception that it raises is the outcome.
    answer:   tells the outcome.
    is_plain: whether the work is on a plain prompt alone.
    """

    __slots__ = ("answer", "client", "deadline", "is_answered", "is_plain", "work")

    def __init__(
        self,
        client: Client,
        work: Callable[[], None],
        answer: Callable[[DriftError | None], None],
        *,
        is_plain: bool,
    ) -> None:
        self.client: Client = client
        self.work: Callable[[], None] = work
        self.answer: Callable[[DriftError | None], None] = answer
        self.deadline: float = 0.0
        self.is_answered: bool = False
        self.is_plain: bool = is_plain


class TextWorker:
    """Prepares requests, advances their constraints, and counts tokens. The outcome of every job of a request
    is sent to the engine's thread once, by `send`, unless the worker is closed before. A count that has not
    ended by then ends with EngineClosed.

    Threads are started when they are needed, one more than there are jobs in progress: the idle one watches
    for overdue jobs. A job cannot be interrupted. A job that takes longer than `JOB_TIMEOUT_S` is answered
    with a RequestError, and a job whose request has ended is answered at once. Both are abandoned: they no
    longer count among the `NUM_PARALLEL`, their results are ignored, and their threads end when they do.
    While `MAX_ABANDONED` jobs are abandoned, no further one is: waiting jobs wait for those in progress, and
    fail when all of these are overdue. The threads are daemons, which do not keep the interpreter from
    exiting.

    Jobs of plain prompts (text or token ids, without a grammar) are not held up by grammars and chat messages
    that do not end: a job in progress that is answered and cannot be abandoned keeps its place only from
    jobs of its own kind. So at most `MAX_ABANDONED` + 2 * `NUM_PARALLEL` threads can hang.

    If no thread can be started, the existing threads do the jobs, and overdue jobs are answered when one of
    these is idle. If there is no thread, the request fails with a RequestError.

    A thread that fails outside of the work of a job, for want of memory say, ends: the job that it had, or
    the next one that waits, fails with a DriftError, and another thread takes its place.

    The masks after a step are `NUM_PARALLEL` jobs (`MaskBatch`). If one is answered because of the mask that
    is being computed, those behind it become a job again.

    `prepare`, `advance`, `count_tokens` and `abandon` may be called from any thread.
    """

    def __init__(self, send: Callable[[Prepared | MasksComputed], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._waiting: deque[TextJob] = deque()
        self._in_progress: list[TextJob] = []
        self._abandoned: list[TextJob] = []
        self._threads: dict[threading.Thread, TextJob | None] = {}  # and what each does; None = it is idle
        self._is_closed = False

    def prepare(self, request: Request, model_text: ModelText) -> None:
        """Queue a request for preparation; a `Prepared` tells the outcome. EngineClosed if the worker is
        closed, and RequestError if there is no thread and none can be started."""
        is_plain = request.params.grammar is None and request.text_field == "prompt"

        def answer(error: DriftError | None) -> None:
            self._send(Prepared(request, error))

        self._add(TextJob(request, lambda: request.prepare(model_text), answer, is_plain=is_plain))

    def advance(self, steps: Items[NewTokens]) -> None:
        """Queue the computation of the next masks of requests; `MasksComputed` tell the outcomes. A request
        whose newest mask took long has a job of its own. Raises as `prepare` does."""
        alone = [step for step in steps if step[0].has_slow_mask]
        together = [step for step in steps if not step[0].has_slow_mask]
        for first in range(NUM_PARALLEL):
            part = together[first::NUM_PARALLEL]
            if len(part) == 1:
                alone += part
            elif part:
                self._add_batch(part)
        for request, token_ids in alone:
            self._add_mask(request, token_ids)

    def _add_mask(self, request: Request, token_ids: tuple[int, ...]) -> None:
        def answer(error: DriftError | None) -> None:
            self._send(MasksComputed(((request, error),), time.monotonic()))

        self._add(TextJob(request, lambda: request.advance(token_ids), answer, is_plain=False))

    def _add_batch(self, steps: Items[NewTokens]) -> None:
        batch = MaskBatch(steps)

        def answer(error: DriftError | None) -> None:
            computed, rest = batch.end(error)
            self._send(computed)
            if not rest:
                return

            try:  # the mask before them takes too long, or its request has ended
                self._add_batch(rest)
            except RequestError as failure:
                failures = tuple((request, failure) for request, _ in rest)
                self._send(MasksComputed(failures, time.monotonic()))

        self._add(TextJob(batch, batch.run, answer, is_plain=False))

    async def count_tokens(self, prompt: Prompt, model_text: ModelText) -> int:
        """The number of tokens of a prompt. Raises the prompt's error, EngineClosed if the worker is closed
        meanwhile, and what `prepare` raises. If the task is cancelled, the work is abandoned."""
        count = TokenCount(prompt, model_text)
        try:
            self._add(TextJob(count, count.run, count.done.set, is_plain=count.text_field == "prompt"))
            error = await count.done.wait()
        except BaseException:
            count.is_done = True
            self.abandon(count)
            raise

        if error is not None:
            raise error

        return count.num_tokens

    def abandon(self, client: Client) -> None:
        """Answer a client's job, if there is one, and abandon it: the outcome is of no interest any more."""
        if not self._in_progress:  # then a thread is about to take a job that waits
            return

        with self._changed:
            for job in [job for job in self._waiting if job.client is client]:
                self._waiting.remove(job)
                self._answer(job, None)
            for job in [job for job in self._in_progress if is_about(job, client)]:
                self._abandon(job, None)

    def close(self) -> None:
        """Drop jobs that have not begun and wait for the others, `CLOSE_TIMEOUT_S` seconds at most."""
        with self._changed:
            self._is_closed = True
            for job in (*self._waiting, *self._in_progress):
                if isinstance(job.client, TokenCount) and not job.is_answered:
                    job.answer(EngineClosed("the engine was closed"))
            self._waiting.clear()
            self._changed.notify_all()
            threads = list(self._threads)

        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            jobs = self._in_progress + self._abandoned
        if jobs:
            descriptions = ", ".join(f"{job.client.text_field} of {job.client.request_id}" for job in jobs)
            log.warning("closed without waiting any longer for busy text threads: %s", descriptions)

    def _add(self, job: TextJob) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineClosed("the engine was closed")

            if not self._keep_one_idle() and not self._in_progress:
                raise out_of_threads(job.client.text_field)

            self._waiting.append(job)
            self._changed.notify()

    def _keep_one_idle(self) -> bool:
        """Start a thread if none is idle; False if the process cannot start one."""
        if None in self._threads.values():
            return True

        thread = threading.Thread(target=self._run, name="drift-text", daemon=True)
        self._threads[thread] = None
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            del self._threads[thread]
            return False

        return True

    def _run(self) -> None:
        """A thread's function."""
        failure: BaseException | None = None
        try:
            self._work(threading.current_thread())
        except BaseException as error:
            failure = error
        finally:
            with self._changed:
                self._leave(threading.current_thread(), failure)
        if failure is not None:
            log.error("a text thread failed", exc_info=failure)

    def _work(self, thread: threading.Thread) -> None:
        """Do one job after another, from idleness on, until the worker is closed or a job was abandoned."""
        while (job := self._next_job(thread)) is not None:
            error = None if job.client.is_done else attempt(job.client, job.work)
            with self._changed:
                self._answer(job, error)
                if job in self._abandoned:
                    return

                self._in_progress.remove(job)
                self._threads[thread] = None

    def _leave(self, thread: threading.Thread, failure: BaseException | None) -> None:
        """Called when a thread ends. If it has failed, so does its job, or the next one: were none to fail,
        threads that always fail would replace each other without end."""
        job = self._threads.pop(thread)
        if failure is not None and job is None and self._waiting:
            job = self._waiting[0]
        for jobs in (self._waiting, self._in_progress, self._abandoned):
            if job is not None and job in jobs:
                jobs.remove(job)
        self._changed.notify()  # an abandoned job may have ended, and another may be abandoned
        if failure is None:
            return

        needs_thread = bool(self._waiting or self._in_progress)
        stranded: list[TextJob] = []
        if needs_thread and not self._keep_one_idle() and not self._in_progress:
            stranded = list(self._waiting)
            self._waiting.clear()
        if job is not None:
            self._answer(job, failed(job.client, failure))
        for job in stranded:
            self._answer(job, out_of_threads(job.client.text_field))

    def _next_job(self, thread: threading.Thread) -> TextJob | None:
        """Block until there is a job that may begin; None when the worker is closed."""
        with self._changed:
            while not self._is_closed:
                self._abandon_overdue()
                if (job := self._first_with_place()) is not None:
                    self._threads[thread] = job
                    self._waiting.remove(job)
                    job.deadline = time.monotonic() + JOB_TIMEOUT_S
                    self._in_progress.append(job)
                    self._keep_one_idle()
                    return job

                # A job that begins during this wait does not shorten it: the wait ends before that job is
                # overdue.
                deadlines = [job.deadline for job in self._in_progress if not job.is_answered]
                left = min(deadlines) - time.monotonic() if deadlines else JOB_TIMEOUT_S
                self._changed.wait(min(left, JOB_TIMEOUT_S))

            return None

    def _first_with_place(self) -> TextJob | None:
        has_place = {is_plain: len(self._rivals(is_plain)) < NUM_PARALLEL for is_plain in (False, True)}
        return next((job for job in self._waiting if has_place[job.is_plain]), None)

    def _rivals(self, is_plain: bool) -> list[TextJob]:
        """Jobs in progress that keep their places from jobs of this kind."""
        return [job for job in self._in_progress if job.is_plain == is_plain or not job.is_answered]

    def _abandon_overdue(self) -> None:
        """Answer overdue jobs; if no further thread can be replaced and all in progress are overdue, waiting
        jobs too."""
        now = time.monotonic()
        for job in [job for job in self._in_progress if job.deadline <= now]:
            self._abandon(job, overdue(job.client.text_field))
        for is_plain in (False, True):
            if sum(job.deadline <= now for job in self._rivals(is_plain)) >= NUM_PARALLEL:
                failed = [job for job in self._waiting if job.is_plain == is_plain]
                self._waiting = deque(job for job in self._waiting if job.is_plain != is_plain)
                for job in failed:
                    self._answer(job, overdue(job.client.text_field))

    def _abandon(self, job: TextJob, error: DriftError | None) -> None:
        """Answer a job in progress, and replace its thread unless `MAX_ABANDONED` threads are replaced."""
        self._answer(job, error)
        if len(self._abandoned) < MAX_ABANDONED and self._keep_one_idle():
            self._in_progress.remove(job)
            self._abandoned.append(job)
        self._changed.notify()

    def _answer(self, job: TextJob, error: DriftError | None) -> None:
        if not job.is_answered and not self._is_closed:
            job.answer(error)
        job.is_answered = True


def is_about(job: TextJob, client: Client) -> bool:
    """Whether a job in progress works for a client now."""
    return job.client is client or (isinstance(job.client, MaskBatch) and job.client.is_about(client))


def attempt(client: Client, work: Callable[[], None]) -> DriftError | None:
    """Do work for a client. Returns the error for the request's stream if that fails."""
    try:
        work()
    except DriftError as error:
        return error
    except BaseException as cause:  # such as SystemExit and pyo3's PanicException: the thread goes on
        return failed(client, cause)

    return None


def failed(client: Client, cause: BaseException) -> DriftError:
    """The error for a request whose job, or the thread of it, has failed in an unexpected way."""
    failure = DriftError(f"request {client.request_id} could not be prepared: {error_repr(cause)}")
    failure.__cause__ = cause
    return failure


def overdue(field: str) -> RequestError:
    """The error for a request whose job takes too long; `field` names what the job works on."""
    allowed = f"text work of at most {JOB_TIMEOUT_S:g} s"
    return RequestError(f"{field}: expected {allowed}", field=field, allowed=allowed)


def out_of_threads(field: str) -> RequestError:
    allowed = "a process that can start a thread for it"
    return RequestError(f"{field}: expected {allowed}", field=field, allowed=allowed)
