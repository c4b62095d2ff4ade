"""Streams of GPUs, which the engines of a process use one after the other.

Libraries keep a workspace for every stream that they have ever seen: with a new stream each, every engine
would leave a workspace behind.

A semaphore that a CUDA stream posts: a wait for the device that can end after a time.

CUDA has no wait with a timeout. A second stream waits for an event, and then a thread of the driver posts a
semaphore of the C library, without Python and without its lock. Nothing is inserted into the first stream.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from cuda.bindings import driver as cuda_driver
from cuda.core import Device as CudaDevice
from cuda.core import StreamOptions

from drift_sdk._cuda_driver import ignore_other_captures

log = logging.getLogger("drift_sdk")

_idle: defaultdict[int, list[Any]] = defaultdict(list)
"""Streams that no engine uses, by device."""
_prepared: dict[int, Any] = {}
"""The streams of `prepared_stream` that no engine has taken yet, by device."""
_preparing: dict[int, threading.Thread] = {}
"""Threads of `prepared_stream`, by device."""


@contextmanager
def prepared_stream(index: int, prepare: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Call `prepare` in the stream that `take_stream` returns next for a GPU, and then what it returns, in
    the same stream on a thread of its own. The thread ends with the `with` block, if not before.

    Errors in both are only logged: the engine meets them again where they can be reported.
    """
    try:
        _start(index, prepare)
    except Exception as error:
        _note(index, error)
    try:
        yield
    finally:
        wait_for_preparation(index)
        if (stream := _prepared.pop(index, None)) is not None:  # no engine has taken it
            return_stream(index, stream)


def wait_for_preparation(index: int) -> None:
    """Wait for the thread of `prepared_stream`, if there is one."""
    if (thread := _preparing.pop(index, None)) is not None:
        thread.join()


def take_stream(index: int) -> Any:
    """A stream of cuda.core on the current GPU, which no other engine uses until it is returned."""
    if (stream := _prepared.pop(index, None)) is not None:
        return stream

    return _idle[index].pop() if _idle[index] else _new_stream(index)


def return_stream(index: int, stream: Any) -> None:
    """Keep a stream for the next engine, whose work comes after that which is still in it."""
    _idle[index].append(stream)


def external_stream(index: int, stream: Any) -> Any:
    """A stream of cuda.core as torch's."""
    external: Any = torch.cuda.ExternalStream
    return external(int(stream.handle), device=torch.device("cuda", index))


def _new_stream(index: int) -> Any:
    torch.cuda.current_stream()  # makes torch's context, which cuda.core then shares
    device = CudaDevice(index)
    device.set_current()
    return device.create_stream(options=StreamOptions(nonblocking=True))


def _start(index: int, prepare: Callable[[], Callable[[], None]]) -> None:
    with torch.cuda.device(index):
        stream = _prepared[index] = take_stream(index)
        with torch.inference_mode(), torch.cuda.stream(external_stream(index, stream)):
            work = prepare()
    thread = threading.Thread(target=_run, args=(index, stream, work), name="drift-library")
    thread.start()
    _preparing[index] = thread


def _run(index: int, stream: Any, work: Callable[[], None]) -> None:
    try:
        ignore_other_captures()
        CudaDevice(index).set_current()  # on this thread; torch warns where cuBLAS has to do it
        with (
            torch.cuda.device(index),
            torch.inference_mode(),
            torch.cuda.stream(external_stream(index, stream)),
        ):
            work()
    except Exception as error:
        _note(index, error)


def _note(index: int, error: Exception) -> None:
    log.debug("GPU %d was not prepared: %s", index, error)


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
