"""Streams of GPUs, which the engines of a process use one after the other.

Libraries keep a workspace for every stream that they have ever seen: with a new stream each, every engine
would leave a workspace behind.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cuda.core import Device as CudaDevice
from cuda.core import StreamOptions

from drift_sdk._cuda_driver import ignore_other_captures

__all__ = ["external_stream", "prepared_stream", "return_stream", "take_stream", "wait_for_preparation"]

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
