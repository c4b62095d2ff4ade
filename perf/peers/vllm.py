"""vLLM with random weights, in a process of its own: its CUDA context and its settings stay out of this one.

$VLLM_PATH: a folder that vllm is imported from, where it is not installed beside the engine.
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
    """bfloat16 on the first GPU; for models of random weights.

    Raises RuntimeError for a real model, and if vLLM is missing or fails. Its messages go to stderr.
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
    """Single prompts that no cache has seen, likewise."""
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
    if model.load != "random":
        raise RuntimeError(f"model {model.name}: the vllm peer measures random weights alone")

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
