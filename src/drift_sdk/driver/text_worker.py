"""Threads for tokenizer, chat template and grammar, beside the engine's thread and the caller's loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from drift_sdk.driver.commands import Command, Continue, Submit
from drift_sdk.driver.prompts import ModelText
from drift_sdk.driver.request import Request
from drift_sdk.errors import DriftError, EngineClosed, RequestError

__all__ = ["TextWorker"]

NUM_PARALLEL = 2
"""Jobs at a time: a long prompt does not hold up a grammar."""

JOB_TIMEOUT_S = 60.0
"""Most seconds a job may take before its request fails."""

MAX_ABANDONED = 4
"""Threads that may be left to finish a job nobody waits for while others take their place."""

CLOSE_TIMEOUT_S = 5.0
"""Most seconds that closing waits for jobs in progress."""

log = logging.getLogger("drift_sdk")


class Job:
    """Something to be done for a request; `answer` makes the command that tells the engine's thread."""

    __slots__ = ("answer", "deadline", "is_answered", "is_plain", "request", "work")

    def __init__(
        self,
        request: Request,
        work: Callable[[], None],
        answer: Callable[[Request, DriftError | None], Command],
    ) -> None:
        self.request = request
        self.work = work
        self.answer = answer
        self.deadline = 0.0
        self.is_answered = False
        self.is_plain = request.params.grammar is None and request.text_field == "prompt"


class TextWorker:
    """Prepares requests and follows their constraints; the outcome of every job goes to the engine's thread
    by `tell`, once, unless it is closed before.

    Jobs of plain prompts (text or token ids, without a grammar) are not held up by grammars and chat messages
    that do not end: a job in progress that is answered and cannot be abandoned keeps its place only from
    jobs of its own kind. So at most `MAX_ABANDONED` + 2 * `NUM_PARALLEL` threads can hang.

    If no thread can be started, jobs are done by the threads there are, and overdue jobs are answered when
    one of these is idle. If there are none, the request fails with a RequestError.

    Threads are started as they are needed, one more than there are jobs in progress: an idle one watches the
    clock. A job cannot be interrupted. One that takes too long is answered with a RequestError, one whose
    request has ended is answered at once; both are abandoned: they no longer count among the `NUM_PARALLEL`,
    their results are ignored, and their threads end with them. Once `MAX_ABANDONED` are, jobs wait for those
    in progress, and fail when these are overdue. The threads are daemons: none keeps the interpreter from
    exiting."""

    def __init__(self, tell: Callable[[Command], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._in_progress: list[Job] = []
        self._abandoned: list[Job] = []
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._is_closed = False

    def prepare(self, request: Request, model_text: ModelText) -> None:
        self._add(Job(request, lambda: request.prepare(model_text), Submit))

    def advance(self, request: Request, token_ids: tuple[int, ...]) -> None:
        self._add(Job(request, lambda: request.advance(token_ids), Continue))

    def abandon(self, request: Request) -> None:
        """The request has ended: nobody waits for its job in progress."""
        if not self._in_progress:
            return

        with self._changed:
            for job in [job for job in self._in_progress if job.request is request]:
                self._abandon(job, None)

    def close(self) -> None:
        """Drop what has not begun and wait for the rest, `CLOSE_TIMEOUT_S` seconds at most."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
            threads = list(self._threads)

        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            jobs = self._in_progress + self._abandoned
        if jobs:
            what = ", ".join(f"{job.request.text_field} of {job.request.request_id}" for job in jobs)
            log.warning("closed while text threads are still busy, and no longer waited for: %s", what)

    def _add(self, job: Job) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineClosed("the engine was closed")

            if not self._keep_one_idle() and not self._in_progress:
                raise out_of_threads(job.request.text_field)

            self._waiting.append(job)
            self._changed.notify()

    def _keep_one_idle(self) -> bool:
        """Start a thread if none is idle; False if the process can start none."""
        if not self._num_idle:
            thread = threading.Thread(target=self._run, name="drift-text", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False

            self._threads.add(thread)
            self._num_idle += 1

        return True

    def _run(self) -> None:
        """A thread's life: it begins idle and does one job after the other."""
        while (job := self._next()) is not None:
            error = None if job.request.is_done else attempt(job)
            with self._changed:
                self._answer(job, error)
                if job in self._abandoned:
                    self._abandoned.remove(job)
                    self._changed.notify()
                    break

                self._in_progress.remove(job)
                self._num_idle += 1

        with self._changed:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Job | None:
        """Wait for a job; None when the idle thread is to end."""
        with self._changed:
            while not self._is_closed:
                self._abandon_overdue()
                if (job := self._first_with_place()) is not None:
                    self._waiting.remove(job)
                    job.deadline = time.monotonic() + JOB_TIMEOUT_S
                    self._in_progress.append(job)
                    self._num_idle -= 1
                    self._keep_one_idle()
                    return job

                # Whoever waits need not be told of jobs that begin meanwhile: it is awake before they are
                # overdue.
                deadlines = [job.deadline for job in self._in_progress if not job.is_answered]
                left = min(deadlines) - time.monotonic() if deadlines else JOB_TIMEOUT_S
                self._changed.wait(min(left, JOB_TIMEOUT_S))

            self._num_idle -= 1
            return None

    def _first_with_place(self) -> Job | None:
        has_place = {is_plain: len(self._rivals(is_plain)) < NUM_PARALLEL for is_plain in (False, True)}
        return next((job for job in self._waiting if has_place[job.is_plain]), None)

    def _rivals(self, is_plain: bool) -> list[Job]:
        """Jobs in progress that keep their places from jobs of this kind."""
        return [job for job in self._in_progress if job.is_plain == is_plain or not job.is_answered]

    def _abandon_overdue(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._in_progress if job.deadline <= now]:
            self._abandon(job, overdue(job.request.text_field))
        for is_plain in (False, True):
            if sum(job.deadline <= now for job in self._rivals(is_plain)) >= NUM_PARALLEL:
                failed = [job for job in self._waiting if job.is_plain == is_plain]
                self._waiting = deque(job for job in self._waiting if job.is_plain != is_plain)
                for job in failed:
                    self._answer(job, overdue(job.request.text_field))

    def _abandon(self, job: Job, error: DriftError | None) -> None:
        """Answer a job in progress, and go on without its thread unless too many are missing already."""
        self._answer(job, error)
        if len(self._abandoned) < MAX_ABANDONED and self._keep_one_idle():
            self._in_progress.remove(job)
            self._abandoned.append(job)
        self._changed.notify()

    def _answer(self, job: Job, error: DriftError | None) -> None:
        if not job.is_answered and not self._is_closed:
            self._tell(job.answer(job.request, error))
        job.is_answered = True


def attempt(job: Job) -> DriftError | None:
    """Do a job; what the request's stream is told if that fails."""
    try:
        job.work()
    except DriftError as error:
        return error
    except BaseException as cause:  # SystemExit, pyo3's PanicException: no reason for the thread to end
        failure = DriftError(f"request {job.request.request_id} could not be prepared: {cause!r}")
        failure.__cause__ = cause
        return failure

    return None


def overdue(field: str) -> RequestError:
    allowed = f"what can be worked out within {JOB_TIMEOUT_S:g} s"
    return RequestError(f"{field}: expected {allowed}", field=field, allowed=allowed)


def out_of_threads(field: str) -> RequestError:
    allowed = "a process that can start a thread for it"
    return RequestError(f"{field}: expected {allowed}", field=field, allowed=allowed)
