"""The CUDA driver without torch: its library, and contexts of GPUs that are made while torch is imported."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
CAPTURE_MODE_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h."""


def load_driver() -> ctypes.CDLL | None:
    """Return the driver's library, initialised; None on a machine without a driver that finds a GPU.

    Calls through ctypes hold no lock of the interpreter.
    """
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None

    return driver if driver.cuInit(0) == 0 else None


def ignore_other_captures() -> None:
    """Let this thread call CUDA while other threads capture graphs.

    By default CUDA refuses calls that allocate memory, wait, or ask whether an event is done while any thread
    captures in the mode "global", which is that of `torch.cuda.graph`; that capture then fails too. What this
    thread captures itself is checked as before.
    """
    if (driver := load_driver()) is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)))


@contextmanager
def device_contexts(device: str, num_devices: int) -> Iterator[None]:
    """Make the contexts of an engine's GPUs while the `with` block runs, and keep them until it ends.

    device: "auto", "cpu", "cuda" or "cuda:N", the first of the GPUs.

    The driver takes a few tenths of a second to make a context. torch and cuda.core use the context that a
    process already has on a GPU: whatever opens the model in the block has taken it by the end. If it has
    failed before, contexts are freed. Nothing is raised on a machine without a GPU or for GPUs that it does
    not have: the block finds that out.
    """
    indices = device_indices(device, num_devices)
    kept: list[tuple[ctypes.CDLL, ctypes.c_int]] = []
    thread = threading.Thread(target=_make, args=(indices, kept), name="drift-context", daemon=True)
    if indices:
        thread.start()
    try:
        yield
    finally:
        if indices:
            thread.join()
        for driver, index in kept:
            driver.cuDevicePrimaryCtxRelease_v2(index)


def device_indices(device: str, num_devices: int) -> range:
    """The indices of the GPUs that an engine uses if the machine has them."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda"):
        return range(0)

    first = int(index or 0)
    return range(first, first + num_devices)


def _make(indices: range, kept: list[tuple[ctypes.CDLL, ctypes.c_int]]) -> None:
    """Make the contexts, and note those that are to be released."""
    if (driver := load_driver()) is None:
        return

    ignore_other_captures()
    for index in indices:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        found = driver.cuDeviceGet(ctypes.byref(device), index)
        if found == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
            kept.append((driver, device))
