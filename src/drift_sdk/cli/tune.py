"""The command `tune`: measures the fastest launch configurations of products on this GPU.

    python -m drift_sdk tune meta-llama/Llama-3.1-8B     all weights of a model, into the user's cache
    python -m drift_sdk tune --log shapes.json           the shapes that an engine has run
    python -m drift_sdk tune --out table.json 6144x4096 28672x4096:gated
    python -m drift_sdk tune --out table.json --from nvidia-h200.json     the shapes of another GPU's table

A model is started with random weights of its shapes: its configuration is enough. Every start of an engine on
this machine reads the user's cache. Tuning changes no bits, see `_kernels/gemm/tuning.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
import triton

from drift_sdk._kernels.gemm.heuristic import GemmShape
from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.gemm.tuner import (
    FULL,
    KNOWN,
    MAX_CHAIN,
    WORKING_SETS,
    WeightToTune,
    random_weight,
    tune,
)
from drift_sdk._kernels.gemm.tuning import (
    MAX_FILE_BYTES,
    TunedTable,
    add_to_user_table,
    measured_on,
    read_products,
    read_whole,
    shapes_by_time,
    tuning_lock,
    write_whole,
)
from drift_sdk._kernels.launch.gpu_limits import gpu_limits
from drift_sdk.cli.engine_start import hide_progress, show_progress
from drift_sdk.cli.readiness import warm
from drift_sdk.config import EngineConfig
from drift_sdk.errors import DriftError
from drift_sdk.events import Progress

SHAPES_AT_ONCE = 16
"""Shapes whose candidates are compiled together, before they are timed. The weights of each take about 0.4 GB
of the GPU, or two tensors; the outcome is kept after each lot."""


def tune_model(model: str | Path, config: EngineConfig) -> None:
    """Measure all weights of a model, and of its draft if `config` names one, into the user's cache.

    Raises DriftError without a GPU, and what starting the engine raises.
    """
    check_gpu()
    tuning = config.replace(tuning="full", load="random", executor="graph")
    warmed = asyncio.run(warm(model, tuning, show_progress))
    hide_progress()
    print(warmed.text())


def tune_shapes(
    shapes: Sequence[tuple[int, int, bool]],
    out: Path | None,
    num_jobs: int | None,
    known: TunedTable | None = None,
) -> None:
    """Measure weights of these shapes, and add the outcome to a table.

    shapes:   (output features, input features, whether gate and up projection in one) of each weight.
    out:      JSON file of a table, made with its folder if it does not exist; None: the user's cache. Entries
              of other shapes are kept.
    num_jobs: processes that compile candidates before they are timed; None: one for each CPU.
    known:    the table of a similar GPU, whose tiles alone are compared with those of an untuned weight.
    """
    check_gpu()
    gpu = torch.cuda.get_device_name()
    machine = measured_on(gpu)
    with tuning_lock(machine):
        for first in range(0, len(shapes), SHAPES_AT_ONCE):
            found = tune(
                [weight_of(*shape) for shape in shapes[first : first + SHAPES_AT_ONCE]],
                FULL if known is None else KNOWN,
                known=known,
                num_processes=num_jobs,
                on_progress=lambda fraction: show_progress(Progress(stage="tune", fraction=fraction)),
            )
            hide_progress()
            for key, text in found.provenance.items():
                print(gpu, key, text, flush=True)
            if out is None:
                add_to_user_table(machine, found)
            else:
                add_to_table(out, found, gpu)


def weight_of(num_columns: int, inner: int, is_gated: bool) -> WeightToTune:
    """A weight of this shape, with enough random tensors that none is found in the cache."""
    shape = GemmShape(
        num_columns=num_columns,
        inner=inner,
        num_slices=num_slices(num_columns, inner, is_whole=is_gated),
        is_gated=is_gated,
    )
    number = max(2, min(MAX_CHAIN, WORKING_SETS * gpu_limits().l2_bytes // (2 * num_columns * inner)))
    return random_weight(shape, number)


def read_log(path: Path) -> list[tuple[int, int, bool]]:
    """The shapes of weights in a log of products, the largest share of time first. Raises DriftError for
    another file, or none."""
    try:
        return shapes_by_time(read_products(path))
    except ValueError as error:
        raise DriftError(f"--log: {error}") from error
    except OSError as error:
        raise DriftError(f"--log: {path}: {error.strerror}") from error


def read_table(path: Path) -> TunedTable:
    """The table in a file. Raises DriftError if it holds something else, or cannot be read."""
    try:
        return msgspec.json.decode(read_whole(path, MAX_FILE_BYTES), type=TunedTable)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DriftError(f"{path}: not a tuned table: {error}") from error
    except ValueError as error:
        raise DriftError(str(error)) from error
    except OSError as error:
        raise DriftError(f"{path}: {error.strerror}") from error


def check_gpu() -> None:
    """Raise DriftError without a GPU."""
    if not torch.cuda.is_available():
        raise DriftError("tune needs an NVIDIA GPU: torch finds none")


def add_to_table(path: Path, found: TunedTable, gpu: str) -> None:
    """Add entries to a table's file. Raises DriftError if it holds something else."""
    old = read_table(path) if path.exists() else TunedTable()
    provenance = {
        "gpu": gpu,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}",
        "commit": current_commit(),
    }
    table = TunedTable(
        gemms={**old.gemms, **found.gemms}, provenance={**old.provenance, **provenance, **found.provenance}
    )
    write_whole(path, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def current_commit() -> str:
    """The git commit of the working directory; empty if it is in no repository, or git is not installed."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return ""

    return found.stdout.strip()
