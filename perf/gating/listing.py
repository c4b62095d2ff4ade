"""The list of all floors, with the last committed figure of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perf.gating.gate import Gate, GateFile
from perf.gating.judging import Verdict, distance_text, judge
from perf.harness.record import Results

__all__ = ["COLUMNS", "floor_rows", "listed"]

COLUMNS = ("figure", "suite", "last", "floor", "goal", "distance", "commit", "date", "")


def listed(file: GateFile, committed: Mapping[str, Results]) -> list[Verdict]:
    """The verdict of every gate on committed results, by its floor alone."""
    return [judge(gate, file, committed, {}) for gate in file.gates]


def floor_rows(file: GateFile, verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """A row of COLUMNS for every gate and its verdict."""
    return [row_of(gate, verdict) for gate, verdict in zip(file.gates, verdicts, strict=True)]


def row_of(gate: Gate, verdict: Verdict) -> tuple[str, ...]:
    return (
        gate.name,
        gate.suite,
        "not measured" if verdict.figure is None else f"{verdict.figure:.4g}{verdict.unit}",
        f"{'at most ' if gate.less_is_better else ''}{gate.floor:g}{gate.unit}",
        f"{gate.goal:g}{gate.unit}",
        distance_text(verdict),
        verdict.commit,
        verdict.date,
        state_of(gate, verdict),
    )


def state_of(gate: Gate, verdict: Verdict) -> str:
    """ "met", "missed", or the reason why there is no figure, or why it does not count."""
    if verdict.figure is None:
        return verdict.reason

    if not gate.passes(verdict.figure):
        return "missed"

    return "met" if verdict.state == "green" else verdict.reason
