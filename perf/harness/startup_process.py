"""The process that `startup` watches: starts an engine, generates a token, prints what it noted as JSON."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

__all__ = ["Job", "Startup"]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Job(Struct, frozen=True, kw_only=True):
    """Arguments of the engine, as in EngineConfig. `started_at`: when the process was, by `time.time`."""

    model: str
    load: str
    device: str
    dtype: str
    executor: str
    started_at: float


class Startup(Struct, frozen=True, kw_only=True):
    """Seconds and GiB, as in `startup.StartupRun`; GPU memory is everybody's."""

    executor: str
    num_prompt_tokens: int
    stages: dict[str, float]
    start_s: float
    first_token_s: float
    process_s: float
    gpu_memory_gib: float | None
    process_memory_gib: float


async def start_up(job: Job) -> Startup:
    from drift_sdk import Engine, EngineConfig, Progress, SamplingParams

    begun_at: dict[str, float] = {}

    def note(progress: Progress) -> None:
        begun_at.setdefault(progress.stage, time.perf_counter())

    names = ("load", "device", "dtype", "executor")
    config = EngineConfig(**{name: getattr(job, name) for name in names})
    engine = Engine(Path(job.model), config, on_progress=note)
    started_at = time.perf_counter()
    async with engine:
        ready_at = time.perf_counter()
        await engine.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
        first_token_at, now = time.perf_counter(), time.time()
        return Startup(
            executor=engine.executor,
            num_prompt_tokens=len(PROMPT),
            stages=durations(begun_at, started_at, ready_at),
            start_s=ready_at - started_at,
            first_token_s=first_token_at - started_at,
            process_s=now - job.started_at,
            gpu_memory_gib=gpu_memory_gib(job.device),
            process_memory_gib=process_memory_gib(),
        )


def durations(begun_at: dict[str, float], started_at: float, ready_at: float) -> dict[str, float]:
    """Of each stage until the next; "imports" is what comes before the first."""
    names = ["imports", *begun_at]
    times = [started_at, *begun_at.values(), ready_at]
    lengths = (end - begin for begin, end in zip(times, times[1:], strict=False))
    return {name: round(length, 4) for name, length in zip(names, lengths, strict=True)}


def gpu_memory_gib(device: str) -> float | None:
    if not device.startswith("cuda"):
        return None

    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def process_memory_gib() -> float:
    """The most so far. Not by getrusage where that can be helped: its figure survives from the parent."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else ()
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20

    import resource

    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2 ** (30 if sys.platform == "darwin" else 20)


if __name__ == "__main__":
    found = asyncio.run(start_up(msgspec.json.decode(sys.argv[1], type=Job)))
    print(msgspec.json.encode(found).decode(), flush=True)
