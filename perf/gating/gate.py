"""Gates: floors and goals of measured figures, as `perf/gates.toml` states them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from drift_sdk.errors import ConfigError
from perf.harness.processes import ROOT

__all__ = ["FILE", "Gate", "GateFile", "Suite", "load_gates"]

FILE = ROOT / "perf" / "gates.toml"
Suite = Literal["micro", "full", "results"]
SPEEDS = ("read_bandwidth_tb_s", "matmul_tflop_s")
ACCEPTANCE_FIELDS = ("acceptance_length", "measured_acceptance_length", "several_share", "accepted_at")


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the file. The file describes the fields."""

    name: str
    suite: Suite
    topic: str
    where: dict[str, Any]
    by: str
    cases: dict[str, tuple[float, float]]
    field: str
    over: dict[str, Any] = {}
    unit: str = ""
    less_is_better: bool = False
    normalised_by: Literal["read_bandwidth_tb_s", "matmul_tflop_s"] | None = None
    is_compared: bool = True
    slow_paths: tuple[str, ...] = ()


class Gate(Struct, frozen=True, kw_only=True):
    """One case of a row, with its floor and its goal.

    where: the row's fields and the one of the case.
    """

    name: str
    suite: Suite
    topic: str
    where: dict[str, Any]
    field: str
    over: dict[str, Any]
    unit: str
    less_is_better: bool
    normalised_by: str | None
    is_compared: bool
    slow_paths: tuple[str, ...]
    floor: float
    goal: float

    def passes(self, figure: float) -> bool:
        """Whether a figure is on the right side of the floor."""
        return figure <= self.floor if self.less_is_better else figure >= self.floor

    def distance(self, figure: float) -> float:
        """By which share the figure has to improve to reach the goal; 0 or less if it has."""
        return figure / self.goal - 1 if self.less_is_better else self.goal / figure - 1


class GateFile(Struct, frozen=True, kw_only=True):
    """All gates.

    tolerance: share by which a figure may be worse than the last committed one.
    reference: speeds to which normalised figures are scaled.
    """

    tolerance: float
    reference: dict[str, float]
    gates: tuple[Gate, ...]

    def of(self, *suites: Suite) -> tuple[Gate, ...]:
        """The gates of some suites, in the order of the file."""
        return tuple(gate for gate in self.gates if gate.suite in suites)


class TomlFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    tolerance: float
    reference: dict[str, float]
    row: tuple[Row, ...]


def load_gates(file: Path = FILE) -> GateFile:
    """Read gates from a TOML file.

    Raises ConfigError naming field, value and range for a file that is not one, for bounds that contradict
    each other, and for a bound on acceptance that is not real.
    """
    try:
        found = msgspec.convert(tomllib.loads(file.read_text()), TomlFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError.of("file", str(file), f"a file of gates: {error}") from error

    if not 0 < found.tolerance < 1:
        raise ConfigError.of("tolerance", found.tolerance, "a number between 0 and 1")

    for speed in SPEEDS:
        if not found.reference.get(speed, 0) > 0:
            raise ConfigError.of(f"reference.{speed}", found.reference.get(speed), "a number above 0")

    gates: dict[tuple[str, str], Gate] = {}
    for row in found.row:
        for case, bounds in row.cases.items():
            gate = gate_of(row, case, bounds)
            if (gate.topic, gate.name) in gates:
                raise ConfigError.of("name", gate.name, "a name that no other gate has")
            gates[gate.topic, gate.name] = gate
    return GateFile(tolerance=found.tolerance, reference=found.reference, gates=tuple(gates.values()))


def gate_of(row: Row, case: str, bounds: tuple[float, float]) -> Gate:
    """One case of a row. Raises ConfigError."""
    floor, goal = bounds
    name = f"{row.name}: {case}"
    if not 0 < floor < float("inf") or not 0 < goal < float("inf"):
        raise ConfigError.of(name, [floor, goal], "a floor and a goal above 0")

    if (goal > floor) if row.less_is_better else (goal < floor):
        side = "at most" if row.less_is_better else "at least"
        raise ConfigError.of(name, [floor, goal], f"a goal of {side} the floor")

    if row.field in ACCEPTANCE_FIELDS and row.where.get("acceptance") != "real":
        allowed = f'where.acceptance = "real" with field {row.field}: simulated acceptance shows nothing'
        raise ConfigError.of(name, row.where.get("acceptance"), allowed)

    where = row.where | {row.by: case}
    fields = {name: getattr(row, name) for name in Gate.__struct_fields__ if hasattr(row, name)}
    return Gate(**fields | {"name": name, "where": where, "floor": floor, "goal": goal})
