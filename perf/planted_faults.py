"""Faults that the gates have to find: each is planted into a copy of the package, measured and judged.

    python -m perf.planted_faults --out folder

Measures single-512 of `micro` with one repeat: as it is, which has to be green, and then with each fault,
which has to be red for the reason that belongs to it. faults.json in the folder has all verdicts; it is
written after each fault. Exit status: 0 if every fault was found and nothing else, else 1.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import drift_sdk
from drift_sdk._kernels.gemm.tuning import gpu_key
from drift_sdk.errors import ConfigError
from perf.gates import OUT, judge_suite
from perf.gating.figures import read_folder
from perf.gating.gate import FILE, GateFile, load_gates
from perf.gating.judging import Verdict
from perf.gating.measuring import DRAFTS, STRICT, Measurement, measure
from perf.harness import machine
from perf.harness.commands import Command, run_command
from perf.harness.record import RESULTS

__all__ = ["FAULTS", "Fault", "Outcome", "main", "plant"]

SCENARIO = "single-512"
COMMAND = Command(
    module="perf.speculative",
    topic="speculative",
    arguments=(*STRICT, *DRAFTS, "3.2", "--repeats", "1", "--scenario", SCENARIO),
)
FALLBACK = """

def _device_obstacle(device: torch.device) -> str | None:
    return "a planted fault"
"""
SLOWED = """

_once = fastest_multiply


def fastest_multiply(x: Tensor, weight: Tensor, out: Tensor, config: GemmConfig) -> bool:
    _once(x, weight, out, config)
    return _once(x, weight, out, config)
"""


class Fault(Struct, frozen=True):
    """A fault.

    reason:  part of the verdict that shows that the fault was found, and nothing else.
    plant:   writes it into a copy of the package, given its folder and the key of the GPU; None for a fault
             of the gates' file.
    """

    reason: str
    plant: Callable[[Path, str], None] | None = None


class Outcome(Struct, frozen=True, kw_only=True):
    """The judgement of one measurement. is_right: whether it is the one that belongs to the fault."""

    fault: str
    is_right: bool
    seconds: float
    verdicts: tuple[Verdict, ...]


def append(text: str, file: str, package: Path, gpu: str) -> None:
    """Append code to a file of the package."""
    path = package / file
    path.write_text(path.read_text() + text)


def truncate_table(package: Path, gpu: str) -> None:
    """Cut the GPU's table of launch configurations in the middle."""
    path = table_path(package, gpu)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty_table(package: Path, gpu: str) -> None:
    """Remove all products from the GPU's table."""
    path = table_path(package, gpu)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gemms": {}}))


def table_path(package: Path, gpu: str) -> Path:
    """The GPU's table. Raises ConfigError if it has none, so that there is nothing to plant a fault in."""
    path = package / "_kernels" / "gemm" / "tuned" / f"{gpu}.json"
    if not path.is_file():
        raise ConfigError.of("gpu", gpu, "one with a table of launch configurations")

    return path


FAULTS = {
    "raised floor": Fault("under the floor"),
    "forced fallback": Fault("a planted fault", partial(append, FALLBACK, "startup/executor_factory.py")),
    "truncated table": Fault("truncated", truncate_table),
    "emptied table": Fault("measured configurations of all weights", empty_table),
    "slowed kernel": Fault("under the floor", partial(append, SLOWED, "_kernels/gemm/gemm.py")),
}
"""Name -> fault."""


def plant(fault: Fault, folder: Path, gpu: str) -> list[str]:
    """Copy the package into the folder and plant a fault in it. Returns the folders to import from: none for
    a fault outside the package."""
    if fault.plant is None:
        return []

    package = folder / "drift_sdk"
    source = Path(drift_sdk.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    fault.plant(package, gpu)
    return [str(folder)]


def raised_floors(folder: Path) -> GateFile:
    """The gates from a file whose floors for the scenario are far above any figure."""
    path = folder / FILE.name
    path.write_text(re.sub(rf"(?m)^{SCENARIO} = \[.*\]$", f"{SCENARIO} = [9000.0, 9000.0]", FILE.read_text()))
    return load_gates(path)


def judged(file: GateFile, done: Measurement, folder: Path, gpu: str) -> list[Verdict]:
    """The verdicts of the gates of `micro` for the scenario."""
    gates = [gate for gate in file.of("micro") if gate.where["scenario"] == SCENARIO]
    return judge_suite(gates, file, [done], read_folder(folder), read_folder(RESULTS / gpu))


def is_found(fault: Fault | None, done: Measurement, verdicts: Sequence[Verdict]) -> bool:
    """Return True if the verdicts are those that belong to a fault, or to none. A fault that makes the code
    slow does not make the measurement fail; the verdict of any other names its reason."""
    red = [verdict for verdict in verdicts if verdict.state == "red"]
    if fault is None:
        return not red

    is_about_speed = fault.reason == "under the floor"
    return bool(done.error) != is_about_speed and any(fault.reason in verdict.reason for verdict in red)


def main(arguments: Sequence[str] | None = None, run: Callable[..., None] = run_command) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default=machine.default_device(), help="cuda or cuda:N")
    made.add_argument("--out", type=Path, default=OUT / "faults", help="folder of results and verdicts")
    given: Any = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"--device {given.device}: gates are measured on an NVIDIA GPU")

    outcomes: list[Outcome] = []
    path = given.out / "faults.json"
    for name, fault in {"none": None, **FAULTS}.items():
        outcomes.append(outcome_of(name, fault, given.device, given.out, run))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=1) + b"\n")
        for verdict in outcomes[-1].verdicts:
            print(f"  {verdict}")
        expected = "green" if fault is None else "red"
        print(f"{name}: {expected if outcomes[-1].is_right else 'WRONG'}, expected {expected}", flush=True)
    print(f"written to {path}")
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


def outcome_of(name: str, fault: Fault | None, device: str, out: Path, run: Callable[..., None]) -> Outcome:
    """Measure and judge with a fault, or without one. A fault of the gates' file is judged by the results
    without a fault, which come first."""
    gpu = gpu_key(machine.gpu_name(device))
    folder = out / name.replace(" ", "-")
    with tempfile.TemporaryDirectory() as temporary:
        if fault is not None and fault.plant is None:
            folder, file = out / "none", raised_floors(Path(temporary))
            done = Measurement(command=COMMAND, seconds=0.0)
        else:
            file = load_gates()
            paths = plant(fault, Path(temporary), gpu) if fault is not None else []
            (done,) = measure([COMMAND], device, folder, run=partial(run, paths=paths))
    verdicts = judged(file, done, folder, gpu)
    return Outcome(
        fault=name,
        is_right=is_found(fault, done, verdicts),
        seconds=round(done.seconds, 1),
        verdicts=tuple(verdicts),
    )


if __name__ == "__main__":
    sys.exit(main())
