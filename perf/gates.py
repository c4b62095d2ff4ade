"""Gates: performance that a change must not reduce, measured and judged.

    python -m perf.gates list     every floor, the last committed figure, the distance to the goal; no GPU
    python -m perf.gates micro    a minute: decoding of 8B shapes, plain and speculative in one process
    python -m perf.gates full     the rest that one GPU can show; after three green runs of micro

The floors are in perf/gates.toml. A figure is red under its floor, more than 5% worse than the last committed
result of the same kind of GPU, or if an engine left its fast path; engines run with strict_performance. The
report is written after each measurement, so that an interrupted suite has one too.
Exit status: 0 if no verdict is red, 1 if one is, 2 if nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import gpu_key
from drift_sdk.errors import ConfigError
from perf.gating import history
from perf.gating.figures import read_folder
from perf.gating.gate import Gate, GateFile, Suite, load_gates
from perf.gating.history import Place
from perf.gating.judging import Verdict, judge, judge_runs
from perf.gating.listing import COLUMNS, floor_rows, listed
from perf.gating.measuring import Measurement, commands_of, measure
from perf.harness import machine
from perf.harness.commands import RunCommand, run_command
from perf.harness.processes import ROOT
from perf.harness.record import RESULTS, Results, merge
from perf.harness.table import show

__all__ = [
    "Report",
    "Timing",
    "gates_of",
    "judge_suite",
    "main",
]

COMPARED = ("speculative", "decode", "prefill", "kernels")
"""Topics whose runs are all compared with the committed ones: those with rates, or times of kernels."""
OUT = ROOT / ".cache" / "perf"


class Timing(Struct, frozen=True, kw_only=True):
    """Wall time of a command."""

    command: str
    seconds: float


class Report(Struct, frozen=True, kw_only=True):
    """All verdicts of a suite, as written to a file.

    machine:      its network name.
    is_complete:  whether all measurements have ended.
    seconds:      wall time of the suite; timings: that of each measurement.
    """

    suite: Suite
    commit: str
    date: str
    machine: str
    gpu: str
    driver: str | None
    read_bandwidth_tb_s: float | None
    is_complete: bool
    seconds: float
    timings: tuple[Timing, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def is_green(self) -> bool:
        return self.is_complete and all(verdict.state != "red" for verdict in self.verdicts)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def judge_suite(
    gates: Sequence[Gate],
    file: GateFile,
    done: Sequence[Measurement],
    measured: Mapping[str, Results],
    committed: Mapping[str, Results],
) -> list[Verdict]:
    """The verdicts on measurements that have ended: a red one for each that failed, as it does if an engine
    cannot keep strict_performance; those of the gates of their topics; those on all committed runs of each
    topic."""
    topics = dict.fromkeys(measurement.command.topic for measurement in done)
    failed = [
        Verdict(
            gate=f"{one.command.topic}: the measurement",
            topic=one.command.topic,
            state="red",
            reason=one.error,
        )
        for one in done
        if one.error
    ]
    return [
        *failed,
        *(judge(gate, file, measured, committed) for gate in gates if gate.topic in topics),
        *(
            judge_runs(topic, file.tolerance, measured[topic], committed.get(topic))
            for topic in topics
            if topic in COMPARED and topic in measured
        ),
    ]


def gates_of(suite: Suite, file: GateFile, *, peer: bool = False) -> list[Gate]:
    """The gates of a suite. Those of `micro` over a peer belong to `full` too, if that measures the peer."""
    more = [gate for gate in file.of("micro") if peer and "engine" in gate.over]
    return [*more, *file.of(suite)]


def print_list(gpu: str, file: GateFile, json: Path | None) -> int:
    """Print every gate with the last committed figure. Returns the exit status."""
    committed = read_folder(RESULTS / gpu)
    if not committed:
        known = ", ".join(sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
        print(f"gpu={gpu!r}: expected one with committed results: {known}", file=sys.stderr)
        return 2

    verdicts = listed(file, committed)
    show(f"committed results of {gpu}", COLUMNS, floor_rows(file, verdicts))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(verdicts), indent=1) + b"\n")
    return 0


def run_suite(given: argparse.Namespace, suite: Suite, file: GateFile, run: RunCommand) -> int:
    """Measure and judge a suite, print a verdict a line, write the report. Returns the exit status."""
    place = Place.here(machine.commit(), machine.gpu_name(given.device))
    if suite == "full" and (reason := history.reason_to_refuse(place)):
        print(reason, file=sys.stderr)
        return 2

    peer = given.peer is not None
    folder, path = given.out / suite, given.json or given.out / f"gates-{suite}.json"
    commands, gates = commands_of(suite, peer=peer), gates_of(suite, file, peer=peer)
    committed = read_folder(RESULTS / gpu_key(place.gpu))
    started_at, done = time.perf_counter(), list[Measurement]()
    path.unlink(missing_ok=True)
    for measurement in measure(commands, given.device, folder, run=run):
        done.append(measurement)
        measured = read_folder(folder)
        if suite == "full":
            measured = with_micro(measured, given.out / "micro", place)
        verdicts = judge_suite(gates, file, done, measured, committed)
        seconds = time.perf_counter() - started_at
        report = report_of(suite, place, done, len(commands), seconds, measured, verdicts)
        report.write(path)
    for verdict in verdicts:
        print(verdict)
    if suite == "micro":
        history.add_attempt(place, report.is_green)
    print(summary(report, place))
    print(f"written to {path}")
    return 0 if report.is_green else 1


def with_micro(found: Mapping[str, Results], folder: Path, place: Place) -> dict[str, Results]:
    """Results of `full`, and those runs of the last `micro` in this place that `full` does not measure."""
    merged = dict(found)
    for topic, results in read_folder(folder).items():
        if (results.commit, results.gpu) == (place.commit, place.gpu):
            merged[topic] = merge(results, found[topic]) if topic in found else results
    return merged


def report_of(
    suite: Suite,
    place: Place,
    done: Sequence[Measurement],
    num_commands: int,
    seconds: float,
    measured: Mapping[str, Results],
    verdicts: Sequence[Verdict],
) -> Report:
    """The report on measurements that have ended, of `num_commands`."""
    first = next(iter(measured.values()), None)
    return Report(
        suite=suite,
        commit=place.commit,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=place.machine,
        gpu=place.gpu,
        driver=machine.driver(),
        read_bandwidth_tb_s=first.read_bandwidth_tb_s if first is not None else None,
        is_complete=len(done) == num_commands,
        seconds=round(seconds, 1),
        timings=tuple(
            Timing(
                command=" ".join((one.command.module, *one.command.arguments)), seconds=round(one.seconds, 1)
            )
            for one in done
        ),
        verdicts=tuple(verdicts),
    )


def summary(report: Report, place: Place) -> str:
    """The last line: the number of verdicts of each kind, the wall time, and of `micro` the green runs in a
    row."""
    states = [verdict.state for verdict in report.verdicts]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    counts += f" in {report.seconds:.0f} s"
    if report.suite != "micro":
        return counts

    green = history.num_green_in_a_row(place)
    return f"{counts}; green {green} times in a row on this commit, machine and GPU"


def gates_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("suite", choices=("list", "micro", "full"))
    made.add_argument("--device", default=machine.default_device(), help="cuda or cuda:N")
    made.add_argument("--gpu", default="nvidia-h200", help="of the committed results to list")
    made.add_argument("--peer", choices=("vllm",), help="measure it in the same run, with full")
    made.add_argument("--out", type=Path, default=OUT, help="folder of results and report")
    made.add_argument("--json", type=Path, help="the report (default: gates-SUITE.json in the folder)")
    return made


def main(arguments: Sequence[str] | None = None, run: RunCommand = run_command) -> int:
    made = gates_parser()
    given: Any = made.parse_args(arguments)
    file = load_gates()
    if given.suite == "list":
        return print_list(given.gpu, file, given.json)

    if not given.device.startswith("cuda"):
        made.error(f"--device {given.device}: gates are measured on an NVIDIA GPU; `list` needs none")

    is_there = "VLLM_PATH" in os.environ or find_spec("vllm") is not None
    if given.peer and (given.suite != "full" or not is_there):
        made.error(
            f"--peer {given.peer}: expected with full, where the peer is installed or $VLLM_PATH names it"
        )

    try:
        return run_suite(given, given.suite, file, run)
    except ConfigError as error:
        made.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
