"""Measure the time from the start of a process to the first token, once without and repeatedly with compiled
kernels.

python -m perf.startup --model llama-3.1-8b
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from perf.harness.processes import module_command, with_paths
from perf.harness.record import Run
from perf.harness.recording import Recording, dtype_name, free_memory, parser
from perf.harness.shapes import Model, prepare
from perf.harness.startup_process import Job, Startup, gpu_memory_gib
from perf.harness.table import show

__all__ = ["StartupRun", "import_seconds", "main", "measure"]

PROCESS = "perf.harness.startup_process"
IMPORT = "import time; t = time.perf_counter(); import drift_sdk; print(time.perf_counter() - t)"
CACHES = {"TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
WRITE_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Has Python keep compiled modules, as installations do: torch takes more than twice as long without."""


class StartupRun(Run, kw_only=True):
    """A start in a new process. Times are in seconds, memory in GiB.

    kernel_cache:        "cold" if all kernels had to be compiled, "warm" if none had.
    num_repeats:         starts of which this is the median, by the time from imports to the first token.
    after_imports_s_min, after_imports_s_max: this time of the fastest and the slowest of them.
    import_s:            import of the package alone, median of the repeats.
    start_s, stages:     `Engine.start`, and its stages as the engine reports them.
    first_token_s:       from the start to the first token of a short prompt.
    process_s:           from before the process was started to the first token.
    gpu_memory_gib:      memory of the GPU, as the driver counts it.
    process_memory_gib:  peak main memory of the process.
    """

    executor: str
    kernel_cache: str
    num_repeats: int
    after_imports_s_min: float
    after_imports_s_max: float
    import_s: float
    stages: dict[str, float]
    start_s: float
    first_token_s: float
    process_s: float
    gpu_memory_gib: float | None
    process_memory_gib: float


def measure(
    model: Model,
    *,
    device: str,
    dtype: str,
    executor: str,
    repeats: int,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[StartupRun]:
    """Measure a cold start, and the median of `repeats` warm ones. `on_run` is called with each of the two as
    soon as it has been measured."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {name: str(Path(folder, cache)) for name, cache in CACHES.items()}
        environment |= WRITE_BYTECODE
        import_s = statistics.median(import_seconds(environment) for _ in range(repeats))
        free_memory()
        used_gib = gpu_memory_gib(device) or 0.0  # of all processes, before these starts

        def started() -> Startup:
            job = Job(
                model=str(model.path),
                load=model.load,
                device=device,
                dtype=dtype,
                executor=executor,
                started_at=time.time(),
            )
            return start_up(job, environment)

        for kernel_cache, num_repeats in (("cold", 1), ("warm", repeats)):
            starts = sorted((started() for _ in range(num_repeats)), key=after_imports_s)
            found = starts[(num_repeats - 1) // 2]
            runs.append(
                StartupRun(
                    engine="drift",
                    executor=found.executor,
                    model=model.name,
                    dtype=dtype,
                    scenario="startup",
                    batch=1,
                    context=found.num_prompt_tokens,
                    kernel_cache=kernel_cache,
                    num_repeats=num_repeats,
                    after_imports_s_min=after_imports_s(starts[0]),
                    after_imports_s_max=after_imports_s(starts[-1]),
                    import_s=import_s,
                    stages=found.stages,
                    start_s=found.start_s,
                    first_token_s=found.first_token_s,
                    process_s=found.process_s,
                    gpu_memory_gib=None if found.gpu_memory_gib is None else found.gpu_memory_gib - used_gib,
                    process_memory_gib=found.process_memory_gib,
                )
            )
            on_run(runs[-1])

    return runs


def start_up(job: Job, environment: dict[str, str]) -> Startup:
    """Start an engine in a new process."""
    command = module_command(PROCESS, msgspec.json.encode(job).decode())
    return msgspec.json.decode(last_line(command, with_paths(environment)), type=Startup)


def after_imports_s(found: Startup) -> float:
    """Seconds from the imports to the first token."""
    return found.first_token_s - found.stages["imports"]


def import_seconds(environment: dict[str, str]) -> float:
    """Seconds to import the package in a new process."""
    return float(last_line([sys.executable, "-c", IMPORT], environment))


def last_line(command: Sequence[str], environment: dict[str, str]) -> str:
    """The last line that a command prints. Raises CalledProcessError if it fails."""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser(__doc__).parse_args(arguments)
    recording = Recording("startup", given.device, given.out)
    with tempfile.TemporaryDirectory() as folder:
        measure(
            prepare(given.model, Path(folder)),
            device=given.device,
            dtype=dtype_name(given.dtype, given.device),
            executor=given.executor,
            repeats=given.repeats,
            on_run=recording.add,
        )

    results = recording.results
    rows = [
        (
            run["kernel_cache"],
            run["executor"],
            f"{run['import_s']:.3f}",
            ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in run["stages"].items()),
            f"{run['first_token_s']:.2f}",
            f"{run['after_imports_s_min']:.2f} to {run['after_imports_s_max']:.2f}",
            f"{run['process_s']:.2f}",
        )
        for run in results.runs
    ]
    columns = ("kernels", "executor", "import", "stages", "first token", "after imports", "process")
    show(f"{given.model} on {results.gpu}, seconds", columns, rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
