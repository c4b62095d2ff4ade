"""Result files: runs, the machine and versions they were measured on, and merging of new and old runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, Struct, UnsetType

from drift_sdk._kernels.gemm.tuning import gpu_key
from perf.harness import machine
from perf.harness.processes import ROOT
from perf.harness.scenario import Scenario

__all__ = [
    "RESULTS", "UNFINISHED", "DecodeRun", "PrefillRun", "Results", "Run", "group_of", "identity_of", "merge",
    "read", "result_path", "write",
]  # fmt: skip

RESULTS = ROOT / "perf" / "results"
UNFINISHED = ".new"
"""Ending of a file that is being written."""
IDENTITY = (
    "engine", "executor", "model", "dtype", "scenario", "batch", "context", "temperature", "top_p",
    "num_draft_tokens", "tree", "draft", "is_adaptive", "acceptance",
    "acceptance_length",
    "prefill_token_budget", "kernel", "shape", "num_rows", "kernel_cache", "num_gpus",
    "stage", "active_sequences", "has_ended_rows", "graph", "repeat", "config",
    "fill", "num_replicas", "reference", "text", "is_traced",
)  # fmt: skip
"""Fields that identify a run: a new run replaces an old one that is equal in all of them, and an old one of
another commit that differs in `repeat` alone."""


class Run(Struct, kw_only=True):
    """One measurement. Subclasses add the fields of a topic. None means that a field does not apply.

    batch, context:     number of sequences, and prompt tokens of each.
    num_draft_tokens:   tokens drafted per round.
    tree:               shape of the drafted tree; None for a chain.
    acceptance_length:  tokens emitted per round and sequence.
    tokens_per_s:       of all sequences together.
    ms_per_round:       milliseconds of a round.
    roofline_fraction:  the least time for reading the bytes of a round over the measured time.
    """

    engine: str
    model: str
    dtype: str
    scenario: str
    batch: int
    context: int
    num_draft_tokens: int = 0
    tree: str | None = None
    acceptance: Literal["none", "simulated", "real"] = "none"
    acceptance_length: float | None = None
    tokens_per_s: float | None = None
    ms_per_round: float | None = None
    roofline_fraction: float | None = None


class DecodeRun(Run, kw_only=True):
    """Decoding. `tokens_per_s` is the median of the repeats.

    tokens_per_s_min, tokens_per_s_max:     extremes of the repeats.
    bytes_per_round:                        bytes that a round must read.
    num_experts:                            mean number of experts of a layer that the rows of a round had, as
                                            the device counted them; None of a peer that did not count them.
    num_distinct_tokens:                    of a peer with experts: mean number of distinct tokens of all
                                            sequences at the same place of their answers.
    temperature, top_p:                     of requests that are not greedy.
    num_gpus:                               GPUs that the model is divided between, of runs that compare them.
    loop_lag_ms_p99, loop_lag_idle_ms_p99:  lag of the event loop while streams are read, and when idle.
    engine_cpu_ms_per_round:                CPU time of the engine's thread.
    loop_cpu_us_per_chunk:                  CPU time of the thread that reads the chunks.
    slow_paths:                             counters of the engine's slow paths that are not 0.
    config:                                 fields of EngineConfig that a run is about, if they differ from
                                            the defaults; or the logits processor of every eighth request.
    engine_version, settings:               of a peer.
    """

    num_repeats: int
    tokens_per_s_min: float
    tokens_per_s_max: float
    bytes_per_round: float
    executor: str | UnsetType = UNSET
    num_experts: float | None | UnsetType = UNSET
    num_distinct_tokens: float | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    num_gpus: int | UnsetType = UNSET
    loop_lag_ms_p99: float | UnsetType = UNSET
    loop_lag_idle_ms_p99: float | UnsetType = UNSET
    engine_cpu_ms_per_round: float | None | UnsetType = UNSET
    loop_cpu_us_per_chunk: float | UnsetType = UNSET
    slow_paths: dict[str, int] | UnsetType = UNSET
    config: str | UnsetType = UNSET
    engine_version: str | UnsetType = UNSET
    settings: str | UnsetType = UNSET

    @classmethod
    def of_rounds(
        cls,
        rounds_s: Sequence[float],
        num_bytes: float,
        bandwidth_tb_s: float,
        *,
        model: str,
        scenario: Scenario,
        tokens_per_round: float = 1.0,
        **fields: Any,
    ) -> Self:
        """Make a run from the seconds of a round in each repeat.

        num_bytes:         bytes that a round must read.
        tokens_per_round:  tokens of a sequence per round.

        Raises ValueError if a round is not above 0 s: the two lengths are too close for the clock.
        """
        if min(rounds_s) <= 0:
            raise ValueError(f"rounds of {list(rounds_s)} s: expected all above 0; use lengths further apart")

        round_s, num_tokens = statistics.median(rounds_s), scenario.batch * tokens_per_round
        return cls(
            model=model,
            scenario=scenario.name,
            batch=scenario.batch,
            context=scenario.context,
            tokens_per_s=num_tokens / round_s,
            tokens_per_s_min=num_tokens / max(rounds_s),
            tokens_per_s_max=num_tokens / min(rounds_s),
            num_repeats=len(rounds_s),
            ms_per_round=round_s * 1e3,
            bytes_per_round=num_bytes,
            roofline_fraction=num_bytes / (bandwidth_tb_s * 1e12) / round_s,
            **fields,
        )


class PrefillRun(Run, kw_only=True):
    """A prompt of `context` tokens, measured to its first token. `seconds` is the median of the repeats.

    tflop_s:                   operations of the prompt over `seconds`.
    matmul_tflop_s:            speed of a large matrix product in the same run.
    config, slow_paths:        as of a DecodeRun.
    engine_version, settings:  of a peer.
    """

    num_repeats: int
    seconds: float
    seconds_min: float
    seconds_max: float
    tflop_s: float
    matmul_tflop_s: float
    executor: str | UnsetType = UNSET
    prefill_token_budget: int | UnsetType = UNSET
    config: str | UnsetType = UNSET
    slow_paths: dict[str, int] | UnsetType = UNSET
    engine_version: str | UnsetType = UNSET
    settings: str | UnsetType = UNSET

    @classmethod
    def of_times(cls, times_s: Sequence[float], num_tokens: int, num_flops: float, **fields: Any) -> Self:
        """Make a run from the seconds of each repeat. num_flops: operations of the prompt."""
        seconds = statistics.median(times_s)
        return cls(
            scenario=f"prefill-{num_tokens}",
            batch=1,
            context=num_tokens,
            num_repeats=len(times_s),
            tokens_per_s=num_tokens / seconds,
            seconds=seconds,
            seconds_min=min(times_s),
            seconds_max=max(times_s),
            tflop_s=num_flops / seconds / 1e12,
            **fields,
        )


class Results(Struct, kw_only=True):
    """A result file. Fields that a run has itself (`commit`, `date`, ...) override those of the file."""

    commit: str
    date: str
    gpu: str
    driver: str | None
    versions: dict[str, str]
    read_bandwidth_tb_s: float
    runs: list[dict[str, Any]]

    @classmethod
    def of(cls, device: str, read_bandwidth_tb_s: float, *packages: str) -> Results:
        """Results without runs, measured on this machine now."""
        return cls(
            commit=machine.commit(),
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            gpu=machine.gpu_name(device),
            driver=machine.driver(),
            versions=machine.versions(*packages),
            read_bandwidth_tb_s=round(read_bandwidth_tb_s, 4),
            runs=[],
        )

    def add(self, run: Run) -> None:
        """Append a run, with its figures rounded to five digits."""
        self.runs.append({name: _rounded(value) for name, value in msgspec.to_builtins(run).items()})


def read(path: Path) -> Results:
    """Read a result file. Raises msgspec.ValidationError if it is not one."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def merge(old: Results, new: Results) -> Results:
    """The old runs that are not replaced, followed by the new runs.

    Old runs keep their commit, date, driver, versions and bandwidth where these differ from the new ones.
    Raises ValueError for results of different machines.
    """
    if old.gpu != new.gpu:
        raise ValueError(f"gpu={new.gpu!r}: expected {old.gpu!r}, as in the file")

    replaced = {identity_of(run) for run in new.runs}
    repeated = {group_of(run) for run in new.runs}
    header = {
        name: getattr(old, name)
        for name in ("commit", "date", "driver", "versions", "read_bandwidth_tb_s")
        if getattr(old, name) != getattr(new, name)
    }
    kept = [
        run
        for run in (header | each for each in old.runs)
        if identity_of(run) not in replaced and ("commit" not in run or group_of(run) not in repeated)
    ]
    return msgspec.structs.replace(new, runs=kept + new.runs)


def write(results: Results, path: Path) -> Results:
    """Merge the results into the file at `path`; returns the content of the file. A process that ends while
    it writes leaves the file as it was."""
    if path.exists():
        results = merge(read(path), results)

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}{UNFINISHED}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    temporary.replace(path)
    return results


def result_path(topic: str, gpu: str) -> Path:
    """The file of a topic's results on a GPU."""
    return RESULTS / gpu_key(gpu) / f"{topic}.json"


def identity_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for runs of the same kind, of which a new one replaces an old one. A field that is false, zero or
    empty is one that is missing."""
    names = set(IDENTITY)
    # A real acceptance length is a result, and so is the mean prompt of a service's requests that ended.
    if run["acceptance"] != "simulated":
        names.remove("acceptance_length")
    if run.get("case") is not None:
        names.remove("context")
    found = {"num_replicas": 1} | run
    return tuple(found.get(name) or None for name in sorted(names))


def group_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for repeats of a run."""
    return identity_of({**run, "repeat": None})


def _rounded(value: Any) -> Any:
    """A float rounded to five digits, more than the accuracy of any figure. Other values are unchanged."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
