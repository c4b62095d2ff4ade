"""Measuring scripts as commands: each runs in a process of its own and writes one result file."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from perf.harness.processes import module_command, with_paths

__all__ = ["Command", "CommandFailed", "RunCommand", "run_command"]

NUM_LAST_LINES = 5


class CommandFailed(Exception):
    """A measuring script ended with an error; the text is the last line that it wrote."""


class Command(Struct, frozen=True, kw_only=True):
    """A script of this package and its arguments, without those for the device and the result file.

    topic: stem of the result file.
    """

    module: str
    topic: str
    arguments: tuple[str, ...] = ()

    def line(self, device: str, folder: Path) -> list[str]:
        """The command line that writes the result into `folder`."""
        ends = ("--device", device, "--out", str(folder / f"{self.topic}.json"))
        return module_command(self.module, *self.arguments, *ends)


RunCommand = Callable[[Command, str, Path, Callable[[str], None]], None]
"""Runs a command with (command, device, folder, on_line). Raises CommandFailed."""


def run_command(
    command: Command,
    device: str,
    folder: Path,
    on_line: Callable[[str], None] = lambda line: None,
    *,
    paths: Sequence[str] = (),
) -> None:
    """Run a command and wait for its end. What it prints is appended to a log beside the result file.

    on_line:  called with each line that it prints.
    paths:    folders to import from, before all others.

    Raises CommandFailed, with the last line of output, unless the exit status is 0. If this process is
    interrupted, the command is ended first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last: deque[str] = deque(maxlen=NUM_LAST_LINES)
    with (
        (folder / f"{command.topic}.log").open("a") as log,
        subprocess.Popen(
            command.line(device, folder),
            env=with_paths({"PYTHONUNBUFFERED": "1"} | os.environ, *paths),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                if line.strip():
                    last.append(line.strip())
                    on_line(line.rstrip())
        except BaseException:
            process.terminate()
            raise

    if process.returncode:
        raise CommandFailed(f"{command.module}: {last[-1] if last else f'exit status {process.returncode}'}")
