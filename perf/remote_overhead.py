"""Overhead of engines in pools, child processes and actors of Ray, against an engine of this process.

    python -m perf.remote_overhead
    python -m perf.remote_overhead --kinds engine process

A scripted engine takes the time of a step without computing anything, so that everything else is overhead. Of
each kind: a request of one token, sent when the one before has ended; one stream; and many streams at a time.
The kinds take turns, and each figure is the median of the repeats. Kind "ray" needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from drift_sdk import BaseEngine, Engine, EnginePool, ProcessEngine
from drift_sdk.testing import ScriptedModel
from perf.harness.host import percentile
from perf.harness.numbers import at_least
from perf.harness.record import Results, Run, result_path, write
from perf.harness.scripted import next_character
from perf.harness.table import show, title_of

__all__ = ["KINDS", "OverheadRun", "main", "measure"]

KINDS = ("engine", "pool", "process", "ray")
NUM_REQUESTS = 50
"""Requests of one token, one after the other."""
COLUMNS = (
    "engine", "streams", "step ms", "one token ms", "ms/token p50/p99", "tok/s", "tokens/chunk",
    "CPU us/token here/in all",
)  # fmt: skip


class OverheadRun(Run, kw_only=True):
    """Streams of one kind of engine. `batch` is their number.

    step_ms:              time that a step takes.
    request_ms:           of a request of one token, from `generate` to its end.
    token_ms:             time between chunks over the tokens of the later one: p50 and p99.
    tokens_per_chunk:     mean.
    cpu_us_per_token:     CPU time of this process; of it and the engine's own process together.
    """

    num_repeats: int
    step_ms: float
    request_ms: float
    token_ms: dict[str, float]
    tokens_per_chunk: float
    cpu_us_per_token: dict[str, float]


class Sample:
    """Figures of one repeat."""

    def __init__(self) -> None:
        self.gaps_ms: list[float] = []
        self.num_chunks = self.num_tokens = 0
        self.seconds = self.request_ms = 0.0
        self.cpu_s = {"here": 0.0, "all": 0.0}

    async def drive(self, engine: BaseEngine, num_streams: int, num_tokens: int) -> None:
        times = []
        for _ in range(NUM_REQUESTS):
            started_at = time.perf_counter()
            await engine.generate("x", max_tokens=1, ignore_eos=True)
            times.append(1e3 * (time.perf_counter() - started_at))
        self.request_ms = statistics.median(times)
        here_s, there_s, started_at = time.process_time(), cpu_seconds_of(engine), time.perf_counter()
        await asyncio.gather(*(self._read(engine, num_tokens) for _ in range(num_streams)))
        self.seconds = time.perf_counter() - started_at
        here_s, there_s = time.process_time() - here_s, cpu_seconds_of(engine) - there_s
        self.cpu_s = {"here": here_s, "all": here_s + there_s}

    async def _read(self, engine: BaseEngine, num_tokens: int) -> None:
        last = None
        async for chunk in engine.generate("x", max_tokens=num_tokens, ignore_eos=True):
            now = time.perf_counter()
            if chunk.token_ids:
                if last is not None:
                    self.gaps_ms.append(1e3 * (now - last) / len(chunk.token_ids))
                last = now
                self.num_chunks += 1
                self.num_tokens += len(chunk.token_ids)


def cpu_seconds_of(engine: BaseEngine) -> float:
    """CPU time of the engine's own process; 0 if it is in this one."""
    if isinstance(engine, Engine | EnginePool):
        return 0.0

    if isinstance(engine, ProcessEngine):
        processes = [psutil.Process(engine.pid)]
    else:
        started = psutil.Process().children(recursive=True)
        processes = [each for each in started if "EngineHost" in " ".join(each.cmdline())]
    return float(sum(each.cpu_times().user + each.cpu_times().system for each in processes))


def make_engine(kind: str, step_s: float) -> BaseEngine:
    """An engine whose steps take so many seconds."""
    model = ScriptedModel(next_character, step_s=step_s)
    if kind == "process":
        return ProcessEngine("scripted", model.config, open_model=model)

    if kind == "ray":
        # Read when Ray is imported. Without the first, Ray writes a token to the home folder.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from drift_sdk.ray import Placement, RayEngine

        placement = Placement(num_gpus=0, num_cpus=0)
        return RayEngine("scripted", model.config, address="local", placement=placement, open_model=model)

    engine = Engine("scripted", model.config, open_model=model)
    return EnginePool([engine]) if kind == "pool" else engine


async def measure(
    kinds: Sequence[str], streams: Sequence[int], steps_s: Sequence[float], num_tokens: int, repeats: int
) -> list[OverheadRun]:
    """Figures of each kind, step and number of streams."""
    runs = []
    for step_s in steps_s:
        engines = {kind: make_engine(kind, step_s) for kind in kinds}
        samples: dict[tuple[str, int], list[Sample]] = {}
        try:
            for engine in engines.values():
                await engine.start()
                await Sample().drive(engine, 4, 20)  # not counted
            for _ in range(repeats):
                for number in streams:
                    for kind, engine in engines.items():
                        sample = Sample()
                        await sample.drive(engine, number, num_tokens)
                        samples.setdefault((kind, number), []).append(sample)
        finally:
            for engine in engines.values():
                await engine.aclose()
        runs += [run_of(kind, number, step_s, found) for (kind, number), found in samples.items()]
    return runs


def run_of(kind: str, num_streams: int, step_s: float, samples: Sequence[Sample]) -> OverheadRun:
    def middle(figures: list[float]) -> float:
        return statistics.median(figures)

    return OverheadRun(
        engine=kind,
        model="scripted",
        dtype="none",
        scenario=f"step-{1e3 * step_s:g}",
        batch=num_streams,
        context=1,
        tokens_per_s=middle([each.num_tokens / each.seconds for each in samples]),
        num_repeats=len(samples),
        step_ms=1e3 * step_s,
        request_ms=middle([each.request_ms for each in samples]),
        token_ms={
            name: middle([percentile(each.gaps_ms, share) for each in samples])
            for name, share in (("p50", 0.5), ("p99", 0.99))
        },
        tokens_per_chunk=middle([each.num_tokens / each.num_chunks for each in samples]),
        cpu_us_per_token={
            name: middle([1e6 * each.cpu_s[name] / each.num_tokens for each in samples])
            for name in ("here", "all")
        },
    )


def overhead_table(results: Results) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Title, columns and rows of all runs."""
    rows = [
        (
            run["engine"],
            str(run["batch"]),
            f"{run['step_ms']:g}",
            f"{run['request_ms']:.2f}",
            f"{run['token_ms']['p50']:.3f}/{run['token_ms']['p99']:.3f}",
            f"{run['tokens_per_s']:.0f}",
            f"{run['tokens_per_chunk']:.2f}",
            f"{run['cpu_us_per_token']['here']:.0f}/{run['cpu_us_per_token']['all']:.0f}",
        )
        for run in results.runs
    ]
    return title_of(results), COLUMNS, rows


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    made.add_argument("--streams", nargs="+", type=at_least(1), default=(1, 64), metavar="N")
    made.add_argument("--step-ms", nargs="+", type=float, default=(5.0, 0.0), metavar="MS")
    made.add_argument("--tokens", type=at_least(1), default=200, help="of each stream")
    made.add_argument("--repeats", type=at_least(1), default=5)
    made.add_argument("--out", type=Path, help="result file (default: perf/results/MACHINE/overhead.json)")
    given = made.parse_args(arguments)
    if min(*given.streams, given.tokens - 1, given.repeats) < 1 or min(given.step_ms) < 0:
        made.error("--streams, --repeats: expected at least 1; --tokens: 2; --step-ms: 0")

    return given


def main(arguments: Sequence[str] | None = None) -> None:
    given: Any = arguments_of(arguments)
    steps_s = [each / 1e3 for each in given.step_ms]
    runs = asyncio.run(measure(given.kinds, given.streams, steps_s, given.tokens, given.repeats))
    packages = ("ray",) if "ray" in given.kinds else ()
    results = Results.of("cpu", 0.0, *packages)
    for run in runs:
        results.add(run)
    path = given.out or result_path("overhead", results.gpu)
    write(results, path)
    show(*overhead_table(results))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
