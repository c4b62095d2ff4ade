"""The library of the CUDA driver, for calls that must not wait for imports of torch or cuda.core."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["ignore_other_captures", "load_driver"]

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
