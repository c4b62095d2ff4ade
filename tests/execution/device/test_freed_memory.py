"""Memory of a closed engine, returned to the operating system."""

from __future__ import annotations

import ctypes
import sys

import psutil
import pytest
import torch

from drift_sdk.execution.device.memory import return_freed_memory

NUM_TENSORS = 1000


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)
def test_freed_tensors_of_the_cpu_leave_the_process() -> None:
    """Blocks below 128 KiB come from the heap, which shrinks by itself only from its end."""
    kept = [torch.ones(16_384) for _ in range(NUM_TENSORS)]  # 64 KiB each
    size = psutil.Process().memory_info().rss
    last = kept[-1:]
    kept.clear()
    return_freed_memory(torch.device("cpu"))
    assert psutil.Process().memory_info().rss < size - NUM_TENSORS * 65_536 // 2
    assert last[0].sum() == 16_384
