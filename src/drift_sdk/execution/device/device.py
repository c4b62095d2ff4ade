"""GPUs as the engine's thread uses them: streams, events and captured graphs; several GPUs as one device.

`torch.cuda.MemPool` waits for the GPU when it is destroyed, which torch refuses while any thread allocates
to any pool of that GPU; raised in a destructor, the refusal ends the process. One engine may be closed, or
collected as garbage, while another one captures, as may the caller's own graphs.

While a stream of a GPU is captured, calls that wait for the whole GPU, such as `torch.cuda.synchronize`,
fail on every thread, and end the capture. The program that the engine is part of may make them at any time.

The driver makes a graph that can be launched from a captured one, in milliseconds without the interpreter's
lock. Capturing needs little else than the lock, so graphs are instantiated on a thread beside it.

Errors of CUDA and its libraries become ExecutorError.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.utils.dlpack
from cuda.bindings import driver
from cuda.core import Device as CudaDevice
from cuda.core import DeviceMemoryResource, DeviceMemoryResourceOptions, EventOptions, StreamOptions
from cuda.core.graph import GraphCompleteOptions, GraphDefinition
from torch import _C, Tensor

from drift_sdk._cuda_driver import ignore_other_captures
from drift_sdk._kernels.launch.launch_order import checked_launches
from drift_sdk._kernels.launch.parallel_compile import compile_kernels, missing_kernels, recorded_kernels
from drift_sdk.errors import DriftError, ExecutorError
from drift_sdk.execution.device.streams import StreamSignal, external_stream, return_stream, take_stream

# The driver's name of an error, which cuda.core gives, and its description, which torch and Triton give.
# After each of these errors every further CUDA call of the process fails. cuBLAS has its own names of errors,
# but they do not tell whether the context is lost; the next call does.
FATAL = {
    "CUDA_ERROR_DEINITIALIZED": "driver shutting down",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "uncorrectable ECC error",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "uncorrectable NVLink error",
    "CUDA_ERROR_CONTAINED": "contained by the GPU's error containment",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the launch timed out and was terminated",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "context is destroyed",
    "CUDA_ERROR_ASSERT": "device-side assert triggered",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "hardware stack error",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an illegal instruction was encountered",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "misaligned address",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "operation not supported on global/shared address space",
    "CUDA_ERROR_INVALID_PC": "invalid program counter",
    "CUDA_ERROR_LAUNCH_FAILED": "unspecified launch failure",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "tensor memory not completely freed",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": "MPS client has been terminated",
    "CUDA_ERROR_EXTERNAL_DEVICE": "an async error has occurred in external entity outside of CUDA",
}
_kept: set[int] = set()
OUT_OF_MEMORY = ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory")


def executor_error(error: BaseException) -> ExecutorError:
    """The ExecutorError of a failing step or start.

    It has `process_unusable` set if the error, or an error that led to it, is one that CUDA does not recover
    from.
    """
    texts = [f"{type(each).__name__}: {each}" for each in _with_causes(error)]
    brief = texts[0].splitlines()[0]
    for text in texts:
        if any(name in text or words in text for name, words in FATAL.items()):
            reason = "no engine of this process can use the GPU any more"
            return ExecutorError(f"{reason}: {brief}", process_unusable=True)

    if isinstance(error, torch.OutOfMemoryError) or any(words in texts[0] for words in OUT_OF_MEMORY):
        advice = "a smaller kv_cache_tokens, max_num_seqs or prefill_token_budget needs less"
        return ExecutorError(f"the GPU has too little memory left: {brief} ({advice})")

    return ExecutorError(f"failed on the device: {brief}")


@contextmanager
def typed_errors(owner: object) -> Iterator[None]:
    """Raise errors of the block as ExecutorError, unless they are errors of this package already.

    After an error that leaves the process unusable, `owner`, which holds the device's memory, is never freed.
    """
    try:
        yield
    except DriftError as error:
        if isinstance(error, ExecutorError) and error.process_unusable:
            keep_forever(owner)
        raise
    except Exception as error:
        found = executor_error(error)
        if found.process_unusable:
            keep_forever(owner)
        raise found from error


def keep_forever(thing: object) -> None:
    """Prevent `thing` from being freed, even when the interpreter exits.

    After a fatal error torch cannot free device memory: the driver refuses, torch raises inside a destructor,
    and that ends the process. Memory of a device that hangs cannot be freed either.
    """
    _kept.add(id(thing))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def is_kept(thing: object) -> bool:
    """Whether `keep_forever` was called with `thing`."""
    return id(thing) in _kept


def _with_causes(error: BaseException) -> list[BaseException]:
    """The error, then the errors that led to it, each once."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__

    return found


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


ERROR_CHECK_S = 0.05
"""Seconds after which a wait with a timeout looks at the event even if it has not been signalled: after an
error of the device nothing is signalled any more."""


class Replay(Protocol):
    """A captured step."""

    def launch(self) -> None:
        """Start the step after all work started before, and return at once."""

    def close(self) -> None:
        """Free the graph; idempotent."""


class Event(Protocol):
    """A mark in the stream, which may be recorded any number of times."""

    def record(self) -> None:
        """Put the mark after all work started so far."""

    @property
    def is_done(self) -> bool:
        """Whether the device has reached the latest mark; true if the event was never recorded."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the device has reached the latest mark.

        Raises ExecutorError with `process_unusable` if that takes more than `timeout_s` seconds: no engine of
        the process can use the device any more.
        """

    def seconds_since(self, earlier: Event) -> float:
        """Seconds of the device between two marks, both of which it has reached."""


class ServingDevice(Protocol):
    """A GPU as an executor uses it that serves. All work goes to one stream and runs in order."""

    torch_device: torch.device

    @property
    def num_allocations(self) -> int:
        """Allocations by torch on the device since the process started, for any code of the process."""

    def work(self) -> AbstractContextManager[None]:
        """A context in which torch and Triton work goes to the stream."""

    def event(self) -> Event:
        """A new event, not recorded yet."""

    def close(self) -> None:
        """Free what the device object holds. Work in the stream must have ended."""


class Device(ServingDevice, Protocol):
    """A GPU as an executor uses it that starts."""

    def mapped_memory(self, num_bytes: int, peers: Sequence[torch.device]) -> Tensor:
        """Zeros [num_bytes] uint8 on this GPU, which the GPUs `peers` can read and write too."""

    def compile_kernels(
        self, steps: Iterable[Callable[[], None]], on_progress: Callable[[float], None]
    ) -> None:
        """Compile the kernels of steps before they run, if most of them have to be compiled. on_progress:
        called with the fraction that is done."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Allocate all that a step needs besides its own buffers: kernels and library workspaces. The step
        may be run for that, with arbitrary inputs."""

    def capture(self, step: Callable[[], None]) -> Replay:
        """Capture a step as a graph. The step may be run for that, with arbitrary inputs."""

    def finish_captures(self) -> None:
        """Wait until all captured steps can be launched; they must not be before."""


class _GpuEvent:
    def __init__(self, device: CudaDevice, stream: Any, signal: Callable[[], StreamSignal]) -> None:
        """signal: returns the device's signal, which is made when it is first needed."""
        self._event = device.create_event(options=EventOptions(timing_enabled=True, blocking_sync=True))
        self._stream, self._signal = stream, signal
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

        deadline = time.monotonic() + timeout_s
        if self.is_done:
            return

        signal = self._signal()
        signal.after(self._event)
        while True:
            left = deadline - time.monotonic()
            signal.wait(min(max(left, 0.0), ERROR_CHECK_S))
            if self.is_done:
                return

            if left <= 0.0:
                raise step_timeout(timeout_s)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _GpuEvent)
        return float(self._event - earlier._event) / 1e3


def step_timeout(timeout_s: float) -> ExecutorError:
    """The error of a device that has not finished a step within `timeout_s` seconds."""
    message = f"the device has not finished a step within {timeout_s:g} s and may never do so"
    return ExecutorError(message, process_unusable=True)


class GpuDevice:
    """An NVIDIA GPU through cuda.core. It is made and used on one thread.

    Graphs share one memory pool for what their steps allocate, so only one graph may run at a time.
    """

    def __init__(self, index: int) -> None:
        self.torch_device: torch.device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        torch.cuda.current_stream()  # makes torch's context, which cuda.core then shares
        self._device = CudaDevice(index)
        self._device.set_current()
        self._stream = take_stream(index)
        self._torch_stream = external_stream(index, self._stream)
        self._pool = CapturePool(index)
        self._instantiation: Instantiation | None = None  # of what was captured since the last finish
        self._signal: StreamSignal | None = None  # of waits with a timeout

    @property
    def num_allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.torch_device).get("allocation.all.allocated", 0))

    @contextmanager
    def work(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._torch_stream):
            yield

    def compile_kernels(
        self, steps: Iterable[Callable[[], None]], on_progress: Callable[[float], None]
    ) -> None:
        steps = iter(steps)
        with self.work(), self._pool.allocations():
            with recorded_kernels() as kernels:
                next(steps)()
            # The first step shows whether kernels were compiled on this machine before.
            if len(missing_kernels(kernels)) * 2 > len(kernels):
                with recorded_kernels() as others:
                    for step in steps:
                        step()
                compile_kernels(missing_kernels([*kernels, *others]), on_progress=on_progress)
            self._stream.sync()

    def warm_up(self, step: Callable[[], None]) -> None:
        with self.work(), self._pool.allocations():
            step()
            self._stream.sync()

    def capture(self, step: Callable[[], None]) -> Replay:
        with self.work():
            with checked_launches():
                step()  # compiles and loads all kernels, allocates library workspaces
            self._stream.sync()
            with self._pool.allocations():
                graph = captured_graph(int(self._stream.handle), step)
            if self._instantiation is None:
                self._instantiation = Instantiation(self._device)
            return self._instantiation.start(graph, self._stream)

    def finish_captures(self) -> None:
        if self._instantiation is not None:
            self._instantiation.finish()
            self._instantiation = None

    def event(self) -> Event:
        with torch.cuda.device(self.torch_device):
            return _GpuEvent(self._device, self._stream, self._stream_signal)

    def mapped_memory(self, num_bytes: int, peers: Sequence[torch.device]) -> Tensor:
        """Zeros [num_bytes] uint8 on this GPU, which the GPUs `peers` can read and write too.

        The memory is a pool of its own: nothing else of this GPU is mapped to its peers. It is freed with the
        tensor and those made from it.
        """
        with self.work():
            resource = DeviceMemoryResource(self._device, DeviceMemoryResourceOptions())
            resource.peer_accessible_by = [peer.index for peer in peers]
            buffer = resource.allocate(num_bytes, stream=self._stream)
            memory = torch.utils.dlpack.from_dlpack(buffer).view(torch.uint8)
            memory.zero_()
            self._stream.sync()
        return memory

    def _stream_signal(self) -> StreamSignal:
        if self._signal is None:
            with torch.cuda.device(self.torch_device):
                self._signal = StreamSignal(self._device)
        return self._signal

    def close(self) -> None:
        """Keep the stream for the next engine, and return the memory that torch has cached to the device, for
        engines of any process."""
        if self._instantiation is not None:  # a step could not be captured
            self._instantiation.cancel()
        self._stream.sync()
        return_stream(self._device.device_id, self._stream)
        self._pool.release()
        torch.cuda.empty_cache()


class GroupReplay:
    """The graphs of one step on all GPUs, launched one right after the other."""

    def __init__(self, replays: Sequence[Replay]) -> None:
        self._replays = replays

    def launch(self) -> None:
        for replay in self._replays:
            replay.launch()

    def close(self) -> None:
        for replay in self._replays:
            replay.close()


class GroupEvent:
    """A mark in the streams of all GPUs, reached when all have reached it."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def record(self) -> None:
        for event in self._events:
            event.record()

    @property
    def is_done(self) -> bool:
        return all(event.is_done for event in self._events)

    def wait(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for event in self._events:
            if deadline is None or timeout_s is None:
                event.wait()
                continue

            try:
                event.wait(max(deadline - time.monotonic(), 0.0))
            except ExecutorError as error:
                raise step_timeout(timeout_s) from error  # of all GPUs, not of what others have left of it

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two marks on the first GPU."""
        assert isinstance(earlier, GroupEvent)
        return self._events[0].seconds_since(earlier._events[0])


class DeviceGroup:
    """The GPUs of a tensor-parallel model. `torch_device` and `work` are those of the first one."""

    def __init__(self, devices: Sequence[ServingDevice]) -> None:
        self._devices = devices
        self.torch_device = devices[0].torch_device

    @property
    def num_allocations(self) -> int:
        return sum(device.num_allocations for device in self._devices)

    def work(self) -> AbstractContextManager[None]:
        return self._devices[0].work()

    def event(self) -> Event:
        return GroupEvent([device.event() for device in self._devices])

    def close(self) -> None:
        for device in self._devices:
            device.close()
