"""Verdicts: the figures of gates in result files, held against floors and the last committed figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from perf.gating.gate import Gate, GateFile
from perf.harness.record import Results, identity_of, read
from perf.peers.anchors import anchor_of, is_void

__all__ = ["Figure", "Verdict", "figure_of", "judge", "judge_runs", "read_folder"]

UNSAID = ("num_draft_tokens", "tree", "config", "is_adaptive", "temperature", "top_p")
"""Fields that identify a run: where a gate does not name them, they are absent, null, zero or false."""
FAST_EXECUTOR = "graph"
LEAST_KERNEL_US = 10.0
"""Shorter calls vary by more than any tolerance."""


class Figure(Struct, frozen=True, kw_only=True):
    """The figure of a gate in a result file.

    value:     what is held against the floor.
    own:       the part of it that is compared with a committed one: without its denominator, at the speed
               `speed` of the machine.
    problem:   the reason for which the runs are not what the gate is about; empty for none.
    """

    value: float
    own: float
    speed: float = 1.0
    is_anchored: bool = False
    problem: str = ""


class Verdict(Struct, frozen=True, kw_only=True):
    """A gate's verdict.

    distance:   share by which the figure has to improve to reach the goal.
    committed:  the last committed figure of the same GPU, as it would be at this machine's speed.
    """

    gate: str
    topic: str
    state: Literal["green", "red", "not measured"]
    figure: float | None = None
    floor: float | None = None
    goal: float | None = None
    unit: str = ""
    distance: float | None = None
    committed: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        """The verdict in a line."""
        if self.figure is None:
            return f"{self.state:12}  {self.gate}: {self.reason}"

        parts = []
        if self.floor is not None and self.goal is not None:
            parts = [f"floor {self.floor:g}", f"goal {self.goal:g}", distance_text(self)]
        if self.committed is not None:
            parts.append(f"committed {self.committed:.4g}")
        end = f" ({', '.join(parts)})" + (f": {self.reason}" if self.reason else "")
        return f"{self.state:12}  {self.gate}: {self.figure:.4g}{self.unit}{end}"


def distance_text(verdict: Verdict) -> str:
    """ "4.2% to go", or "goal reached"; empty without a figure."""
    if verdict.distance is None:
        return ""

    return "goal reached" if verdict.distance <= 0 else f"{verdict.distance:.1%} to go"


def read_folder(folder: Path) -> dict[str, Results]:
    """The result files of a folder by topic; none if there is no such folder."""
    return {file.stem: read(file) for file in sorted(folder.glob("*.json"))} if folder.is_dir() else {}


def figure_of(gate: Gate, found: Mapping[str, Results], reference: Mapping[str, float]) -> Figure | str:
    """The figure of a gate in result files by topic, or the reason why there is none.

    Runs that differ in `repeat` alone are repeats, and the median counts. Of a gate for all models, the worst
    run counts.
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
        groups.setdefault(identity_of({**run, "repeat": None}), []).append(figure)
    medians = [median_of(group) for group in groups.values()]
    worst = max if gate.less_is_better else min
    return worst(medians, key=lambda figure: figure.value)


def one_figure(
    gate: Gate, run: dict[str, Any], results: Results, reference: Mapping[str, float]
) -> Figure | str:
    """The figure of one run, or the reason why there is none."""
    own = field_of(run, gate.field)
    if own is not None and gate.minus is not None:
        part = field_of(run, gate.minus)
        own = None if part is None else own - part
    if own is None:
        return f"the run has no {gate.field}"

    problem = problem_of(run)
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
    return Figure(value=value, own=own, speed=speed, is_anchored=is_anchored, problem=problem)


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
    """Whether a run has the given fields, and none of UNSAID that are not given. Values that are null, zero,
    false or empty are alike."""
    expected = dict.fromkeys(UNSAID) | dict(where)
    return all((run.get(name) or None) == (value or None) for name, value in expected.items())


def problem_of(run: Mapping[str, Any]) -> str:
    """The reason for which a run of this engine does not count: another executor, or slow paths."""
    executor = run.get("executor", FAST_EXECUTOR)
    if executor != FAST_EXECUTOR:
        return f"ran on the executor {executor!r} instead of {FAST_EXECUTOR!r}"

    slow = {name: count for name, count in (run.get("slow_paths") or {}).items() if count}
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
    )


def judge(
    gate: Gate, file: GateFile, measured: Mapping[str, Results], committed: Mapping[str, Results]
) -> Verdict:
    """The verdict of a gate on new results. committed: the last committed ones of the same kind of GPU; empty
    to judge by the floor alone.

    A gate over a peer that has neither a run nor an anchor is not measured. Without any other figure, the
    verdict is red.
    """
    found = figure_of(gate, measured, file.reference)
    common: dict[str, Any] = {"gate": gate.name, "topic": gate.topic}
    bounds: dict[str, Any] = {"floor": gate.floor, "goal": gate.goal, "unit": gate.unit}
    if isinstance(found, str):
        is_peerless = "engine" in gate.over and found.endswith("beside it")
        state: Literal["red", "not measured"] = "not measured" if is_peerless else "red"
        return Verdict(**common, **bounds, state=state, reason=found)

    last = figure_of(gate, committed, file.reference) if gate.is_compared else ""
    before: float | None = None
    reasons = [found.problem] if found.problem else []
    if not gate.passes(found.value):
        reasons.append("over the most allowed" if gate.less_is_better else "under the floor")
    if isinstance(last, Figure):
        # Both as at this machine's speed. The figure over a peer is shown with this run's peer.
        own, own_before = (found.own, last.own) if gate.normalised_by else (found.value, last.value)
        scale = found.speed / last.speed
        own_before *= 1 / scale if gate.less_is_better else scale
        before = own_before * found.value / own
        worse = own / own_before - 1 if gate.less_is_better else 1 - own / own_before
        if worse > file.tolerance:
            reasons.append(f"{worse:.1%} worse than the last committed result")
    if found.is_anchored:
        bounds["unit"] = f"{gate.unit} (anchor)"
    return Verdict(
        **common,
        **bounds,
        state="red" if reasons else "green",
        figure=found.value,
        distance=gate.distance(found.value) if found.value > 0 else None,
        committed=before,
        reason="; ".join(reasons),
    )


def judge_runs(topic: str, tolerance: float, measured: Results, committed: Results | None) -> Verdict:
    """The verdict on all runs of a topic that were committed before: the worst against its committed twin.

    Rates and times of kernels are compared at equal read bandwidths, prompts at equal speeds of products.
    """
    name = f"{topic}: all runs against the committed ones"
    twins = {identity_of(run): run for run in committed.runs} if committed is not None else {}
    worst, what, count = 0.0, "", 0
    for run in measured.runs:
        twin = twins.get(identity_of(run))
        if twin is None or committed is None or run["engine"] != "drift":
            continue

        cost = cost_of(run)
        cost_before = cost_of(twin)
        if cost is None or cost_before is None:
            continue

        speed, speed_before = speed_of(run, measured), speed_of(twin, committed)
        count += 1
        worse = 1 - (cost_before * speed_before) / (cost * speed)
        if worse > worst:
            worst, what = worse, name_of(run)

    if not count:
        return Verdict(gate=name, topic=topic, state="not measured", reason="no committed runs of this kind")

    figure = 1 - worst
    is_red = worst > tolerance
    return Verdict(
        gate=name,
        topic=topic,
        state="red" if is_red else "green",
        figure=figure,
        unit=f"x of {count} runs at the worst",
        reason=f"{what} is {worst:.1%} worse" if is_red else "",
    )


def cost_of(run: Mapping[str, Any]) -> float | None:
    """Microseconds of a kernel's call or of a token; None for a run without either, and for calls that are
    too short to be compared."""
    if run.get("us"):
        return float(run["us"]) if run["us"] >= LEAST_KERNEL_US else None

    return 1e6 / run["tokens_per_s"] if run.get("tokens_per_s") else None


def speed_of(run: Mapping[str, Any], results: Results) -> float:
    """The speed of the machine that a run depends on: that of products for prompts, else that of reads."""
    is_prompt = "tflop_s" in run
    return float(
        run["matmul_tflop_s"] if is_prompt else run.get("read_bandwidth_tb_s", results.read_bandwidth_tb_s)
    )


def name_of(run: Mapping[str, Any]) -> str:
    """The fields by which a person tells the run from others."""
    names = ("model", "scenario", "kernel", "shape", "num_rows", "num_draft_tokens")
    return " ".join(str(run[name]) for name in names if run.get(name))
