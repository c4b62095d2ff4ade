"""Captures of what a step launches into a stream.

While a stream of a GPU is captured, calls that wait for the whole GPU, such as `torch.cuda.synchronize`, fail
on every thread, and end the capture. The program that the engine is part of may make them at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cuda.bindings import driver
from cuda.core.graph import GraphDefinition

from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.errors import keep_forever

__all__ = ["MAX_CAPTURES", "captured_graph"]

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
