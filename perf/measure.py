"""Measure what perf/results holds: all measurements of perf/measurements.toml, or some, side by side on the
GPUs of this machine.

    python -m perf.measure list
    python -m perf.measure run --out folder
    python -m perf.measure run --out folder --gpus 0 1 --seconds 560 "gpt-oss-120b" "gpt-oss-120b drafts"
    python -m perf.merge folder/*/*.json

Each measurement runs in a process of its own, with its GPUs alone, and has a folder of its own for its result
file and log.txt. What is done is not measured again on the same commit. With --seconds, a measurement is left
out if it would not end in time. Those beside vLLM need it installed, or VLLM_PATH, a
folder to import it from.
Exit status: 0 if all were measured, 1 if one was not.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec import Struct

from drift_sdk.errors import ConfigError
from perf.harness import machine
from perf.harness.gpu_queue import Job, Outcome, run_jobs
from perf.harness.numbers import over_zero
from perf.harness.processes import ROOT, module_command
from perf.harness.table import show

__all__ = ["FILE", "Measurement", "load_measurements", "main"]

FILE = ROOT / "perf" / "measurements.toml"
OUT = ROOT / ".cache" / "perf" / "measurements"
DONE = "done.txt"
"""File of a measurement's folder: the commit that it was made on."""


class Measurement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the file, which describes the fields."""

    name: str
    module: str
    topic: str
    seconds: float
    arguments: str = ""
    num_gpus: int = 1

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return self.name.replace(" ", "-")

    @property
    def needs_vllm(self) -> bool:
        return "--peer" in shlex.split(self.arguments)

    def line(self, folder: Path) -> tuple[str, ...]:
        """The command line that writes the result into `folder`."""
        ends = ("--out", str(folder / f"{self.topic}.json"))
        return tuple(module_command(self.module, *shlex.split(self.arguments), *ends))


class File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    measurement: tuple[Measurement, ...]


def load_measurements(file: Path = FILE) -> dict[str, Measurement]:
    """Read measurements, by name. Raises ConfigError for a file that has none, or two of one name."""
    try:
        found = msgspec.convert(tomllib.loads(file.read_text()), File).measurement
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError.of("file", str(file), f"a file of measurements: {error}") from error

    by_name = {one.name: one for one in found}
    if len({one.folder for one in found}) < len(found):
        raise ConfigError.of("file", str(file), "measurements of different names")

    return by_name


def is_done(measurement: Measurement, folder: Path, commit: str) -> bool:
    """Whether the folder has the measurement of a commit."""
    path = folder / measurement.folder / DONE
    return path.is_file() and path.read_text().strip() == commit


def show_list(measurements: Sequence[Measurement]) -> None:
    rows = [
        (one.name, str(one.num_gpus), f"{one.seconds:g}", " ".join((one.module, one.arguments)))
        for one in measurements
    ]
    show("measurements", ("name", "GPUs", "seconds", "command"), rows)


def run(measurements: Sequence[Measurement], gpus: Sequence[str], limit_s: float | None, out: Path) -> int:
    """Make measurements that are not done. Returns the exit status."""
    commit = machine.commit()
    wanted = {one.name: one for one in measurements if not is_done(one, out, commit)}
    jobs = [
        Job(
            name=one.name,
            line=one.line(out / one.folder),
            num_gpus=one.num_gpus,
            seconds=one.seconds,
            log=out / one.folder / "log.txt",
        )
        for one in wanted.values()
    ]

    def on_change(job: Job, outcome: Outcome | None) -> None:
        said = "begins" if outcome is None else f"{outcome.state}, {outcome.seconds:.0f} s"
        print(f"{job.name}: {said}", flush=True)
        if outcome is not None and outcome.state == "done":
            (job.log.parent / DONE).write_text(f"{commit}\n")
        elif outcome is not None and outcome.state != "left out":
            print(f"  {last_line(job.log)}", flush=True)

    outcomes = run_jobs(jobs, gpus, limit_s, on_change)
    return 0 if all(outcome.state == "done" for outcome in outcomes) else 1


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{log}: {lines[-1].strip()[:200]}" if lines else f"{log} is empty"


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("command", choices=("list", "run"))
    made.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    made.add_argument("--gpus", nargs="+", default=["0"], metavar="N", help="as in CUDA_VISIBLE_DEVICES")
    made.add_argument("--seconds", type=over_zero, help="limit of the whole run")
    made.add_argument("--out", type=Path, default=OUT, help="folder")
    given = made.parse_intermixed_args(arguments)  # names may follow options
    known = load_measurements()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        made.error(f"NAME {unknown[0]!r}: expected one of {', '.join(map(repr, known))}")

    chosen = [known[name] for name in given.names or known]
    if given.command == "list":
        show_list(chosen)
        return 0

    has_vllm = "VLLM_PATH" in os.environ or find_spec("vllm") is not None
    if any(one.needs_vllm for one in chosen) and not has_vllm:
        made.error("some measurements need vLLM: expected it installed, or VLLM_PATH to name its folder")

    return run(chosen, given.gpus, given.seconds, given.out)


if __name__ == "__main__":
    sys.exit(main())
