"""The adaptive draft policy on batches of all sizes, compared with plain decoding in the same run.

`python -m perf.speculative --policy-sweep` measures it. This script draws the result:
python -m perf.policy_sweep perf/results/nvidia-h200/policy.json --out policy.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.harness.record import Results, read
from perf.harness.scenario import Scenario
from perf.harness.table import drafts_of, title_of

__all__ = ["ACCEPTANCE_LENGTHS", "SCENARIOS", "draw", "main", "policy_table"]

ACCEPTANCE_LENGTHS = (1.5, 2.5, 3.2)
SCENARIOS = tuple(
    Scenario.parse(f"batch{batch}-512" if batch > 1 else "single-512") for batch in (2**n for n in range(9))
)
FLOOR = 0.97
"""The least acceptable speedup: speculation that does not pay may cost the difference to 1."""

COLUMNS = ("batch", "drafts", "tok/s", "drafted a round", "AL", "against plain", "")


def policy_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows, with a remark where the speedup is below `FLOOR`."""
    rows = [
        (
            str(run["batch"]),
            drafts_of(run),
            f"{run['tokens_per_s']:.1f}",
            f"{run['mean_drafts']:.2f}",
            f"{run['measured_acceptance_length']:.2f}",
            f"{run['speedup']:.3f}x",
            f"below {FLOOR}" if run["speedup"] < FLOOR else "",
        )
        for run in drafted(results)
    ]
    return title_of(results), COLUMNS, rows


def draw(results: Results, path: Path) -> None:
    """Write a PNG: speedup over batch size, one line per model and acceptance length. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[int, float]]] = {}
    for run in drafted(results):
        name = f"{run['model']}: {drafts_of(run)}"
        lines.setdefault(name, []).append((run["batch"], run["speedup"]))

    for name, line in lines.items():
        batches, speedups = zip(*sorted(line), strict=True)
        axes.plot(batches, speedups, marker="o", label=name)

    axes.set_xscale("log", base=2)
    ticks = sorted({batch for line in lines.values() for batch, _ in line})
    axes.set_xticks(ticks, labels=[str(batch) for batch in ticks])
    axes.set(xlabel="sequences", ylabel="tokens/s relative to plain decoding", ylim=(0, None))
    axes.axhline(1.0, color="black", linewidth=1, alpha=0.5)
    axes.axhline(FLOOR, color="tab:red", linewidth=1, linestyle="--", label=f"floor {FLOOR}")
    axes.legend()
    axes.set_title(f"Adaptive speculation, 512 tokens of context, {results.gpu}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def drafted(results: Results) -> list[dict[str, Any]]:
    """The runs with drafts."""
    return [run for run in results.runs if run["num_draft_tokens"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a policy result file")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    given = parser.parse_args(arguments)
    results = read(given.file)
    if not drafted(results):
        parser.error(f"{given.file}: no runs to draw")

    draw(results, given.out)
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
