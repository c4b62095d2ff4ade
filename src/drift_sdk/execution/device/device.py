"""One GPU as the engine's thread uses it: a stream, events on it, and graphs captured from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from cuda.core import Device as CudaDevice
from cuda.core import EventOptions, StreamOptions
from cuda.core.graph import GraphCompleteOptions

from drift_sdk._kernels.common.launch_order import checked_launches
from drift_sdk.errors import ExecutorError

__all__ = ["Device", "Event", "GpuDevice", "Replay"]

POLL_S = 50e-6


class Replay(Protocol):
    """A captured step."""

    def launch(self) -> None:
        """Start it behind what was started before, and return at once."""

    def close(self) -> None: ...


class Event(Protocol):
    """A mark in the stream. May be recorded any number of times."""

    def record(self) -> None: ...

    @property
    def is_done(self) -> bool:
        """Whether the device has passed the latest mark; true if there is none."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has. ExecutorError, after which no engine of the process can use the device, if that takes
        more than `timeout_s` seconds."""

    def seconds_since(self, earlier: Event) -> float: ...


class Device(Protocol):
    """What an executor needs of a GPU. All work goes to one stream, in order."""

    torch_device: torch.device

    @property
    def num_allocations(self) -> int:
        """That torch has made on the device since the process started, for whomever."""

    def work(self) -> AbstractContextManager[None]:
        """Torch and Triton work in this block goes to the stream."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Have all that a step allocates beside its own buffers: kernels, library workspaces. It may be run
        for that, with whatever is in its inputs."""

    def capture(self, step: Callable[[], None]) -> Replay:
        """`step` as something to replay. It may be run for that, with whatever is in its inputs."""

    def event(self) -> Event: ...

    def close(self) -> None: ...


class _GpuReplay:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph = graph
        self._stream = stream

    def launch(self) -> None:
        self._graph.launch(self._stream)

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()
            self._graph = None


class _GpuEvent:
    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._event = device.create_event(options=EventOptions(timing_enabled=True, blocking_sync=True))
        self._stream = stream
        self._is_recorded = False

    def record(self) -> None:
        self._stream.record(self._event)
        self._is_recorded = True

    @property
    def is_done(self) -> bool:
        return not self._is_recorded or bool(self._event.is_done)

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            if self._is_recorded:
                self._event.sync()
            return

        # CUDA has no wait that ends before the device does.
        deadline = time.monotonic() + timeout_s
        while not self.is_done:
            if time.monotonic() > deadline:
                raise step_timeout(timeout_s)

            time.sleep(POLL_S)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _GpuEvent)
        return float(self._event - earlier._event) / 1e3


def step_timeout(timeout_s: float) -> ExecutorError:
    message = f"the device has not finished a step within {timeout_s:g} s and may never do so"
    return ExecutorError(message, process_unusable=True)


# Streams of engines that were closed, by device. Libraries keep a workspace for each stream that they have
# seen, for good: with new streams every engine would leave one behind.
_idle_streams: dict[int, list[Any]] = {}


class GpuDevice:
    """An NVIDIA GPU through cuda.core. Made on the thread that uses it, and used on that thread alone.

    Graphs share one memory pool for what their steps allocate, so only one of them runs at a time.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        torch.cuda.current_stream()  # torch's context, which cuda.core then shares
        self._device = CudaDevice(index)
        self._device.set_current()
        idle = _idle_streams.setdefault(index, [])
        new = StreamOptions(nonblocking=True)
        self._stream = idle.pop() if idle else self._device.create_stream(options=new)
        external: Any = torch.cuda.ExternalStream
        self._torch_stream = external(int(self._stream.handle), device=self.torch_device)
        self._pool = torch.cuda.MemPool()

    @property
    def num_allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.torch_device).get("allocation.all.allocated", 0))

    @contextmanager
    def work(self) -> Iterator[None]:
        """Torch and Triton work in this block goes to the stream."""
        with torch.inference_mode(), torch.cuda.stream(self._torch_stream):
            yield

    def warm_up(self, step: Callable[[], None]) -> None:
        with self.work(), torch.cuda.use_mem_pool(self._pool):
            step()
            self._stream.sync()

    def capture(self, step: Callable[[], None]) -> Replay:
        with self.work():
            with checked_launches():
                step()  # all kernels are compiled and loaded, libraries have their workspaces
            self._stream.sync()
            builder = self._stream.create_graph_builder()
            with torch.cuda.use_mem_pool(self._pool):
                # Our own mistakes are errors; other threads' CUDA calls are none of our business.
                builder.begin_building("thread_local")
                try:
                    step()
                    builder.end_building()
                except BaseException:
                    builder.close()
                    raise

            graph = builder.complete(GraphCompleteOptions(upload_stream=self._stream))
        return _GpuReplay(graph, self._stream)

    def event(self) -> Event:
        return _GpuEvent(self._device, self._stream)

    def close(self) -> None:
        """Also give the memory that torch has cached back to the device, for the next engine of any
        process."""
        self._stream.sync()
        _idle_streams[self._device.device_id].append(self._stream)
        del self._pool
        torch.cuda.empty_cache()
