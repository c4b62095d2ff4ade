"""What every measuring script does around its measurements: arguments, bandwidth, the result file."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch

from perf.harness.bandwidth import read_bandwidth_tb_s
from perf.harness.machine import default_device
from perf.harness.record import Results, Run, result_path, write
from perf.harness.shapes import MODELS
from perf.harness.table import progress

__all__ = ["Recording", "dtype_name", "free_memory", "parser"]


class Recording:
    """Results of one call of a script. Measures the read bandwidth, then takes runs and writes each at once:
    one that fails costs nothing measured before it."""

    def __init__(self, topic: str, device: str, path: Path | None, *packages: str) -> None:
        self.bandwidth_tb_s = read_bandwidth_tb_s(device)
        free_memory()
        self.results = Results.of(device, self.bandwidth_tb_s, *packages)
        self.path = path or result_path(topic, self.results.gpu)

    def add(self, run: Run) -> None:
        self.results.add(run)
        write(self.results, self.path)
        progress(run)


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the arguments that all scripts share."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    made.add_argument("--executor", default="auto", help="as in EngineConfig")
    made.add_argument("--device", default=default_device(), help="cpu, cuda or cuda:N")
    made.add_argument("--dtype", default="auto", help="as in EngineConfig")
    made.add_argument("--repeats", type=int, default=5, help="what counts is their median")
    made.add_argument("--out", type=Path, help="result file; the default is perf/results/GPU/TOPIC.json")
    return made


def dtype_name(dtype: str, device: str) -> str:
    """What the engine makes of "auto"."""
    if dtype != "auto":
        return dtype

    return "bfloat16" if device.startswith("cuda") else "float32"


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
