"""Instantiation of captured graphs, on a thread beside the one that captures.

The driver makes a graph that can be launched from a captured one, in milliseconds without the interpreter's
lock. Capturing needs little else than the lock.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cuda.core import Device as CudaDevice
from cuda.core import StreamOptions
from cuda.core.graph import GraphCompleteOptions, GraphDefinition

from drift_sdk._cuda_driver import ignore_other_captures

__all__ = ["GpuReplay", "Instantiation"]


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
