"""The machine's read bandwidth and matrix-product speed, measured in the run that is compared with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["matmul_tflop_s", "read_bandwidth_tb_s", "seconds"]

NUM_WARM_UPS, NUM_REPEATS = 3, 9


def read_bandwidth_tb_s(device: str, num_bytes: int | None = None) -> float:
    """TB/s at which a sum reads memory that does not fit any cache: 8 GiB on a GPU by default."""
    if num_bytes is None:
        num_bytes = 2**33 if device.startswith("cuda") else 2**28

    numbers = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    taken = seconds(lambda: numbers.sum(), device)
    return numbers.nbytes / taken / 1e12


def matmul_tflop_s(device: str) -> float:
    """TFLOP/s of a square bfloat16 matrix product of random numbers, 8,192 wide on a GPU."""
    size = 8192 if device.startswith("cuda") else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device) / 1e12


def seconds(call: Callable[[], object], device: str) -> float:
    """Seconds that a call takes on the device: the median of nine calls after three warm-up calls."""
    time_once = _gpu_seconds if device.startswith("cuda") else _cpu_seconds
    for _ in range(NUM_WARM_UPS):
        time_once(call)
    return statistics.median(time_once(call) for _ in range(NUM_REPEATS))


def _gpu_seconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cpu_seconds(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at
