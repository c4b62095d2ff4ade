"""vLLM with random weights, in a process of its own: its CUDA context and its settings stay out of this one.

$VLLM_PATH: a folder that vllm is imported from, where it is not installed beside the engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from record import DecodeRun
from scenario import Scenario
from shapes import Model
from vllm_process import MARK, Job, Times

__all__ = ["measure"]

PROCESS = Path(__file__).parent.parent / "vllm_process.py"
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
    if model.load != "random":
        raise RuntimeError(f"model {model.name}: the vllm peer measures random weights alone")

    job = Job(folder=str(model.path), scenarios=[s.name for s in scenarios], repeats=repeats)
    environment = os.environ | ENVIRONMENT
    if "VLLM_PATH" in environment:
        paths = (environment["VLLM_PATH"], environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    command = [sys.executable, str(PROCESS), msgspec.json.encode(job).decode()]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(MARK):
                sys.stderr.write(line)
            else:
                times = msgspec.json.decode(line.removeprefix(MARK), type=Times)
                yield _run(model, Scenario.parse(times.scenario), times, bandwidth_tb_s)

    if process.returncode:
        raise RuntimeError(f"vLLM's process ended with exit code {process.returncode}")


def _run(model: Model, scenario: Scenario, times: Times, bandwidth_tb_s: float) -> DecodeRun:
    return DecodeRun.of_rounds(
        times.rounds_s,
        model.decode_bytes(scenario.batch, scenario.mean_context(), ITEMSIZE),
        bandwidth_tb_s,
        engine="vllm",
        model=model.name,
        dtype="bfloat16",
        scenario=scenario,
        engine_version=times.version,
        settings=times.settings,
    )
