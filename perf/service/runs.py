"""Results of a service's load: the run object and the tables of ratios between engines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from perf.harness.record import Results, Run
from perf.harness.table import drafts_of, title_of
from perf.service.load import Case

__all__ = ["FLOORS", "LATENCY_LIMITS", "ServingRun", "comparison_table", "line_of", "ratio_table"]

FLOORS = {
    ("closed-64", False): 1.2, ("sampled-64", False): 1.5, ("closed-8", False): 1.15, ("prefix", False): 1.1,
    ("closed-64", True): 1.0, ("sampled-64", True): 1.4, ("closed-8", True): 1.1, ("prefix", True): 1.05,
}  # fmt: skip
"""Least ratio of tokens/s to the peer's in the default configuration, by case and use of drafts."""
LATENCY_LIMITS = {("open-20", False): (1.2, 0.6)}
"""Greatest ratios of TTFT p95 and ITL p99 to the peer's."""


class ServingRun(Run, kw_only=True):
    """One engine under one load. `perf.service.client.figures_of` describes the figures.

    clients, rate:      clients of a closed loop; requests per second of an open loop.
    repeat, gpu_index:  number of the repeat and of the GPU.
    config:             fields that differ from the engine's default configuration, as given; None for none.
    lengths:            distributions from which the prompts and outputs were drawn.
    cpu_s:              CPU time of all the engine's processes, client included, over the whole run.
    loop_lag_ms_p99:    delay of wake-ups of the client's event loop.
    kv_cache_tokens:    capacity of the engine's KV cache.
    num_checkpoint_hits, num_recomputed_tokens:  as in EngineStats, of models with recurrent states.
    """

    case: str
    repeat: int
    gpu_index: int
    config: str | None
    clients: int | None
    rate: float | None
    is_sampled: bool
    lengths: str
    num_requests: int
    num_window_requests: int
    num_errors: int
    num_unfinished: int
    num_prompt_tokens: int
    num_tokens: int
    window_s: float
    total_s: float
    whole_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_s: dict[str, float]
    cpu_s: float
    loop_lag_ms_p99: float
    start_s: float
    max_num_seqs: int
    max_model_len: int
    kv_cache_tokens: int
    num_cached_tokens: int
    num_preemptions: int | UnsetType = UNSET
    num_checkpoint_hits: int | UnsetType = UNSET
    num_recomputed_tokens: int | UnsetType = UNSET
    num_steps: int | UnsetType = UNSET
    measured_acceptance_length: float | UnsetType = UNSET
    first_error: str | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    executor: str | UnsetType = UNSET
    num_replicas: int | UnsetType = UNSET
    engine_version: str | UnsetType = UNSET
    settings: str | UnsetType = UNSET

    @classmethod
    def of(
        cls, case: Case, facts: Mapping[str, Any], figures: Mapping[str, Any], **fields: Any
    ) -> ServingRun:
        """Make a run from the facts that a service reported at its start and the figures after the load."""
        counts, found = dict(figures["counts"]), dict(figures)
        del found["counts"]
        if found["first_error"] is None:
            del found["first_error"]
        for name in ("num_checkpoint_hits", "num_recomputed_tokens"):
            if not counts.get(name):  # as of all models without recurrent states
                counts.pop(name, None)
        num_rounds, num_accepted = counts.pop("num_draft_rounds", 0), counts.pop("num_accepted_tokens", 0)
        if num_rounds:
            found["measured_acceptance_length"] = 1 + num_accepted / num_rounds
        if case.is_sampled:
            found |= {"temperature": 0.8, "top_p": 0.95}
        known = {name: facts[name] for name in facts if name in cls.__struct_fields__}
        return cls(
            scenario=case.name,
            case=case.name,
            batch=case.clients,
            context=round(found["num_prompt_tokens"] / max(found["num_requests"], 1)),
            clients=case.clients or None,
            rate=case.rate or None,
            is_sampled=case.is_sampled,
            lengths=lengths_of(case),
            **known,
            **counts,
            **found,
            **fields,
        )


def lengths_of(case: Case) -> str:
    prefix = f"{case.num_prefixes} shared prefixes of {case.prefix_tokens}, " if case.num_prefixes else ""
    return f"prompts: {prefix}{case.prompts}; outputs: {case.outputs}"


def line_of(run: ServingRun) -> str:
    """A line of text about a run that has ended."""
    latencies = (
        f"{name} {'/'.join(f'{values[share]:.4g}' for share in values)}"
        for name, values in (("TTFT", run.ttft_ms), ("ITL", run.itl_ms))
    )
    problems = f", {run.num_errors} errors" if run.num_errors else ""
    problems += f", {run.num_unfinished} unfinished" if run.num_unfinished else ""
    config = f" [{run.config}]" if run.config else ""
    name = f"{run.case} #{run.repeat} {run.engine}{config} on {run.gpu_index}"
    speed = f"{run.tokens_per_s:.0f} tok/s in {run.window_s:.1f} of {run.total_s:.1f} s"
    return f"{name}: {speed}, {', '.join(latencies)} ms, CPU {run.cpu_s:.1f} s{problems}"


def ratio_table(results: Results, peer: str) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows: ratios of this engine to the peer in each case (median and extremes)."""
    rows = []
    for key in dict.fromkeys(kind_of(run) for run in results.runs):
        pairs = paired(results, peer, key)
        if not pairs:
            continue

        case, is_drafted = key[0], bool(key[1])
        floor = FLOORS.get((case, is_drafted))
        limits = LATENCY_LIMITS.get((case, is_drafted), (None, None))
        ours, theirs = zip(*pairs, strict=True)
        rows.append(
            (
                case,
                drafts_of(ours[0]),
                ours[0]["config"] or "default",
                f"{median(ours, 'tokens_per_s'):.0f}",
                f"{median(theirs, 'tokens_per_s'):.0f}",
                ratio(pairs, "tokens_per_s") + ("" if floor is None else f", floor {floor:g}x"),
                ratio(pairs, "ttft_ms", "p50"),
                ratio(pairs, "ttft_ms", "p95") + ("" if limits[0] is None else f", at most {limits[0]:g}x"),
                ratio(pairs, "itl_ms", "p50"),
                ratio(pairs, "itl_ms", "p99") + ("" if limits[1] is None else f", at most {limits[1]:g}x"),
                ratio(pairs, "cpu_s"),
                problems_of(ours, theirs),
            )
        )

    columns = (
        "case", "drafts", "config", "drift tok/s", f"{peer} tok/s", "ratio", "TTFT p50", "TTFT p95",
        "ITL p50", "ITL p99", "CPU", "problems",
    )  # fmt: skip
    return f"{title_of(results)}: drift over {peer}", columns, rows


def comparison_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows: ratios of each configuration of one engine to its default configuration."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in results.runs:
        groups.setdefault((run["case"], run["num_draft_tokens"], run["config"]), []).append(run)

    rows = []
    kinds = list(dict.fromkeys(key[:2] for key in groups))
    for key in sorted(groups, key=lambda key: kinds.index(key[:2])):
        (case, num_draft_tokens, config), runs = key, groups[key]
        default = groups.get((case, num_draft_tokens, None), runs)
        rows.append(
            (
                case,
                drafts_of(runs[0]),
                config or "default",
                f"{median(runs, 'tokens_per_s'):.0f}",
                share_of(median(runs, "tokens_per_s"), median(default, "tokens_per_s")),
                latencies_of(runs, "ttft_ms"),
                latencies_of(runs, "itl_ms"),
                f"{median(runs, 'kv_cache_tokens'):.0f}",
                f"{median(runs, 'num_cached_tokens') / max(median(runs, 'num_prompt_tokens'), 1):.1%}",
                problems_of(runs),
            )
        )

    columns = (
        "case",
        "drafts",
        "config",
        "tok/s",
        "of default",
        "TTFT ms",
        "ITL ms",
        "KV tokens",
        "cached",
        "problems",
    )
    return title_of(results), columns, rows


def kind_of(run: dict[str, Any]) -> tuple[str, int]:
    return run["case"], run["num_draft_tokens"]


def paired(results: Results, peer: str, key: tuple[str, int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Runs of this engine and of the peer under the same load in the same repeat."""
    runs = [run for run in results.runs if kind_of(run) == key]
    theirs = {run["repeat"]: run for run in runs if run["engine"] == peer}
    return [
        (run, theirs[run["repeat"]]) for run in runs if run["engine"] == "drift" and run["repeat"] in theirs
    ]


def ratio(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: str, share: str = "") -> str:
    """Median of the repeats, with the extremes if there are several; empty if the peer's value is 0."""
    found = []
    for ours, theirs in pairs:
        our, their = (run[name][share] if share else run[name] for run in (ours, theirs))
        if not their:
            return ""
        found.append(our / their)

    extremes = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{statistics.median(found):.2f}x{extremes}"


def share_of(value: float, whole: float) -> str:
    return f"{value / whole:.3f}x" if whole else ""


def latencies_of(runs: Sequence[dict[str, Any]], name: str) -> str:
    """ "55/1203/1449": medians of the repeats of each percentile."""
    return "/".join(f"{statistics.median(run[name][share] for run in runs):.4g}" for share in runs[0][name])


def median(runs: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def problems_of(*sides: Sequence[dict[str, Any]]) -> str:
    """Failed and unfinished requests of each run; empty if there are none."""
    counts = [
        f"{run['engine']} #{run['repeat']}: {run[name]} {name.removeprefix('num_')}"
        for runs in sides
        for run in runs
        for name in ("num_errors", "num_unfinished")
        if run[name]
    ]
    return ", ".join(counts)
