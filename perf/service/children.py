"""Child processes that take commands and answer them, and are killed with all processes that they started.

A child that dies, answers with an error or does not answer in time is killed; the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

__all__ = ["Child", "ChildFailed", "ask_all"]

POLL_S = 0.1
LOG_TAIL = 4000  # characters from the end of a failed child's log that its error quotes
KILL_LIMIT_S = 20.0


class ChildFailed(Exception):
    """A child died, answered with an error or did not answer in time."""


class Child:
    """A child process with its own process group. As a context manager, it is killed at the end.

    command:  the command line. Commands go to its standard input, answers come from its standard output, one
              JSON object per line.
    log:      file for its standard error.
    slot:     number of the GPU's place in the plan.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, slot: int = 0
    ) -> None:
        self.name, self.log, self.slot = name, log, slot
        self._answers: queue.Queue[str | None] = queue.Queue()
        with log.open("wb") as stream:
            # Its own group, but in this session: ending the session ends the child too.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                process_group=0,
            )
        threading.Thread(target=self._read, name=f"answers of {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command. Raises ChildFailed if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # broken, or closed when it was killed
            raise self._failed("has ended") from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next answer. Raises ChildFailed if none comes in `limit_s` seconds or if it is an error."""
        give_up_at = time.monotonic() + limit_s
        while time.monotonic() < give_up_at:
            try:
                line = self._answers.get(timeout=POLL_S)
            except queue.Empty:
                # Processes that the child started may keep its output open.
                if self._process.poll() is not None and self._answers.empty():
                    raise self._failed(f"ended with exit code {self._process.returncode}") from None
                continue
            if line is None:
                raise self._failed(f"ended with exit code {self._process.wait(KILL_LIMIT_S)}")

            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise self._failed(f"failed:\n{answer['error']}")

            return answer

        raise self._failed(f"did not answer in {limit_s:g} s")

    def kill(self) -> None:
        """Kill the process and all that it has started, and wait until they have ended. Idempotent."""
        started = self._started()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in started:  # those that have left the group
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        give_up_at = time.monotonic() + KILL_LIMIT_S
        while any(map(is_alive, started)) and time.monotonic() < give_up_at:
            time.sleep(POLL_S)

        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def _started(self) -> list[psutil.Process]:
        """Its descendants, and the other processes of its group, which are found even if it has ended."""
        found = {process for process in psutil.process_iter() if group_of(process.pid) == self.pid}
        with contextlib.suppress(psutil.Error):
            found |= set(psutil.Process(self.pid).children(recursive=True))
        return [process for process in found if process.pid != self.pid]

    def _read(self) -> None:
        # Closed on this thread only: closing on another would block while a writer still has it open.
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._answers.put(line.decode())
        self._answers.put(None)

    def _failed(self, what: str) -> ChildFailed:
        tail = self.log.read_text(errors="replace")[-LOG_TAIL:]
        return ChildFailed(f"{self.name} {what}\n--- end of {self.log} ---\n{tail}")


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def is_alive(process: psutil.Process) -> bool:
    """True if the process still holds resources. A zombie (ended, but not waited for) does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def ask_all(
    children: list[Child], command: Callable[[Child], Mapping[str, Any]], limit_s: float
) -> dict[Child, dict[str, Any]]:
    """Send each child its command, at the same time, and wait up to `limit_s` seconds for all answers.

    Children that fail are reported on stderr, killed and removed from `children`.
    """
    answers: dict[Child, dict[str, Any]] = {}
    give_up_at = time.monotonic() + limit_s
    asked = []
    for child in list(children):
        with _removed_if_failed(child, children):
            child.send(command(child))
            asked.append(child)
    for child in asked:
        with _removed_if_failed(child, children):
            answers[child] = child.receive(max(POLL_S, give_up_at - time.monotonic()))

    return answers


@contextlib.contextmanager
def _removed_if_failed(child: Child, children: list[Child]) -> Iterator[None]:
    try:
        yield
    except ChildFailed as failure:
        print(failure, file=sys.stderr, flush=True)
        child.kill()
        children.remove(child)
