"""Contexts of GPUs, made on a thread of their own while the engine's thread imports torch.

The driver takes a few tenths of a second to make a context. torch and cuda.core use the context that a
process already has on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from drift_sdk._cuda_driver import ignore_other_captures, load_driver
from drift_sdk.config import EngineConfig


@contextmanager
def device_contexts(config: EngineConfig) -> Iterator[None]:
    """Make the contexts of an engine's GPUs while the `with` block runs, and keep them until it ends.

    By then whatever opens the model in the block has taken them. If it has failed before, they are freed.
    Nothing is raised on a machine without a GPU or for GPUs that it does not have: the block finds that out.
    """
    indices = device_indices(config)
    kept: list[tuple[ctypes.CDLL, ctypes.c_int]] = []
    thread = threading.Thread(target=_make, args=(indices, kept), name="drift-context", daemon=True)
    if indices:
        thread.start()
    try:
        yield
    finally:
        if indices:
            thread.join()
        for driver, device in kept:
            driver.cuDevicePrimaryCtxRelease_v2(device)


def device_indices(config: EngineConfig) -> range:
    """The indices of the GPUs that an engine uses if the machine has them."""
    kind, _, index = config.device.partition(":")
    if kind not in ("auto", "cuda"):
        return range(0)

    first = int(index or 0)
    return range(first, first + config.tensor_parallel)


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
