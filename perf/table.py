"""Results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from peers.anchors import anchor_of, is_void
from record import Results, Run
from rich.console import Console
from rich.table import Table

__all__ = ["decode_table", "progress", "show"]

console = Console()
DECODE_COLUMNS = ("scenario", "engine", "tok/s", "ms/round", "of roofline", "against vLLM")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def progress(run: Run) -> None:
    """One line for a run that is done: its name, and every figure it has."""
    fields = msgspec.to_builtins(run)
    name = " ".join(str(fields[name]) for name in ("engine", "model", "scenario"))
    figures = (f"{key} {value:.4g}" for key, value in fields.items() if isinstance(value, float))
    console.print(f"{name}: {', '.join(figures)}", highlight=False, soft_wrap=True)


def decode_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of decode results, with ratios to vLLM in this run, else to its anchors."""
    rows = [
        (
            run["scenario"],
            " ".join(filter(None, (run["engine"], run.get("executor")))),
            f"{run['tokens_per_s']:.1f}",
            f"{run['ms_per_round']:.3f}",
            f"{run['roofline_fraction']:.1%}",
            against_vllm(run, results),
        )
        for run in results.runs
    ]
    title = f"{results.gpu}, reads at {results.read_bandwidth_tb_s:.2f} TB/s, {results.commit}"
    return title, DECODE_COLUMNS, rows


def against_vllm(run: dict[str, Any], results: Results) -> str:
    if run["engine"] == "vllm":
        anchor = anchor_of(run, results.gpu)
        remark = " (void)" if is_void(run, results.gpu) else ""
        return "" if anchor is None else f"{ratio(run, anchor.tokens_per_s)} of its anchor{remark}"

    same = ("model", "dtype", "scenario", "num_draft_tokens", "acceptance_length")
    for peer in results.runs:
        is_same = peer["engine"] == "vllm" and all(peer[name] == run[name] for name in same)
        if is_same and not is_void(peer, results.gpu):
            return ratio(run, peer["tokens_per_s"])

    anchor = anchor_of(run | {"engine": "vllm"}, results.gpu)
    return "" if anchor is None else f"{ratio(run, anchor.tokens_per_s)} (anchor)"


def ratio(run: dict[str, Any], tokens_per_s: float) -> str:
    return f"{run['tokens_per_s'] / tokens_per_s:.2f}x"
