"""Tables of results for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from perf.harness.record import Results, Run
from perf.peers.anchors import anchor_of, is_void, num_gpus_of

__all__ = [
    "decode_table",
    "engine_of",
    "label_of",
    "prefill_table",
    "progress",
    "show",
    "speculative_table",
    "title_of",
]

# A log file has no width.
console = Console(width=None if sys.stdout.isatty() else 180)
OWN_DTYPES = ("bfloat16", "float32", "float16", "mxfp4")
DECODE_COLUMNS = ("scenario", "engine", "tok/s", "ms/round", "of roofline", "over vLLM")
PREFILL_COLUMNS = ("scenario", "engine", "tok/s", "ms", "TFLOP/s", "over vLLM")
SPECULATIVE_COLUMNS = (
    "scenario", "drafts", "tok/s", "ms/round", "AL", "2+", "active", "speedup", "efficiency",
    "limit tok/s", "of limit", "over vLLM", "GiB",
)  # fmt: skip


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the names of its first column in one line each."""
    first, *others = columns
    table = Table(title=title)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def progress(run: Run) -> None:
    """Print a line about a run that has ended: its name and all its figures."""
    fields = msgspec.to_builtins(run)
    name = " ".join(str(fields[name]) for name in ("engine", "model", "scenario"))
    name += f" {drafts_of(fields)}" if fields["num_draft_tokens"] else ""
    figures = (f"{key} {value:.4g}" for key, value in fields.items() if isinstance(value, float))
    console.print(f"{name}: {', '.join(figures)}", highlight=False, soft_wrap=True)


def decode_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of decode results, with ratios to vLLM in the same file or to its anchors."""
    rows = [
        (
            run["scenario"],
            engine_of(run),
            f"{run['tokens_per_s']:.1f}",
            f"{run['ms_per_round']:.3f}",
            f"{run['roofline_fraction']:.1%}",
            against_vllm(run, results),
        )
        for run in results.runs
    ]
    return title_of(results), DECODE_COLUMNS, rows


def prefill_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of prefill results, with the same ratios."""
    rows = [
        (
            run["scenario"],
            engine_of(run),
            f"{run['tokens_per_s']:.0f}",
            f"{run['seconds'] * 1e3:.1f}",
            f"{run['tflop_s']:.1f} of {run['matmul_tflop_s']:.0f}",
            against_vllm(run, results),
        )
        for run in results.runs
    ]
    return title_of(results), PREFILL_COLUMNS, rows


def speculative_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of speculative and plain decoding, with the same ratios."""
    rows = [
        (
            run["scenario"],
            drafts_of(run),
            f"{run['tokens_per_s']:.1f}",
            f"{run['ms_per_round']:.3f}",
            f"{run['measured_acceptance_length']:.2f}" if run["num_draft_tokens"] else "",
            f"{run['several_share']:.0%}" if run["num_draft_tokens"] else "",
            f"{run['num_active']:.1f} ({run['num_active_min']}-{run['num_active_max']})",
            shown(run["speedup"], "x"),
            shown(run["efficiency"]),
            f"{run['limit_tokens_per_s']:.0f}",
            f"{run['limit_fraction']:.1%}",
            against_vllm(run, results),
            shown(run["gpu_memory_gib"]),
        )
        for run in results.runs
        if run["engine"] == "drift"
    ]
    rows += [
        (
            run["scenario"],
            f"{run['engine']}: {drafts_of(run)}",
            f"{run['tokens_per_s']:.1f}",
            f"{run['ms_per_round']:.3f}",
            *[""] * (len(SPECULATIVE_COLUMNS) - 6),
            against_vllm(run, results),
            "",
        )
        for run in results.runs
        if run["engine"] != "drift"
    ]
    return title_of(results), SPECULATIVE_COLUMNS, rows


def title_of(results: Results) -> str:
    return f"{results.gpu}, reads at {results.read_bandwidth_tb_s:.2f} TB/s, {results.commit}"


def engine_of(run: dict[str, Any]) -> str:
    """The engine's name with its executor ("drift graph"), or a peer's name; the number of GPUs, if several;
    and the settings that the run is about."""
    number = num_gpus_of(run)
    gpus = f"on {number} GPUs" if number > 1 else None
    return " ".join(filter(None, (run["engine"], run.get("executor"), gpus, run.get("config"))))


def label_of(run: dict[str, Any]) -> str:
    """The model's name, with the form of its weights or KV cache if that is not the model's own."""
    return run["model"] if run["dtype"] in OWN_DTYPES else f"{run['model']}, {run['dtype']}"


def drafts_of(run: dict[str, Any]) -> str:
    """Description of the drafts, such as "3, llama-3.1-8b-eagle3, AL 3.2 simulated"; "none" for plain
    decoding."""
    if not run["num_draft_tokens"]:
        return "none"

    # A run about graphs has a number of drafts, but no draft.
    length = f"AL {run['acceptance_length']:g} simulated" if run["acceptance"] == "simulated" else None
    return ", ".join(filter(None, (str(run["num_draft_tokens"]), run.get("draft"), length)))


def shown(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def against_vllm(run: dict[str, Any], results: Results) -> str:
    """Ratio of a run to vLLM's, of vLLM's own runs to their anchors; empty if there is nothing to compare."""
    if run["engine"] == "vllm":
        anchor = anchor_of(run, results.gpu)
        remark = " (void)" if is_void(run, results.gpu) else ""
        return "" if anchor is None else f"{ratio(run, anchor.tokens_per_s)} of its anchor{remark}"

    same = ("model", "dtype", "scenario", "num_draft_tokens", "acceptance_length")
    for peer in results.runs:
        is_same = peer["engine"] == "vllm" and all(peer[name] == run[name] for name in same)
        if is_same and num_gpus_of(peer) == num_gpus_of(run) and not is_void(peer, results.gpu):
            return ratio(run, peer["tokens_per_s"])

    anchor = anchor_of(run | {"engine": "vllm"}, results.gpu)
    return "" if anchor is None else f"{ratio(run, anchor.tokens_per_s)} (anchor)"


def ratio(run: dict[str, Any], tokens_per_s: float) -> str:
    return f"{run['tokens_per_s'] / tokens_per_s:.2f}x"
