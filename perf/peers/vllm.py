"""vLLM with random weights, in another process, which keeps its CUDA context and settings apart.

$VLLM_PATH: a folder from which vllm is imported if it is not installed with the engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from perf.harness.processes import module_command, with_paths
from perf.harness.record import DecodeRun, PrefillRun
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model
from perf.peers.vllm_process import MARK, Job, Times

__all__ = ["measure", "measure_prompts"]

PROCESS = "perf.peers.vllm_process"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
ITEMSIZE = 2


def measure(
    model: Model, scenarios: Sequence[Scenario], repeats: int, bandwidth_tb_s: float
) -> Iterator[DecodeRun]:
    """Measure decoding of models with random weights in bfloat16 on the first GPU.

    Raises RuntimeError for a model with real weights, and if vLLM is missing or fails. vLLM's messages go to
    stderr.
    """
    job = Job(folder=str(model.path), repeats=repeats, scenarios=[s.name for s in scenarios])
    for times in _times(model, job):
        scenario = Scenario.parse(str(times.scenario))
        yield DecodeRun.of_rounds(
            times.seconds,
            model.decode_bytes(scenario.batch, scenario.mean_context(), ITEMSIZE),
            bandwidth_tb_s,
            scenario=scenario,
            **_fields(model, times),
        )


def measure_prompts(
    model: Model, lengths: Sequence[int], repeats: int, peak_tflop_s: float
) -> Iterator[PrefillRun]:
    """Measure single prompts that are not cached, under the same conditions."""
    job = Job(folder=str(model.path), repeats=repeats, prompt_lengths=list(lengths))
    for times in _times(model, job):
        num_tokens = int(times.scenario)
        yield PrefillRun.of_times(
            times.seconds,
            num_tokens,
            model.prefill_flops(num_tokens),
            matmul_tflop_s=peak_tflop_s,
            **_fields(model, times),
        )


def _times(model: Model, job: Job) -> Iterator[Times]:
    """Run the job in a new process and yield its times as they are reported."""
    if model.load != "random":
        raise RuntimeError(f"model {model.name}: the vllm peer measures random weights only")

    environment = with_paths(os.environ | ENVIRONMENT, os.environ.get("VLLM_PATH"))
    command = module_command(PROCESS, msgspec.json.encode(job).decode())
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield msgspec.json.decode(line.removeprefix(MARK), type=Times)
            else:
                sys.stderr.write(line)

    if process.returncode:
        raise RuntimeError(f"vLLM's process ended with exit code {process.returncode}")


def _fields(model: Model, times: Times) -> dict[str, Any]:
    return {
        "engine": "vllm",
        "model": model.name,
        "dtype": "bfloat16",
        "engine_version": times.version,
        "settings": times.settings,
    }
