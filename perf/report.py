"""A report of result files: tables in Markdown, and pictures.

python -m perf.report perf/results/nvidia-h200 --out report

Writes report.md and, with matplotlib, drafts.png (tokens/s over the number of drafts), head.png (drafts of a
head accepted by position), roofline.png and peers.png (ratios to peers) into the folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from perf.acceptance import acceptance_table
from perf.compare_stages import stage_table
from perf.gating.figures import read_folder
from perf.gating.gate import load_gates
from perf.gating.listing import COLUMNS, floor_rows, listed
from perf.harness.record import Results
from perf.harness.table import decode_table, drafts_of, label_of, prefill_table, speculative_table
from perf.peers.anchors import anchor_of, is_void
from perf.roofline import PEERS
from perf.roofline import draw as draw_roofline
from perf.stress import stress_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["REPORT_FILES", "Ratio", "draft_lines", "main", "ratios", "write_report"]

REPORT = "report.md"
PICTURES = ("roofline.png", "drafts.png", "head.png", "peers.png")
REPORT_FILES = (REPORT, *PICTURES)
"""Names of all files that a report can have."""
RATIO_TOPICS = ("decode", "speculative", "prefill")
COLOURS = {"vllm": "tab:orange", "transformers": "tab:green"}
BAR_WIDTH = 0.35
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


class Ratio(Struct, frozen=True):
    """Tokens/s of this engine over a peer's, of the same commit or of its anchor."""

    case: str
    peer: str
    value: float
    is_anchor: bool


def ratios(found: Mapping[str, Results]) -> list[Ratio]:
    """Ratios of runs with default settings to all peers, by topic and scenario. Void runs do not count."""
    made = []
    for topic in RATIO_TOPICS:
        results = found.get(topic)
        for run in results.runs if results is not None else ():
            # Plain decoding is that of the topic "decode".
            is_repeated = topic == "speculative" and not run["num_draft_tokens"]
            is_other = run.get("is_adaptive") or run.get("config")
            if results is None or run["engine"] != "drift" or is_other or is_repeated:
                continue
            for peer in PEERS:
                speed, is_anchor = peer_speed(run, peer, results)
                if speed:
                    drafts = f"\n{drafts_of(run)}" if run["num_draft_tokens"] else ""
                    case = f"{label_of(run)}\n{run['scenario']}{drafts}"
                    made.append(Ratio(case, peer, run["tokens_per_s"] / speed, is_anchor))
    return made


def peer_speed(run: Mapping[str, Any], peer: str, results: Results) -> tuple[float, bool]:
    """Tokens/s of a peer's run of the same kind and commit, else of its anchor (True); 0 if there is none."""
    same = ("model", "dtype", "scenario", "num_draft_tokens", "acceptance_length", "commit")
    for other in results.runs:
        if other["engine"] == peer and all(other.get(name) == run.get(name) for name in same):
            if not is_void(other, results.gpu):
                return float(other["tokens_per_s"]), False

    anchor = anchor_of({**run, "engine": peer}, results.gpu)
    return (anchor.tokens_per_s, True) if anchor is not None else (0.0, False)


def draft_lines(results: Results) -> dict[str, list[tuple[int, float]]]:
    """For each model, scenario and acceptance with several numbers of drafts in a chain: (drafts, tokens/s),
    ascending. Plain decoding counts as 0 drafts."""
    runs = [
        run
        for run in results.runs
        if run["engine"] == "drift" and not run.get("is_adaptive") and run["tree"] is None
    ]
    plain = {
        (label_of(run), run["scenario"]): run["tokens_per_s"] for run in runs if not run["num_draft_tokens"]
    }
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["num_draft_tokens"]:
            source = ", ".join(filter(None, (run["acceptance"], run.get("draft"))))
            line = lines.setdefault(f"{label_of(run)} {run['scenario']}, {source}", {})
            best = line.setdefault(run["num_draft_tokens"], run)
            # A number may have been measured at several acceptance lengths.
            if run["acceptance_length"] > best["acceptance_length"]:
                line[run["num_draft_tokens"]] = run
    found = {}
    for name, line in lines.items():
        run = next(iter(line.values()))
        start = {0: plain[key]} if (key := (label_of(run), run["scenario"])) in plain else {}
        speeds = start | {number: one["tokens_per_s"] for number, one in line.items()}
        if len(speeds) > 2:
            found[name] = sorted(speeds.items())
    return found


def draw_drafts(results: Results, path: Path) -> bool:
    """Write a PNG: tokens/s over the number of drafts, a chart for each line. Returns False without lines."""
    lines = draft_lines(results)
    if not lines:
        return False

    with charts(path, len(lines)) as grid:
        for axes, (name, line) in zip(grid, lines.items(), strict=True):
            numbers, speeds = zip(*line, strict=True)
            axes.plot(numbers, speeds, marker="o")
            axes.set(xlabel="draft tokens", ylabel="tokens/s", ylim=(0, 1.1 * max(speeds)), xticks=numbers)
            axes.set_title(name.replace(", ", ",\n"), fontsize=8)
    return True


def draw_acceptance(results: Results, path: Path) -> bool:
    """Write a PNG: the share of rounds in which draft i and all before it were accepted. Returns False
    without such runs."""
    runs = [run for run in results.runs if run.get("accepted_at")]
    if not runs:
        return False

    with charts(path, len(runs)) as grid:
        for axes, run in zip(grid, runs, strict=True):
            shares = run["accepted_at"]
            places = range(1, len(shares) + 1)
            axes.bar(places, shares)
            axes.set(xlabel="position of the draft", ylabel="accepted", ylim=(0, 1.05), xticks=places)
            drafts = f"{run['num_draft_tokens']} drafts, AL {run['measured_acceptance_length']:.2f}"
            axes.set_title(f"{label_of(run)} {run['scenario']}\n{drafts} {run['acceptance']}", fontsize=8)
    return True


def draw_peers(found: Mapping[str, Results], path: Path) -> bool:
    """Write a PNG: groups of bars, a bar for each peer; those to anchors are hollow. Returns False without
    ratios."""
    shown = ratios(found)
    cases = list(dict.fromkeys(ratio.case for ratio in shown))
    if not cases:
        return False

    with charts(path, 1, width=max(8.0, 0.9 * len(cases)), height=5.0) as (axes,):
        draw_ratios(axes, shown, cases)
    return True


def draw_ratios(axes: Axes, shown: Sequence[Ratio], cases: Sequence[str]) -> None:
    """A group of bars for each case, a colour for each peer."""
    from matplotlib.patches import Patch

    for ratio in shown:
        group = [other.peer for other in shown if other.case == ratio.case]
        place = cases.index(ratio.case) + (group.index(ratio.peer) - (len(group) - 1) / 2) * BAR_WIDTH
        colour = COLOURS[ratio.peer]
        face = "none" if ratio.is_anchor else colour
        bar = axes.bar(place, ratio.value, 0.9 * BAR_WIDTH, edgecolor=colour, facecolor=face)
        axes.bar_label(bar, [f"{ratio.value:.2f}"], fontsize=6, padding=2)
    handles = [Patch(color=COLOURS[peer], label=f"over {peer}") for peer in PEERS]
    handles.append(Patch(edgecolor="black", facecolor="none", label="over its anchor"))
    axes.axhline(1.0, color="black", linewidth=1, alpha=0.5)
    axes.set_xticks(range(len(cases)), labels=cases, fontsize=5)
    axes.set(ylabel="tokens/s over the peer's", ylim=(0, 1.2 * max(ratio.value for ratio in shown)))
    axes.legend(handles=handles, fontsize=8, ncols=3, loc="upper right")


@contextmanager
def charts(path: Path, number: int, width: float = 4.0, height: float = 3.0) -> Iterator[Sequence[Axes]]:
    """Axes in rows of three; the picture is written at the end of the block."""
    from matplotlib.figure import Figure

    columns = min(number, 3)
    rows = -(-number // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for spare in grid[number:]:
        spare.set_axis_off()
    yield tuple(grid[:number])
    figure.savefig(path, dpi=110)


def gates_table(found: Mapping[str, Results]) -> Table:
    """Title, columns and rows: every gate that has a figure."""
    file = load_gates()
    verdicts = listed(file, found)
    pairs = zip(floor_rows(file, verdicts), verdicts, strict=True)
    return "Floors and goals", COLUMNS, [row for row, verdict in pairs if verdict.figure is not None]


def startup_table(results: Results) -> Table:
    rows = [
        (
            run["kernel_cache"],
            f"{run['import_s']:.2f}",
            f"{run['start_s']:.2f}",
            f"{run['first_token_s']:.2f}",
        )
        for run in results.runs
    ]
    return "", ("kernels", "import s", "start s", "first token s"), rows


TABLES: dict[str, tuple[str, Callable[[Results], Table]]] = {
    "acceptance": ("Acceptance of a head", acceptance_table),
    "draft-stages": ("Stages of a head", stage_table),
    "decode": ("Plain decoding", decode_table),
    "speculative": ("Decoding with drafts", speculative_table),
    "prefill": ("Prompts", prefill_table),
    "startup": ("Start", startup_table),
    "stress": ("Stress", stress_table),
}
"""Topic -> its heading and its table."""


def write_report(folder: Path, out: Path, summary: Sequence[str] = ()) -> Path:
    """Write the report of a folder's result files into the folder `out`; returns the path of report.md.

    summary: lines to put after the title. Raises ValueError if there are none of TABLES in the folder.
    """
    found = {topic: results for topic, results in results_of(folder).items() if results.runs}
    if not found:
        raise ValueError(f"folder={str(folder)!r}: expected one with result files of {', '.join(TABLES)}")

    out.mkdir(parents=True, exist_ok=True)
    parts = ["# Measurements", "", *([*summary, ""] if summary else []), *header_of(found)]
    for name, caption in pictures_of(found, out).items():
        parts += ["", f"![{caption}]({name})"]
    for topic, results in found.items():
        heading, table = TABLES[topic]
        for model in dict.fromkeys(map(label_of, results.runs)):
            own = replace(results, runs=[run for run in results.runs if label_of(run) == model])
            parts += ["", f"## {heading}: {model}", "", *markdown(*table(own)[1:])]
    title, columns, rows = gates_table(found)
    if rows:
        parts += ["", f"## {title}", "", *markdown(columns, rows)]
    path = out / REPORT
    path.write_text("\n".join(parts) + "\n")
    return path


def results_of(folder: Path) -> dict[str, Results]:
    """The result files of a folder that have tables, by topic."""
    found = read_folder(folder)
    return {topic: found[topic] for topic in TABLES if topic in found}


def header_of(found: Mapping[str, Results]) -> list[str]:
    """The machine, and the commits and bandwidths of each topic."""
    first = next(iter(found.values()))
    lines = [f"{first.gpu}, driver {first.driver or 'none'}.", "", "| topic | commits | read bandwidth |"]
    lines.append("|---|---|---|")
    for topic, results in found.items():
        commits = dict.fromkeys(run.get("commit", results.commit) for run in results.runs)
        # Topics that are not about speed do not measure the bandwidth.
        bandwidth = f"{results.read_bandwidth_tb_s:.2f} TB/s" if results.read_bandwidth_tb_s else ""
        lines.append(f"| {topic} | {', '.join(commits)} | {bandwidth} |")
    return lines


def pictures_of(found: Mapping[str, Results], out: Path) -> dict[str, str]:
    """Draw what the results show; returns the captions by the files' names. Nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return {}

    made = {}
    if (decode := found.get("decode")) is not None:
        draw_roofline(decode, out / "roofline.png")
        made["roofline.png"] = "share of the roofline, by scenario and engine"
    if (speculative := found.get("speculative")) is not None:
        if draw_drafts(speculative, out / "drafts.png"):
            made["drafts.png"] = "tokens/s over the number of draft tokens"
    if (acceptance := found.get("acceptance")) is not None and draw_acceptance(acceptance, out / "head.png"):
        made["head.png"] = "accepted drafts of the head by position, at each temperature"
    if draw_peers(found, out / "peers.png"):
        made["peers.png"] = "tokens/s over peers"
    return made


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, help="of result files")
    made.add_argument("--out", type=Path, required=True, help="folder of the report")
    given = made.parse_args(arguments)
    try:
        path = write_report(given.folder, given.out)
    except ValueError as error:
        made.error(str(error))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
