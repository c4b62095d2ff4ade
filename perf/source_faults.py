"""Faults that the tests have to find: each is planted into a copy of the package, and tests are run.

    python -m perf.source_faults --out results.json [words of names]

Runs the tests of all faults on a copy without a fault, which have to pass, and then the tests of each fault
on a copy with it, of which one has to fail. Prints an outcome a line: "red" if a test has failed, "green" if
none has, and "broken" if pytest ended in another way. Only the tests of `make unit` are run. Exit status: 0
if every fault was found and nothing else, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from perf.harness import machine
from perf.harness.processes import ROOT, module_command, with_paths

__all__ = ["FILE", "Fault", "Outcome", "load_faults", "main", "occurrences", "plant"]

FILE = Path(__file__).with_suffix(".toml")
SOURCE = ROOT / "src"
SUFFIXES = (".py", ".cu")
TESTS = "not gpu and not perf and not slow"
CHECK = "planted_copy"
CHECKING = """
from pathlib import Path

import drift_sdk

assert Path(__file__).parent in Path(drift_sdk.__file__).parents, f"{drift_sdk.__file__} is no copy"
"""
"""A plugin of pytest beside the copy: it fails unless the copy is imported."""
STATES: dict[int, Literal["green", "red"]] = {0: "green", 1: "red"}
"""By the exit status of pytest."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """A fault, as the comment in the file of faults describes it."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of the tests of a fault. failed: the first test that failed, or the last line of pytest."""

    fault: str
    state: Literal["green", "red", "broken"]
    seconds: float
    failed: str | None = None


class Report(Struct, frozen=True, kw_only=True):
    commit: str
    date: str
    versions: dict[str, str]
    runs: list[Outcome]


def load_faults(path: Path = FILE) -> list[Fault]:
    """The faults in a file."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Fault]])["fault"]


def occurrences(text: str, folder: Path = SOURCE) -> list[Path]:
    """The files of a folder in which a text occurs, each as often as it does there."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    return [path for path in files for _ in range(path.read_text().count(text))]


def plant(fault: Fault, folder: Path) -> None:
    """Plant a fault in a copy of src. Raises ValueError unless its old text occurs there once."""
    found = occurrences(fault.old, folder)
    if len(found) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {len(found)} times, expected once")

    (path,) = found
    path.write_text(path.read_text().replace(fault.old, fault.new))


def outcome_of(fault: Fault | None, tests: Sequence[str]) -> Outcome:
    """Run tests on a copy of src, with a fault if one is given."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "src")
        shutil.copytree(SOURCE, copy)
        if fault is not None:
            plant(fault, copy)
        (copy / f"{CHECK}.py").write_text(CHECKING)
        options = ("-q", "-x", "-p", "no:benchmark", "-p", "no:cacheprovider", "-p", CHECK, "-m", TESTS)
        begin_s = time.monotonic()
        done = subprocess.run(
            module_command("pytest", *options, *tests),
            cwd=ROOT,
            env=with_paths({**os.environ, "PYTHONPATH": ""}, str(copy)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = next(
        (line for line in lines if re.match("(FAILED|ERROR) tests/", line)), lines[-1] if lines else ""
    )
    return Outcome(
        fault="none" if fault is None else fault.name,
        state=STATES.get(done.returncode, "broken"),
        seconds=round(time.monotonic() - begin_s, 1),
        failed=None if done.returncode == 0 else re.sub(r"^(FAILED|ERROR) | - .*", "", failed),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("words", nargs="*", help="only faults whose names have one of these")
    made.add_argument("--out", type=Path, help="file for the outcomes")
    made.add_argument("--jobs", type=int, default=1, help="faults that are tested at a time")
    given: Any = made.parse_args(arguments)
    faults = [
        fault for fault in load_faults() if not given.words or any(w in fault.name for w in given.words)
    ]
    every = sorted({test for fault in faults for test in fault.tests})
    with ThreadPoolExecutor(given.jobs) as pool:
        running = [pool.submit(outcome_of, None, every)]
        running += [pool.submit(outcome_of, fault, fault.tests) for fault in faults]
        outcomes: list[Outcome] = []
        for each in running:
            outcomes.append(each.result())
            found = outcomes[-1]
            print(f"{found.state:6} {found.seconds:6.1f} s  {found.fault}: {found.failed or ''}", flush=True)
    if given.out is not None:
        report = Report(
            commit=machine.commit(),
            date=time.strftime("%Y-%m-%d"),
            versions=machine.versions("triton", "transformers", "pytest"),
            runs=outcomes,
        )
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0 if [each.state for each in outcomes] == ["green"] + ["red"] * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
