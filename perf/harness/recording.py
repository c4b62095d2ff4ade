"""Common parts of all measuring scripts: arguments, read bandwidth, the result file."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import msgspec
import torch

from drift_sdk.errors import ConfigError
from drift_sdk.models.allocation import QUANTISERS
from perf.harness.bandwidth import read_bandwidth_tb_s
from perf.harness.machine import default_device
from perf.harness.numbers import at_least
from perf.harness.record import Results, Run, read, result_path, write
from perf.harness.shapes import FP8_BLOCKS, MODELS, model_name
from perf.harness.table import progress

__all__ = [
    "Recording", "add_tensor_parallel", "add_weights", "check_place", "dtype_name", "free_memory", "parser",
]  # fmt: skip


class Recording:
    """Results of one execution of a script.

    Measures the read bandwidth first. Each run is written at once, so that a failure later loses no results.

    topic:     name of the result file.
    path:      result file; None for the default file of the topic and GPU.
    packages:  further packages whose versions are stored.
    """

    def __init__(self, topic: str, device: str, path: Path | None, *packages: str) -> None:
        self.bandwidth_tb_s = read_bandwidth_tb_s(device)
        free_memory()
        self.results = Results.of(device, self.bandwidth_tb_s, *packages)
        self.path = path or result_path(topic, self.results.gpu)
        check_place(self.path, self.results.gpu)

    def add(self, run: Run) -> None:
        """Store a run in the result file and print a line about it."""
        self.results.add(run)
        write(self.results, self.path)
        progress(run)


def check_place(path: Path, gpu: str) -> None:
    """Raise ConfigError if results of a GPU cannot be written to a file, before anything is measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (found := read(path)).gpu != gpu:
            raise ConfigError.of("out", str(path), f"a file of results of {gpu}, not of {found.gpu}")
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError.of("out", str(path), f"a result file, or none: {error}") from error


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that all scripts share."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model", type=model_name, default="llama-3.1-8b", help=f"a path, or one of {', '.join(MODELS)}"
    )
    made.add_argument("--executor", default="auto", help="as in EngineConfig")
    made.add_argument("--device", default=default_device(), help="cpu, cuda or cuda:N")
    made.add_argument("--dtype", default="auto", help="as in EngineConfig")
    made.add_argument(
        "--repeats", type=at_least(1), default=5, help="timed repeats; the result is their median"
    )
    made.add_argument("--out", type=Path, help="result file (default: perf/results/GPU/TOPIC.json)")
    return made


def add_weights(made: argparse.ArgumentParser) -> None:
    """Add the arguments `--weights` and `--kv-dtype`, for scripts that measure quantised models."""
    made.add_argument(
        "--weights",
        choices=(*QUANTISERS, FP8_BLOCKS),
        help="as in EngineConfig; fp8-blocks: as files with a scale for 128 rows and columns",
    )
    made.add_argument("--kv-dtype", choices=("fp8", "nvfp4"), help="as in EngineConfig")


def add_tensor_parallel(made: argparse.ArgumentParser) -> None:
    """Add the arguments `--tensor-parallel` and `--tuning`, for scripts that compare numbers of GPUs."""
    made.add_argument(
        "--tensor-parallel",
        nargs="+",
        type=at_least(1),
        default=(),
        metavar="GPUS",
        help="numbers of GPUs to divide the model between; peers take the largest",
    )
    made.add_argument("--tuning", default="off", help="as in EngineConfig")


def dtype_name(dtype: str, device: str) -> str:
    """The dtype that the engine uses: the given one, or what it chooses for "auto"."""
    if dtype != "auto":
        return dtype

    return "bfloat16" if device.startswith("cuda") else "float32"


def free_memory() -> None:
    """Return unused GPU memory of this process to the device."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
