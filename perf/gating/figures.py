"""Figures: what the runs of result files say about a gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from perf.gating.gate import Gate
from perf.harness.record import Results, group_of, read
from perf.peers.anchors import anchor_of, is_void

__all__ = ["Figure", "figure_of", "read_folder"]

UNSAID = ("num_draft_tokens", "tree", "config", "is_adaptive", "temperature", "top_p")
"""Fields that identify a run: where a gate does not name them, they are absent, null, zero or false."""
FAST_EXECUTOR = "graph"


class Figure(Struct, frozen=True, kw_only=True):
    """The figure of a gate in a result file.

    value:     what is held against the floor.
    own:       the part of it that is compared with a committed one: without its denominator, at the speed
               `speed` of the machine.
    problem:   the reason for which the runs are not what the gate is about; empty for none.
    commit:    of the measured code, and date of the measurement.
    """

    value: float
    own: float
    speed: float = 1.0
    is_anchored: bool = False
    problem: str = ""
    commit: str = ""
    date: str = ""


def read_folder(folder: Path) -> dict[str, Results]:
    """The result files of a folder by topic; none if there is no such folder."""
    return {file.stem: read(file) for file in sorted(folder.glob("*.json"))} if folder.is_dir() else {}


def figure_of(gate: Gate, found: Mapping[str, Results], reference: Mapping[str, float]) -> Figure | str:
    """The figure of a gate in result files by topic, or the reason why there is none.

    Runs that differ in `repeat` alone are repeats, and the median counts. Of several kinds of runs, the worst
    counts.
    """
    results = found.get(gate.topic)
    if results is None:
        return f"no {gate.topic}.json"

    runs = [run for run in results.runs if matches(run, {"engine": "drift"} | gate.where)]
    if not runs:
        return "no such run"

    figures = [one_figure(gate, run, results, reference) for run in runs]
    missing = next((figure for figure in figures if isinstance(figure, str)), None)
    if missing is not None:
        return missing

    measured = [figure for figure in figures if isinstance(figure, Figure)]
    groups: dict[tuple[Any, ...], list[Figure]] = {}
    for run, figure in zip(runs, measured, strict=True):
        groups.setdefault(group_of(run), []).append(figure)
    medians = [median_of(group) for group in groups.values()]
    worst = max if gate.less_is_better else min
    return worst(medians, key=lambda figure: figure.value)


def one_figure(
    gate: Gate, run: dict[str, Any], results: Results, reference: Mapping[str, float]
) -> Figure | str:
    """The figure of one run, or the reason why there is none."""
    own = field_of(run, gate.field)
    if own is None:
        return f"the run has no {gate.field}"

    problem = problem_of(run, gate.slow_paths)
    speed = 1.0
    if gate.normalised_by is not None:
        given = run.get(gate.normalised_by, getattr(results, gate.normalised_by, None))
        if given is None:
            return f"the run has no {gate.normalised_by}"
        speed = float(given)

    if not gate.over:
        scale = reference[gate.normalised_by] / speed if gate.normalised_by is not None else 1.0
        value, is_anchored = own * (1 / scale if gate.less_is_better else scale), False
    else:
        other = denominator(gate, run, results)
        if isinstance(other, str):
            return other
        value, is_anchored = own / other[0], other[1]

    if not math.isfinite(value):
        problem = f"the figure is {value}"
    commit, date = run.get("commit", results.commit), run.get("date", results.date)
    return Figure(
        value=value,
        own=own,
        speed=speed,
        is_anchored=is_anchored,
        problem=problem,
        commit=commit,
        date=date,
    )


def denominator(gate: Gate, run: dict[str, Any], results: Results) -> tuple[float, bool] | str:
    """The figure that a run is divided by, and whether it is an anchor; or the reason why there is none.

    The other run has the same commit and repeat: only then it was measured beside this one.
    """
    same = {name: run.get(name) for name in ("model", "dtype", "scenario", "repeat", *gate.where)}
    for other in results.runs:
        is_same_run = other.get("commit", results.commit) == run.get("commit", results.commit)
        if is_same_run and matches(other, same | {"engine": run["engine"]} | gate.over):
            value = field_of(other, gate.field)
            if value and not is_void(other, results.gpu):
                return value, False

    anchor = anchor_of(run | gate.over, results.gpu) if gate.field == "tokens_per_s" else None
    if anchor is not None:
        return anchor.tokens_per_s, True

    wanted = ", ".join(f"{name}={value or None!r}" for name, value in gate.over.items())
    return f"no run with {wanted} beside it"


def matches(run: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Return True if a run has the given fields, and none of UNSAID that are not given. Values that are
    null, zero, false or empty are alike."""
    expected = dict.fromkeys(UNSAID) | dict(where)
    return all((run.get(name) or None) == (value or None) for name, value in expected.items())


def problem_of(run: Mapping[str, Any], allowed: Collection[str]) -> str:
    """The reason for which a run of this engine does not count: another executor, or slow paths that are not
    allowed."""
    executor = run.get("executor", FAST_EXECUTOR)
    if executor != FAST_EXECUTOR:
        return f"ran on the executor {executor!r} instead of {FAST_EXECUTOR!r}"

    counts = run.get("slow_paths") or {}
    slow = {name: count for name, count in counts.items() if count and name not in allowed}
    return "slow paths: " + ", ".join(f"{name} {count}" for name, count in slow.items()) if slow else ""


def field_of(run: Mapping[str, Any], path: str) -> float | None:
    """A number in a run by its path, such as "ttft_ms.p95"; None if it is missing."""
    found: Any = run
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def median_of(figures: Sequence[Figure]) -> Figure:
    """The median of repeats, each number by itself; the first problem among them."""
    return Figure(
        value=statistics.median(figure.value for figure in figures),
        own=statistics.median(figure.own for figure in figures),
        speed=statistics.median(figure.speed for figure in figures),
        is_anchored=any(figure.is_anchored for figure in figures),
        problem=next((figure.problem for figure in figures if figure.problem), ""),
        commit=", ".join(dict.fromkeys(figure.commit for figure in figures)),
        date=max(figure.date for figure in figures),
    )
