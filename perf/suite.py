"""The suite: all measurements of one GPU, topic by topic, with a report.

    python -m perf.suite
    python -m perf.suite --topics single large-context --out results

Topics: baseline (plain decoding of all scenarios), single (one sequence, one to five drafts), batch (several
sequences), large-context (8K to 32K tokens) and stress. Result files, logs and report.md are in the folder;
`python -m perf.merge FOLDER/*.json` stores them in perf/results. If the suite is interrupted, the same
command goes on with the measurement that was interrupted; finished ones are not made again on the same commit
and machine. Exit status: 0 if all topics were measured, 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.live import Live
from rich.table import Table

from drift_sdk.errors import ConfigError
from perf.gating.history import Place
from perf.harness import machine
from perf.harness.commands import Command, CommandFailed, RunCommand, run_command
from perf.harness.own_folder import remove_results, result_names
from perf.harness.processes import ROOT
from perf.harness.record import UNFINISHED
from perf.harness.shapes import MODELS
from perf.report import REPORT_FILES, write_report

__all__ = ["STATE", "TOPICS", "Progress", "State", "View", "main", "own_files", "run_topics"]

OUT = ROOT / ".cache" / "perf" / "suite"
STATE = "suite.state"
AL = ("--acceptance-length", "3.2", "--num-draft-tokens")


def speculative(*arguments: str) -> Command:
    return Command(module="perf.speculative", topic="speculative", arguments=arguments)


TOPICS: dict[str, tuple[Command, ...]] = {
    "baseline": (Command(module="perf.decode", topic="decode"),),
    "single": (speculative(*AL, "1", "2", "3", "4", "5", "--scenario", "single-512"),),
    "batch": (
        speculative(*AL, "1", "2", "3", "4", "5", "--scenario", "batch8-512"),
        speculative(*AL, "1", "3", "5", "--scenario", "batch64-512"),
    ),
    "large-context": (
        speculative(*AL, "2", "3", "4", "5", "--scenario", "single-8k", "single-16k", "single-32k"),
        speculative(*AL, "2", "3", "4", "5", "--scenario", "batch4-16k"),
    ),
    "stress": tuple(
        Command(
            module="perf.stress",
            topic="stress",
            arguments=("--num-draft-tokens", number, "--minutes", "2.5"),
        )
        for number in ("2", "3", "4", "5")
    ),
}
"""Topic -> the commands that measure it."""


class Progress(Struct, kw_only=True):
    """A topic that was measured, or failed. num_done: commands that have ended well. seconds: time that the
    topic took since it was last begun."""

    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    num_done: int = 0
    seconds: float = 0.0
    reason: str = ""


class State(Struct, kw_only=True):
    """The topics that have been measured, as stored in the folder."""

    place: Place
    model: str
    topics: dict[str, Progress]

    @classmethod
    def load(cls, folder: Path, place: Place, model: str) -> State:
        """The state of a folder; an empty one for a new folder.

        Raises ValueError for a folder with results of another commit, machine or model.
        """
        path = folder / STATE
        if not path.is_file():
            return cls(place=place, model=model, topics={})

        state = msgspec.json.decode(path.read_bytes(), type=State)
        if (state.place, state.model) != (place, model):
            found = f"{state.model} on commit {state.place.commit}, {state.place.machine}, {state.place.gpu}"
            raise ValueError(f"{folder}: results of {found}; --fresh removes them")

        return state

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{STATE}{UNFINISHED}"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(folder / STATE)


class View:
    """A table of the topics that is drawn anew while they run, with the last line of output of each. Where
    the output is no terminal, a line is printed for each topic that has ended."""

    def __init__(self, topics: Mapping[str, Progress], console: Console) -> None:
        self._topics, self._console = topics, console
        self._lines = dict.fromkeys(topics, "")
        self._live = Live(self.table(), console=console, auto_refresh=False)

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def said(self, topic: str, line: str) -> None:
        """A line of output."""
        self._lines[topic] = line.strip()
        self._draw()

    def changed(self, topic: str) -> None:
        """The topic has started or ended."""
        progress = self._topics[topic]
        if not self._console.is_terminal and progress.state != "running":
            reason = f": {progress.reason}" if progress.reason else ""
            text = f"{topic}: {progress.state} in {progress.seconds:.0f} s{reason}"
            self._console.print(text, highlight=False, soft_wrap=True)
        self._draw()

    def _draw(self) -> None:
        if self._console.is_terminal:
            self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        table = Table("topic", "state", "seconds", "last line")
        for topic, progress in self._topics.items():
            seconds = f"{progress.seconds:.0f}" if progress.seconds else ""
            table.add_row(topic, progress.state, seconds, progress.reason or self._lines[topic][:100])
        return table


def run_topics(
    topics: Mapping[str, Sequence[Command]],
    state: State,
    folder: Path,
    device: str,
    console: Console,
    *,
    run: RunCommand = run_command,
) -> bool:
    """Measure the topics that are not done, with their commands that are not done, and write the state after
    each command. Returns False if one failed; the others are measured all the same."""
    shown = {topic: state.topics.get(topic) or Progress() for topic in topics}
    with View(shown, console) as view:
        for topic, progress in shown.items():
            if progress.state == "done":
                continue

            started_at = time.perf_counter()
            progress.state, progress.reason = "running", ""
            view.changed(topic)
            try:
                for command in topics[topic][progress.num_done :]:
                    run(command, device, folder, lambda line, topic=topic: view.said(topic, line))  # type: ignore[misc]  # a default
                    progress.num_done += 1
                    state.topics[topic] = msgspec.structs.replace(progress, state="waiting")
                    state.write(folder)
                progress.state = "done"
            except CommandFailed as error:
                progress.state, progress.reason = "failed", str(error)
            progress.seconds = time.perf_counter() - started_at
            state.topics[topic] = progress
            state.write(folder)
            view.changed(topic)

    return all(progress.state == "done" for progress in shown.values())


def own_files(topics: Mapping[str, Sequence[Command]]) -> set[str]:
    """The names of the files that a folder of these topics can hold, report included."""
    results = result_names(command.topic for commands in topics.values() for command in commands)
    return results | {STATE, f"{STATE}{UNFINISHED}", *REPORT_FILES}


def of_model(command: Command, model: str) -> Command:
    return msgspec.structs.replace(command, arguments=("--model", model, *command.arguments))


def suite_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--topics", nargs="+", choices=TOPICS, default=tuple(TOPICS), metavar="TOPIC")
    made.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    made.add_argument("--device", default=machine.default_device(), help="cuda or cuda:N")
    made.add_argument("--out", type=Path, default=OUT, help="folder of results, logs and report")
    made.add_argument("--fresh", action="store_true", help="remove the folder, if it holds nothing else")
    return made


def main(arguments: Sequence[str] | None = None, run: RunCommand = run_command) -> int:
    made = suite_parser()
    given: Any = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"--device {given.device}: the suite measures an NVIDIA GPU")

    if given.fresh:
        try:
            remove_results(given.out, own_files(TOPICS), [STATE])
        except ConfigError as error:
            made.error(f"--fresh: {error}")
    place = Place.here(machine.commit(), machine.gpu_name(given.device))
    try:
        state = State.load(given.out, place, given.model)
    except ValueError as error:
        made.error(str(error))

    topics = {topic: [of_model(one, given.model) for one in TOPICS[topic]] for topic in given.topics}
    is_complete = run_topics(topics, state, given.out, given.device, Console(), run=run)
    try:
        print(f"written to {write_report(given.out, given.out)}")
    except ValueError:
        print("no results to report", file=sys.stderr)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
