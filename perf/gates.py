"""Gates: performance that a change must not reduce, measured and judged.

    python -m perf.gates list     every floor, the last committed figure, the distance to the goal; no GPU
    python -m perf.gates micro    a minute: decoding of 8B shapes, plain and speculative in one process
    python -m perf.gates full     everything that one GPU can show; after three green runs of micro

The floors are in perf/gates.toml. A figure is red under its floor, more than 5% worse than the last committed
result of the same kind of GPU, or if an engine left its fast path; engines run with strict_performance.
Exit status: 0 if no verdict is red, 1 if one is, 2 if nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import gpu_key
from perf.gating import history
from perf.gating.figures import read_folder
from perf.gating.gate import Gate, GateFile, Suite, load_gates
from perf.gating.history import Place
from perf.gating.judging import Verdict, distance_text, judge, judge_runs
from perf.harness import machine
from perf.harness.commands import Command, CommandFailed, RunCommand, run_command
from perf.harness.processes import ROOT
from perf.harness.record import RESULTS, Results
from perf.harness.table import show

__all__ = ["COMMANDS", "Report", "judge_suite", "listed", "main", "measure"]

STRICT = ("--strict-performance",)
DRAFTS = ("--num-draft-tokens", "3", "--acceptance-length")
LONG = ("single-32k", "batch4-16k")
COMMANDS: dict[str, tuple[Command, ...]] = {
    "micro": (
        Command(
            module="perf.speculative",
            topic="speculative",
            arguments=(*STRICT, *DRAFTS, "3.2", "--repeats", "3", "--scenario", "single-512", *LONG),
        ),
    ),
    "full": (
        Command(module="perf.speculative", topic="speculative", arguments=(*STRICT, *DRAFTS, "3.2")),
        Command(
            module="perf.speculative",
            topic="speculative",
            arguments=(*STRICT, *DRAFTS, "3.0", "--scenario", *LONG),
        ),
        Command(module="perf.decode", topic="decode", arguments=STRICT),
        Command(module="perf.prefill", topic="prefill"),
        Command(module="perf.startup", topic="startup"),
        Command(module="perf.kernel_speed", topic="kernels", arguments=("--suite", "gemm", "attention")),
    ),
}
"""The measurements of a suite. One process measures plain and speculative decoding, which are compared."""
COMPARED = ("speculative", "decode", "prefill", "kernels")
"""Topics whose runs are all compared with the committed ones: those with rates, or times of kernels."""
PEER = dict.fromkeys(("perf.decode", "perf.prefill", "perf.speculative"), ("--peer", "vllm"))
"""Arguments that measure the peer as well."""
OUT = ROOT / ".cache" / "perf"


class Report(Struct, frozen=True, kw_only=True):
    """All verdicts of a suite, as written to a file. machine: its network name."""

    suite: Suite
    commit: str
    date: str
    machine: str
    gpu: str
    driver: str | None
    read_bandwidth_tb_s: float | None
    verdicts: tuple[Verdict, ...]

    @property
    def is_green(self) -> bool:
        return all(verdict.state != "red" for verdict in self.verdicts)


def measure(
    suite: str, device: str, folder: Path, *, peer: bool = False, run: RunCommand = run_command
) -> list[Verdict]:
    """Measure a suite, into result files in `folder`, which is emptied first. Returns a red verdict for every
    measurement that failed, as it does if an engine cannot keep strict_performance."""
    shutil.rmtree(folder, ignore_errors=True)
    failed = []
    for command in COMMANDS[suite]:
        if peer:
            arguments = command.arguments + PEER.get(command.module, ())
            command = msgspec.structs.replace(command, arguments=arguments)
        print(f"measuring {' '.join((command.module, *command.arguments))}", flush=True)
        try:
            run(command, device, folder, lambda line: print(f"  {line}", flush=True))
        except CommandFailed as error:
            name = f"{command.topic}: the measurement"
            failed.append(Verdict(gate=name, topic=command.topic, state="red", reason=str(error)))
    return failed


def judge_suite(
    suite: Suite, file: GateFile, measured: Mapping[str, Results], committed: Mapping[str, Results]
) -> list[Verdict]:
    """The verdicts of a suite's gates, then those on all committed runs of each topic that it measured."""
    gates = file.of("micro") if suite == "micro" else file.of("micro", "full")
    own = {command.topic for command in COMMANDS[suite]}
    topics = [topic for topic in COMPARED if topic in own and topic in measured]
    return [
        *(judge(gate, file, measured, committed) for gate in gates),
        *(judge_runs(topic, file.tolerance, measured[topic], committed.get(topic)) for topic in topics),
    ]


def listed(file: GateFile, committed: Mapping[str, Results]) -> list[Verdict]:
    """The verdict of every gate on committed results, by its floor alone."""
    return [judge(gate, file, committed, {}) for gate in file.gates]


def row_of(gate: Gate, verdict: Verdict) -> tuple[str, ...]:
    """A row of the list."""
    is_under = verdict.figure is not None and not gate.passes(verdict.figure)
    return (
        gate.name,
        gate.suite,
        "-" if verdict.figure is None else f"{verdict.figure:.4g}{verdict.unit}",
        f"{'at most ' if gate.less_is_better else ''}{gate.floor:g}{gate.unit}",
        f"{gate.goal:g}{gate.unit}",
        distance_text(verdict),
        "missed" if is_under else verdict.reason,
    )


def print_list(gpu: str, file: GateFile, json: Path | None) -> int:
    """Print every gate with the last committed figure. Returns the exit status."""
    committed = read_folder(RESULTS / gpu)
    if not committed:
        known = ", ".join(sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
        print(f"gpu={gpu!r}: expected one with committed results: {known}", file=sys.stderr)
        return 2

    verdicts = listed(file, committed)
    rows = [row_of(gate, verdict) for gate, verdict in zip(file.gates, verdicts, strict=True)]
    show(f"committed results of {gpu}", ("figure", "suite", "last", "floor", "goal", "distance", ""), rows)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(verdicts), indent=1) + b"\n")
    return 0


def run_suite(given: argparse.Namespace, suite: Suite, file: GateFile, run: RunCommand) -> int:
    """Measure and judge a suite, print a verdict a line, write the report. Returns the exit status."""
    place = Place.here(machine.commit(), machine.gpu_name(given.device))
    if suite == "full" and (reason := history.reason_to_refuse(place)):
        print(reason, file=sys.stderr)
        return 2

    folder = given.out / suite
    failed = measure(suite, given.device, folder, peer=given.peer is not None, run=run)
    measured = read_folder(folder)
    verdicts = failed + judge_suite(suite, file, measured, read_folder(RESULTS / gpu_key(place.gpu)))
    first = next(iter(measured.values()), None)
    report = Report(
        suite=suite,
        commit=place.commit,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=place.machine,
        gpu=place.gpu,
        driver=machine.driver(),
        read_bandwidth_tb_s=first.read_bandwidth_tb_s if first is not None else None,
        verdicts=tuple(verdicts),
    )
    path = given.json or given.out / f"gates-{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    for verdict in verdicts:
        print(verdict)
    if suite == "micro":
        history.add_attempt(place, report.is_green)
    print(summary(report, place))
    print(f"written to {path}")
    return 0 if report.is_green else 1


def summary(report: Report, place: Place) -> str:
    """The last line: how many verdicts of each kind, and how often in a row they were green."""
    states = [verdict.state for verdict in report.verdicts]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
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

    return run_suite(given, given.suite, file, run)


if __name__ == "__main__":
    sys.exit(main())
