"""Verdicts: figures held against floors and the last committed figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from perf.gating.figures import Figure, figure_of
from perf.gating.gate import Gate, GateFile
from perf.harness.record import Results, identity_of

__all__ = ["Verdict", "distance_text", "judge", "judge_runs"]

LEAST_KERNEL_US = 10.0
"""Shorter calls vary by more than any tolerance."""


class Verdict(Struct, frozen=True, kw_only=True):
    """A gate's verdict.

    distance:   share by which the figure has to improve to reach the goal.
    committed:  the last committed figure of the same GPU, as it would be at this machine's speed.
    commit:     of the measured code, and date of the measurement.
    """

    gate: str
    topic: str
    state: Literal["green", "red", "not measured"]
    figure: float | None = None
    floor: float | None = None
    goal: float | None = None
    unit: str = ""
    less_is_better: bool = False
    distance: float | None = None
    committed: float | None = None
    reason: str = ""
    commit: str = ""
    date: str = ""

    def __str__(self) -> str:
        """The verdict in a line."""
        if self.figure is None:
            return f"{self.state:12}  {self.gate}: {self.reason}"

        parts = []
        if self.floor is not None and self.goal is not None:
            floor = f"at most {self.floor:g}" if self.less_is_better else f"floor {self.floor:g}"
            parts = [floor, f"goal {self.goal:g}", distance_text(self)]
        if self.committed is not None:
            parts.append(f"committed {self.committed:.4g}")
        end = (f" ({', '.join(parts)})" if parts else "") + (f": {self.reason}" if self.reason else "")
        return f"{self.state:12}  {self.gate}: {self.figure:.4g}{self.unit}{end}"


def distance_text(verdict: Verdict) -> str:
    """ "4.2% to go", or "goal reached"; empty without a figure."""
    if verdict.distance is None:
        return ""

    return "goal reached" if verdict.distance <= 0 else f"{verdict.distance:.1%} to go"


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
    bounds: dict[str, Any] = {
        "floor": gate.floor, "goal": gate.goal, "unit": gate.unit, "less_is_better": gate.less_is_better,
    }  # fmt: skip
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
        commit=found.commit,
        date=found.date,
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
        unit=f"x at the worst of {count} runs",
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
