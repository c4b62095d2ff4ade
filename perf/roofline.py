"""Draw decode results: the time of a round over the time that it takes to read its bytes.

python -m perf.roofline perf/results/nvidia-h200/decode.json --out roofline.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from perf.harness.record import Results, read
from perf.harness.table import engine_of
from perf.peers.anchors import anchor_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Point", "draw", "main", "points"]

COLOURS = {
    "drift graph": "tab:blue",
    "drift eager": "tab:cyan",
    "vllm": "tab:orange",
    "transformers": "tab:green",
}
PEERS = ("vllm", "transformers")
SHARES = (1.0, 0.8, 0.6)


class Point(Struct, frozen=True):
    """A round in the picture.

    engine:        name of the engine, with its executor if it has several.
    limit_ms, ms:  milliseconds of a round at the limit, and measured.
    is_anchor:     whether it comes from an anchor instead of a run.
    """

    engine: str
    scenario: str
    limit_ms: float
    ms: float
    is_anchor: bool = False


def points(results: Results) -> list[Point]:
    """The points of all runs, and of anchors for peers that are not among the runs."""
    found: dict[tuple[Any, ...], Point] = {}
    measured = {_identity(run) for run in results.runs}
    for run in results.runs:
        bandwidth = run.get("read_bandwidth_tb_s", results.read_bandwidth_tb_s)
        limit_ms = run["bytes_per_round"] / bandwidth / 1e9
        name = _name(run)
        found[_identity(run)] = Point(engine_of(run), name, limit_ms, run["ms_per_round"])
        for engine in PEERS:
            peer = run | {"engine": engine}
            anchor = anchor_of(peer, results.gpu)
            if anchor is not None and _identity(peer) not in measured:
                emitted = run["batch"] * (run["acceptance_length"] or 1.0)
                ms = emitted / anchor.tokens_per_s * 1e3
                found[_identity(peer)] = Point(engine, name, limit_ms, ms, is_anchor=True)

    return list(found.values())


def draw(results: Results, path: Path) -> None:
    """Write a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    shown = points(results)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlabel="ms to read the bytes of a round", ylabel="ms a round takes")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(FormatStrFormatter("%g"))

    _draw_limits(axes, shown)
    _draw_points(axes, shown)
    _draw_names(axes, shown)
    axes.legend()
    axes.set_title(f"Decoding on {results.gpu}, reads at {results.read_bandwidth_tb_s:.2f} TB/s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_limits(axes: Axes, shown: Sequence[Point]) -> None:
    """A line for each of SHARES of the roofline."""
    limits = [point.limit_ms for point in shown]
    ends = (min(limits) * 0.8, max(limits) * 1.3)
    for share in SHARES:
        alpha = 0.3 + 0.5 * (share == 1.0)
        axes.plot(ends, [end / share for end in ends], color="black", alpha=alpha, linewidth=1)
        axes.annotate(f"{share:.0%}", (ends[1], ends[1] / share), fontsize=8, va="center")


def _draw_points(axes: Axes, shown: Sequence[Point]) -> None:
    """A colour for each engine; anchors are hollow."""
    for engine, is_anchor in sorted({(point.engine, point.is_anchor) for point in shown}):
        group = [point for point in shown if (point.engine, point.is_anchor) == (engine, is_anchor)]
        colour = COLOURS.get(engine, "tab:red")
        axes.scatter(
            [point.limit_ms for point in group],
            [point.ms for point in group],
            label=f"{engine} (anchor)" if is_anchor else engine,
            edgecolors=colour,
            facecolors="none" if is_anchor else colour,
            zorder=3,
        )


def _draw_names(axes: Axes, shown: Sequence[Point]) -> None:
    """The name of each scenario, under its lowest point."""
    lowest: dict[str, Point] = {}
    for point in sorted(shown, key=lambda point: -point.ms):
        lowest[point.scenario] = point
    for name, point in lowest.items():
        place = (point.limit_ms, point.ms)
        axes.annotate(name, place, xytext=(4, -12), textcoords="offset points", fontsize=8)


def _identity(run: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for runs of the same kind."""
    names = ("engine", "model", "dtype", "scenario", "num_draft_tokens", "tree", "acceptance_length")
    own = ("executor",) if run["engine"] == "drift" else ()
    return tuple(run.get(name) for name in (*names, *own))


def _name(run: dict[str, Any]) -> str:
    drafts = f", {run['num_draft_tokens']} drafts" if run["num_draft_tokens"] else ""
    return f"{run['scenario']}{drafts}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a decode result file")
    parser.add_argument("--model", help="draw only the runs of this model")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    given = parser.parse_args(arguments)
    results = read(given.file)
    if given.model is not None:
        results.runs = [run for run in results.runs if run["model"] == given.model]

    if not results.runs:
        parser.error(f"{given.file}: no runs to draw")

    draw(results, given.out)
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
