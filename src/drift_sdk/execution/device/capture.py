"""Captures of steps: of what is launched into a stream, their memory, and their instantiation.

A pool of torch's allocator for the memory of captured steps.

`torch.cuda.MemPool` waits for the GPU when it is destroyed, which torch refuses while any thread allocates to
any pool of that GPU; raised in a destructor, the refusal ends the process. One engine may be closed, or
collected as garbage, while another one captures, as may the caller's own graphs.

Captures of what a step launches into a stream.

While a stream of a GPU is captured, calls that wait for the whole GPU, such as `torch.cuda.synchronize`, fail
on every thread, and end the capture. The program that the engine is part of may make them at any time.

Instantiation of captured graphs, on a thread beside the one that captures.

The driver makes a graph that can be launched from a captured one, in milliseconds without the interpreter's
lock. Capturing needs little else than the lock.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device as CudaDevice
from cuda.core import StreamOptions
from cuda.core.graph import GraphCompleteOptions, GraphDefinition
from torch import _C

from drift_sdk._cuda_driver import ignore_other_captures
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.errors import keep_forever


class CapturePool:
    """Memory of a GPU that only allocations inside `allocations` are taken from.

    It stays reserved until `release`, or until this object is collected, and is freed by the next
    `torch.cuda.empty_cache` after the tensors in it are.
    """

    def __init__(self, index: int) -> None:
        self._index, self._id = index, torch.cuda.graph_pool_handle()
        self._begin()  # makes the pool and a reference to it
        self._end()
        self._release = weakref.finalize(self, _C._cuda_releasePool, index, self._id)
        self._release.atexit = False  # torch may have ended before

    @contextmanager
    def allocations(self) -> Iterator[None]:
        """Have torch allocate from the pool in a `with` block, on this thread."""
        self._begin()
        try:
            yield
        finally:
            self._end()
            _C._cuda_releasePool(self._index, self._id)

    def release(self) -> None:
        """Let torch free the memory; idempotent. Nothing is allocated after it."""
        self._release()

    def _begin(self) -> None:
        """Take a reference, and begin to allocate from the pool on this thread."""
        _C._cuda_beginAllocateCurrentThreadToPool(self._index, self._id)

    def _end(self) -> None:
        _C._cuda_endAllocateToPool(self._index, self._id)


log = logging.getLogger("drift_sdk")

MAX_CAPTURES = 20
"""Captures of a step before its error is raised: a step whose own calls end its captures must end too."""
# Calls of this thread that cannot be captured are errors; most calls of other threads are not.
MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
SUCCESS = driver.CUresult.CUDA_SUCCESS
INVALIDATED = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


class CaptureEnded(Exception):
    """A capture that a call of this process has ended. Its cause is the error of the step, if it had one."""


def captured_graph(stream: int, step: Callable[[], None]) -> GraphDefinition:
    """Return the graph of what `step` launches into a stream, which is given by its handle.

    The step is captured again if another thread has ended the capture. Raises the step's errors, and
    ExecutorError after `MAX_CAPTURES` captures.
    """
    for number in range(1, MAX_CAPTURES + 1):
        graph = GraphDefinition()
        try:
            with _capture(stream, graph):
                step()
        except CaptureEnded as error:
            log.debug("capture %d of a step was ended by another thread's call", number)
            if number == MAX_CAPTURES:
                raise ExecutorError(
                    f"a step could not be captured: calls that wait for the whole GPU, such as "
                    f"torch.cuda.synchronize, ended each of {MAX_CAPTURES} captures"
                ) from error
        else:
            break

    return graph


@contextmanager
def _capture(stream: int, graph: GraphDefinition) -> Iterator[None]:
    """Capture a stream into a graph in a `with` block. Raises CaptureEnded if the capture did not last."""
    (status,) = driver.cuStreamBeginCaptureToGraph(stream, graph.handle, None, None, 0, MODE)
    _check(status)
    try:
        yield
    except BaseException as error:
        if _end(stream, graph) == INVALIDATED:
            raise CaptureEnded from error
        raise

    status = _end(stream, graph)
    if status == INVALIDATED:
        raise CaptureEnded

    _check(status)


def _end(stream: int, graph: GraphDefinition) -> driver.CUresult:
    """End the capture of a stream into a graph and return the driver's status."""
    status, _ = driver.cuStreamEndCapture(stream)
    if status != SUCCESS:
        keep_forever(graph)  # the driver has freed it, and may use its address for the next one
    return status


def _check(status: driver.CUresult) -> None:
    if status != SUCCESS:
        raise RuntimeError(f"a stream could not be captured: {status.name}")


class GpuReplay:
    """A captured step on a GPU. graph: of cuda.core; None until it is instantiated, and when it is closed."""

    def __init__(self, stream: Any) -> None:
        self.graph: Any = None
        self._stream = stream

    def launch(self) -> None:
        self.graph.launch(self._stream)

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
            self.graph = None


class Instantiation:
    """Instantiates graphs that one thread captures, and uploads them by a stream of its own. To be finished,
    or cancelled."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream = device.create_stream(options=StreamOptions(nonblocking=True))
        self._thread = ThreadPoolExecutor(1, "drift-graphs", ignore_other_captures)
        self._started: list[tuple[GpuReplay, Future[Any]]] = []

    def start(self, graph: GraphDefinition, stream: Any) -> GpuReplay:
        """Instantiate a captured graph, and return its replay, which goes to `stream` and can be launched
        after `finish`."""
        replay = GpuReplay(stream)
        self._started.append((replay, self._thread.submit(self._instantiate, graph)))
        return replay

    def finish(self) -> None:
        """Wait until all replays can be launched. Raises the error of the first that cannot be; `cancel` is
        to be called then."""
        with self._thread:
            for replay, instantiated in self._started:
                replay.graph = instantiated.result()
        self._stream.sync()
        self._stream.close()

    def cancel(self) -> None:
        """Wait until the thread has ended, and forget the graphs."""
        self._thread.shutdown(cancel_futures=True)
        self._started.clear()
        self._stream.close()

    def _instantiate(self, graph: GraphDefinition) -> Any:
        self._device.set_current()  # on this thread
        return graph.instantiate(GraphCompleteOptions(upload_stream=self._stream))
