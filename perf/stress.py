"""Stress: long contexts that fill the KV cache, then requests that come and are cancelled at random.

    python -m perf.stress
    python -m perf.stress --context 32k --fill 0.9 --num-draft-tokens 3 --minutes 10

For each number of drafts an engine is started. Its sequences of a context hold a share of its KV cache until
they end; with --minutes, random requests follow, for this time in all: each minute is a run, after which
nothing is left in the engine. The scheduler's accounting is checked throughout. On graphs acceptance is
simulated; eager, it is that of a draft with random weights. Runs are written as they end, and those of other
numbers of drafts stay in the file, so that the numbers can be measured one after the other.
Exit status: 0 if no request failed, the cache was filled, no block was lost and memory stayed flat, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from drift_sdk import EngineClosed, EngineStats, ExecutorError
from drift_sdk.measurement import RecordedEngine
from perf.harness.decoding import slow_paths
from perf.harness.drafting import Drafting
from perf.harness.integrity import IntegrityChecks, Memory, check_integrity_of
from perf.harness.numbers import at_least
from perf.harness.record import Results, Run
from perf.harness.recording import Recording, dtype_name, free_memory, parser
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.stress_load import MOST_LIVE, Leg, Load, Stress, churn, fill_cache
from perf.harness.table import show, title_of

__all__ = [
    "Leg",
    "Load",
    "Stress",
    "StressRun",
    "churn",
    "fill_cache",
    "main",
    "measure",
    "problems_of",
    "stress_table",
]

ACCEPTANCE_LENGTH = 3.2
MOST_MINUTES = 1440
CHECK_PERIOD = 16
"""Steps from one check of the scheduler to the next."""
COLUMNS = (
    "load", "drafts", "fill", "held", "requests", "preempted", "tok/s", "checks", "grown MiB", "problems",
)  # fmt: skip
GROWTH_MIB = {"process": 256.0, "gpu": 64.0}
"""Most by which memory may grow after the first load of an engine."""


class StressRun(Run, kw_only=True):
    """One load, or a minute of the random requests (`fill` 0).

    repeat:                         the number of the minute.
    fill, peak_kv_use:              share of the KV cache to be held by sequences, and most that was held.
    num_requests, num_cancelled:    sent, and cancelled of them.
    num_errors, problems:           requests that failed; everything that went wrong.
    num_preemptions, num_checks:    preempted sequences; checks of the scheduler.
    process_growth_mib, gpu_growth_mib:  memory in use since the engine's first load.
    slow_paths:                     counters of the engine's slow paths that are not 0, since its start.
    """

    executor: str
    repeat: int | UnsetType = UNSET
    fill: float
    peak_kv_use: float
    num_requests: int
    num_cancelled: int
    num_errors: int
    num_preemptions: int
    num_checks: int
    seconds: float
    process_growth_mib: float
    gpu_growth_mib: float
    slow_paths: dict[str, int]
    problems: list[str]


async def measure(
    model: Model,
    draftings: Sequence[Drafting],
    stress: Stress,
    on_run: Callable[[Run], None] = lambda run: None,
    memory: Callable[[str], Memory] = Memory.now,
) -> list[StressRun]:
    """Run all loads for each of the draftings, each on a new engine. `on_run` is called with each run as soon
    as it has ended."""
    runs: list[StressRun] = []
    for drafting in draftings:
        engine = drafting.engine(model, stress.config(model, drafting.num_draft_tokens))
        async with engine:
            checks = check_integrity_of(engine, CHECK_PERIOD)
            bench = Bench(engine, checks, model, drafting, stress, memory)
            loads: list[Load | Leg] = [*stress.loads, *stress.legs]
            for load in loads:
                runs.append(await bench.run(load))
                on_run(runs[-1])
                if bench.has_failed:
                    break
        free_memory()

    return runs


class Bench:
    """An engine under load, and the figures before the load."""

    def __init__(
        self,
        engine: RecordedEngine,
        checks: IntegrityChecks,
        model: Model,
        drafting: Drafting,
        stress: Stress,
        memory: Callable[[str], Memory],
    ) -> None:
        self._engine, self._checks, self._model = engine, checks, model
        self._drafting, self._stress, self._memory = drafting, stress, memory
        self._first: Memory | None = None
        self.has_failed = False  # whether the engine has ended by itself

    async def run(self, load: Load | Leg) -> StressRun:
        """Serve a load, or random requests for a while."""
        engine, drafting, stress = self._engine, self._drafting, self._stress
        num_draft_tokens, vocab_size = drafting.num_draft_tokens, self._model.spec.vocab_size
        self._checks.begin()
        before, started_at = engine.stats(), time.perf_counter()
        if isinstance(load, Leg):
            served = await churn(engine, stress, vocab_size, num_draft_tokens, load)
            fields: dict[str, Any] = {
                "scenario": "random", "batch": MOST_LIVE, "context": max(stress.contexts), "fill": 0.0,
                "repeat": load.number,
            }  # fmt: skip
        else:
            num_tokens = stress.num_tokens(num_draft_tokens)
            served = await fill_cache(engine, load, vocab_size, num_tokens)
            fields = {
                "scenario": f"context-{load.context}", "batch": served.num_requests, "context": load.context,
                "fill": load.fill,
            }  # fmt: skip
        seconds = time.perf_counter() - started_at
        after = await self._stats_at_rest() or before
        now = self._memory(stress.device)
        first = self._first = self._first or now
        run = StressRun(
            engine="drift",
            executor=engine.executor,
            model=self._model.name,
            dtype=dtype_name(stress.dtype, stress.device),
            num_draft_tokens=num_draft_tokens,
            acceptance=drafting.acceptance,
            acceptance_length=drafting.simulated_length,
            tokens_per_s=served.num_tokens / seconds,
            peak_kv_use=self._checks.peak_kv_use,
            num_requests=served.num_requests,
            num_cancelled=served.num_cancelled,
            num_errors=len(served.errors),
            num_preemptions=after.num_preemptions - before.num_preemptions,
            num_checks=self._checks.num_checks,
            seconds=seconds,
            process_growth_mib=now.process_mib - first.process_mib,
            gpu_growth_mib=now.gpu_mib - first.gpu_mib,
            slow_paths=slow_paths(after),
            problems=served.errors[:3],
            **fields,
        )
        run.problems += problems_of(run)
        if self.has_failed:
            run.problems.append("the engine has ended by itself")
        elif (held := _num_held(after)) or after.num_running or after.num_waiting:
            run.problems.append(f"{held} blocks held and {after.num_running} sequences left after the load")
        return run

    async def _stats_at_rest(self) -> EngineStats | None:
        """Statistics once no step is running; None if the engine has ended by itself."""
        self._engine.rounds.steps.clear()
        try:
            await self._engine.pause()
            await self._engine.resume()
            return self._engine.stats()
        except (EngineClosed, ExecutorError):
            self.has_failed = True
            return None


def _num_held(stats: EngineStats) -> int:
    """Blocks that sequences hold, of both pools."""
    return sum(
        (
            stats.num_blocks - stats.num_free_blocks,
            stats.num_window_blocks - stats.num_free_window_blocks,
        )
    )


def problems_of(run: StressRun) -> list[str]:
    """Faults in the figures of a run: the cache was not filled, or memory grew."""
    found = []
    if run.peak_kv_use < run.fill - 0.02:
        found.append(f"sequences held {run.peak_kv_use:.2f} of the cache: expected {run.fill:g}")
    for place, grown in (("process", run.process_growth_mib), ("gpu", run.gpu_growth_mib)):
        if grown > GROWTH_MIB[place]:
            found.append(f"{place} memory grew by {grown:.0f} MiB: expected at most {GROWTH_MIB[place]:g}")
    if not run.num_checks:
        found.append("the scheduler was never checked")
    return found


def length(text: str) -> int:
    """Tokens from "32k" (k = 1,024) or "512". Raises ValueError for anything else."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def stress_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--context", nargs="+", type=length, default=(32_768, 65_536), metavar="TOKENS")
    made.add_argument("--num-draft-tokens", nargs="+", type=int, default=(2, 3, 4, 5), metavar="K")
    made.add_argument("--fill", nargs="+", type=float, default=(0.75, 0.9), metavar="SHARE")
    made.add_argument("--num-long", type=at_least(1), default=4, help="sequences of the longest context")
    made.add_argument("--minutes", type=float, default=0.0, help="of random requests, in all")
    made.add_argument("--seed", type=int, default=0, help="of the random requests")
    return made


def stress_of(arguments: Sequence[str] | None) -> tuple[Any, Stress]:
    """The command line's options. Exits with an error for a wrong one."""
    made = stress_parser()
    given: Any = made.parse_args(arguments)
    if not all(0 < fill < 1 for fill in given.fill):
        made.error(f"--fill {given.fill}: expected shares between 0 and 1")

    if not all(1 <= number <= 16 for number in given.num_draft_tokens):
        made.error(f"--num-draft-tokens {given.num_draft_tokens}: expected 1 to 16")

    if min(given.context) < 1 or not 0 <= given.minutes <= MOST_MINUTES:
        made.error(f"--context: expected at least 1; --minutes: 0 to {MOST_MINUTES}")

    if given.device.startswith("cuda") and given.executor == "auto":
        given.executor = "graph"
    stress = Stress(
        device=given.device,
        dtype=given.dtype,
        executor=given.executor,
        contexts=tuple(given.context),
        fills=tuple(given.fill),
        num_long=given.num_long,
        minutes=given.minutes / len(given.num_draft_tokens),
        seed=given.seed,
    )
    return given, stress


def stress_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of all loads."""
    rows = [
        (
            f"{run['scenario']} {run['repeat']}" if "repeat" in run else run["scenario"],
            str(run["num_draft_tokens"]),
            f"{run['fill']:g}",
            f"{run['peak_kv_use']:.2f}",
            f"{run['num_requests']} ({run['num_cancelled']} cancelled)",
            str(run["num_preemptions"]),
            f"{run['tokens_per_s']:.0f}",
            str(run["num_checks"]),
            f"{run['process_growth_mib']:+.0f}, {run['gpu_growth_mib']:+.0f}",
            "; ".join(run["problems"]) or "none",
        )
        for run in results.runs
    ]
    return title_of(results), COLUMNS, rows


def main(arguments: Sequence[str] | None = None) -> int:
    given, stress = stress_of(arguments)
    recording = Recording("stress", given.device, given.out)
    is_simulated = stress.executor == "graph"
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / given.model)
        draft = prepare_draft(model)
        draftings = [
            Drafting(
                draft=draft,
                num_draft_tokens=number,
                acceptance_length=ACCEPTANCE_LENGTH if is_simulated else None,
            )
            for number in given.num_draft_tokens
        ]
        runs = asyncio.run(measure(model, draftings, stress, recording.add))

    show(*stress_table(recording.results))
    print(f"written to {recording.path}")
    return 1 if any(run.problems for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
