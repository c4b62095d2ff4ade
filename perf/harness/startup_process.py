"""The process that `perf.startup` measures: starts an engine, generates a token, prints times as JSON."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

__all__ = ["Job", "Startup", "gpu_memory_gib"]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Job(Struct, frozen=True, kw_only=True):
    """Arguments of the engine, as in EngineConfig.

    started_at: start of the process, in seconds of `time.time`.
    """

    model: str
    load: str
    device: str
    dtype: str
    executor: str
    started_at: float


class Startup(Struct, frozen=True, kw_only=True):
    """Seconds and GiB, as in `perf.startup.StartupRun`. GPU memory is that of all processes."""

    executor: str
    num_prompt_tokens: int
    stages: dict[str, float]
    start_s: float
    first_token_s: float
    process_s: float
    gpu_memory_gib: float | None
    process_memory_gib: float


async def start_up(job: Job) -> Startup:
    """Start an engine and generate a token."""
    from drift_sdk import Engine, EngineConfig, Progress, SamplingParams

    begun_at: dict[str, float] = {}

    def record(progress: Progress) -> None:
        begun_at.setdefault(progress.stage, time.perf_counter())

    names = ("load", "device", "dtype", "executor")
    config = EngineConfig(**{name: getattr(job, name) for name in names})
    engine = Engine(Path(job.model), config, on_progress=record)
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
    """Seconds of each stage until the next one. "imports" is the time before the first stage."""
    names = ["imports", *begun_at]
    times = [started_at, *begun_at.values(), ready_at]
    lengths = (end - begin for begin, end in zip(times, times[1:], strict=False))
    return {name: round(length, 4) for name, length in zip(names, lengths, strict=True)}


def gpu_memory_gib(device: str) -> float | None:
    """Memory in use on the GPU, of all processes; None on a CPU."""
    if not device.startswith("cuda"):
        return None

    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def process_memory_gib() -> float:
    """Peak main memory of this process.

    getrusage is used only where /proc is missing, because its figure includes that of the parent process.
    """
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
