"""A semaphore that a CUDA stream posts: a wait for the device that can end after a time.

CUDA has no wait with a timeout. A second stream waits for an event, and then a thread of the driver posts a
semaphore of the C library, without Python and without its lock. Nothing is inserted into the first stream.
"""

from __future__ import annotations

import ctypes
import errno
import time
from functools import partial
from typing import Any

from cuda.bindings import driver as cuda_driver
from cuda.core import Device as CudaDevice
from cuda.core import StreamOptions

__all__ = ["StreamSignal"]

SEMAPHORE_BYTES = 64
"""More than the size of a sem_t on any platform."""
CLOCK_REALTIME, CLOCK_MONOTONIC = 0, 1


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class StreamSignal:
    """Waits for events of a device. Used on one thread.

    The semaphore lives as long as the process: a stream that hangs may post it at any time.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._stream = device.create_stream(options=StreamOptions(nonblocking=True))
        libc = ctypes.CDLL(None, use_errno=True)
        self._semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
        _kept.append(self._semaphore)
        libc.sem_init(self._semaphore, 0, 0)
        # glibc has sem_clockwait from 2.30 on; sem_timedwait takes the time of day.
        has_clock = hasattr(libc, "sem_clockwait")
        self._clock = CLOCK_MONOTONIC if has_clock else CLOCK_REALTIME
        self._wait = (
            partial(libc.sem_clockwait, self._semaphore, self._clock)
            if has_clock
            else partial(libc.sem_timedwait, self._semaphore)
        )
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        self._post: Any = cuda_driver.CUhostFn(post)

    def after(self, event: Any) -> None:
        """Post the semaphore once the device has reached the latest mark of an event of cuda.core."""
        self._stream.wait(event)
        address = ctypes.addressof(self._semaphore)
        (error,) = cuda_driver.cuLaunchHostFunc(int(self._stream.handle), self._post, address)
        if error != cuda_driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuLaunchHostFunc: {error!r}")

    def wait(self, timeout_s: float) -> None:
        """Block until the semaphore has been posted or the time is over. Posts of earlier waits that ended by
        time count too: the caller asks the event whether it is done."""
        until = time.clock_gettime_ns(self._clock) + int(timeout_s * 1e9)
        timespec = Timespec(until // 10**9, until % 10**9)
        if self._wait(ctypes.byref(timespec)) != 0:
            number = ctypes.get_errno()
            if number not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(number, "the wait for a semaphore failed")


_kept: list[Any] = []
