"""Bar charts of decode results: each engine's share of the roofline, by scenario.

python -m perf.roofline perf/results/nvidia-h200/decode.json --out decode.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from perf.harness.record import Results, read
from perf.harness.table import engine_of, label_of
from perf.peers.anchors import anchor_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Bar", "bars", "draw", "main"]

COLOURS = {
    "drift graph": "tab:blue",
    "drift eager": "tab:cyan",
    "vllm": "tab:orange",
    "transformers": "tab:green",
}
PEERS = ("vllm", "transformers")
NUM_COLUMNS = 2  # of charts
MIN_SCENARIOS = 3  # that a chart has room for
BAR_WIDTH = 0.3  # of the distance between two scenarios


class Bar(Struct, frozen=True):
    """The speed of an engine in a scenario.

    engine:       name of the engine, with its executor if it has several.
    scenario:     name of the scenario, with the number of drafts if there are any.
    share:        time to read the bytes of a round, divided by the time that the round takes.
    tokens_per_s: tokens that all sequences emit in a second.
    is_anchor:    whether it comes from an anchor instead of a run.
    """

    engine: str
    model: str
    scenario: str
    share: float
    tokens_per_s: float
    is_anchor: bool = False


def bars(results: Results) -> list[Bar]:
    """The bars of all runs with default settings, and of anchors for peers that are not among the runs."""
    found: dict[tuple[Any, ...], Bar] = {}
    measured = {_identity(run) for run in results.runs}
    for run in results.runs:
        if run.get("config"):
            continue
        bandwidth = run.get("read_bandwidth_tb_s", results.read_bandwidth_tb_s)
        limit_ms = run["bytes_per_round"] / bandwidth / 1e9
        model, scenario = label_of(run), _scenario(run)
        found[_identity(run)] = Bar(
            engine_of(run), model, scenario, limit_ms / run["ms_per_round"], run["tokens_per_s"]
        )
        for engine in PEERS:
            peer = run | {"engine": engine}
            anchor = anchor_of(peer, results.gpu)
            if anchor is not None and _identity(peer) not in measured:
                emitted = run["batch"] * (run["acceptance_length"] or 1.0)
                share = limit_ms / (emitted / anchor.tokens_per_s * 1e3)
                found[_identity(peer)] = Bar(
                    engine, model, scenario, share, anchor.tokens_per_s, is_anchor=True
                )

    return list(found.values())


def draw(results: Results, path: Path) -> None:
    """Write a PNG with a chart for each model. Needs matplotlib."""
    from matplotlib.figure import Figure

    shown = bars(results)
    models = sorted({bar.model for bar in shown})
    num_rows = -(-len(models) // NUM_COLUMNS)
    figure = Figure(figsize=(6.5 * NUM_COLUMNS, 0.6 + 2.4 * num_rows), layout="constrained")
    for nth, model in enumerate(models):
        axes = figure.add_subplot(num_rows, NUM_COLUMNS, nth + 1)
        _draw_model(axes, [bar for bar in shown if bar.model == model])
        axes.set_title(model, fontsize=10)

    bandwidth = f"{results.read_bandwidth_tb_s:.2f} TB/s"
    figure.suptitle(f"Decoding on {results.gpu}, reads at {bandwidth}; labels: tokens/s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=72)


def _draw_model(axes: Axes, shown: Sequence[Bar]) -> None:
    """A group of bars for each scenario, a colour for each engine; anchors are hollow."""
    from matplotlib.ticker import PercentFormatter

    scenarios = list(dict.fromkeys(bar.scenario for bar in shown))
    labelled: set[tuple[str, bool]] = set()
    for place, scenario in enumerate(scenarios):
        group = [bar for bar in shown if bar.scenario == scenario]
        for nth, bar in enumerate(group):
            colour, kind = COLOURS.get(bar.engine, "tab:red"), (bar.engine, bar.is_anchor)
            label = f"{bar.engine} (anchor)" if bar.is_anchor else bar.engine
            drawn = axes.bar(
                place + (nth - (len(group) - 1) / 2) * BAR_WIDTH,
                bar.share,
                0.92 * BAR_WIDTH,
                label="" if kind in labelled else label,
                edgecolor=colour,
                facecolor="none" if bar.is_anchor else colour,
            )
            labelled.add(kind)
            axes.bar_label(drawn, [f"{bar.tokens_per_s:,.0f}"], fontsize=7, padding=2)

    axes.set_xticks(range(len(scenarios)), labels=scenarios, fontsize=8)
    axes.set_ylabel("share of the roofline", fontsize=8)
    axes.set(xlim=(-0.5, max(len(scenarios), MIN_SCENARIOS) - 0.5), ylim=(0, 1.2))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(labelsize=8)
    axes.axhline(1.0, color="black", linewidth=1, alpha=0.5)
    axes.legend(fontsize=8, ncols=4, loc="upper left")


def _identity(run: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for runs of the same kind."""
    names = ("engine", "model", "dtype", "scenario", "num_draft_tokens", "tree", "acceptance_length")
    own = ("executor",) if run["engine"] == "drift" else ()
    return tuple(run.get(name) for name in (*names, *own))


def _scenario(run: dict[str, Any]) -> str:
    drafts = f"\n{run['num_draft_tokens']} drafts" if run["num_draft_tokens"] else ""
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
