"""A queue of commands for the GPUs of a machine: each has as many GPUs as it asks for, for itself alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from perf.harness.processes import with_paths

__all__ = ["Job", "Outcome", "run_jobs"]

POLL_S = 0.05
END_S = 5.0
"""Seconds between the request to end and the killing of what has not ended."""


class Job(Struct, frozen=True, kw_only=True):
    """A command line.

    num_gpus: GPUs that it needs. seconds: how long it takes, about. log: file that its output is written to.
    """

    name: str
    line: tuple[str, ...]
    num_gpus: int
    seconds: float
    log: Path


class Outcome(Struct, frozen=True, kw_only=True):
    """How a job ended. "late": at the limit. "left out": it was never started."""

    name: str
    state: Literal["done", "failed", "late", "left out"]
    seconds: float = 0.0


class Running:
    """A job that runs. Its processes are a group of their own: engines that a measurement has started and not
    ended would keep memory of the GPU."""

    def __init__(self, job: Job, gpus: Sequence[str]) -> None:
        self.job = job
        self.gpus = gpus
        self.started_at = time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"}
        with job.log.open("w") as log:
            self.process = subprocess.Popen(
                job.line,
                env=with_paths(os.environ | visible),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """Ask the processes to end, and kill those that do not."""
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """Kill what is left of the processes."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def outcome(self, state: Literal["done", "failed", "late"]) -> Outcome:
        return Outcome(name=self.job.name, state=state, seconds=time.monotonic() - self.started_at)


def run_jobs(
    jobs: Sequence[Job],
    gpus: Collection[str],
    limit_s: float | None,
    on_change: Callable[[Job, Outcome | None], None] = lambda job, outcome: None,
) -> list[Outcome]:
    """Run jobs side by side, each on free GPUs, and return their outcomes in the order of `jobs`.

    A job that needs more GPUs than are free waits, and later ones that need fewer go before it. One whose
    time does not fit in what is left of the limit is left out. What still runs at the limit is ended. If this
    process is interrupted, all jobs are ended first.

    gpus:      as in CUDA_VISIBLE_DEVICES.
    limit_s:   seconds for all jobs; None = no limit.
    on_change: called when a job starts, with None, and when it has ended or is left out.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    waiting, running = list(jobs), list[Running]()
    free, outcomes = list(gpus), dict[str, Outcome]()

    def left_s() -> float:
        return float("inf") if deadline is None else deadline - time.monotonic()

    def ended(job: Job, outcome: Outcome) -> None:
        outcomes[job.name] = outcome
        on_change(job, outcome)

    try:
        while waiting or running:
            for job in tuple(waiting):
                if job.num_gpus > len(gpus) or job.seconds > left_s():
                    waiting.remove(job)
                    ended(job, Outcome(name=job.name, state="left out"))
                elif job.num_gpus <= len(free):
                    waiting.remove(job)
                    on_change(job, None)
                    running.append(Running(job, free[: job.num_gpus]))
                    del free[: job.num_gpus]
            time.sleep(POLL_S)
            for one in tuple(running):
                status = one.process.poll()
                if status is None and left_s() > 0:
                    continue

                if status is None:
                    one.end()
                else:
                    one.kill()
                running.remove(one)
                free.extend(one.gpus)
                ended(one.job, one.outcome("late" if status is None else "failed" if status else "done"))
    finally:
        for one in running:
            one.end()

    return [outcomes[job.name] for job in jobs]
