"""Times of kernels in a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["time_us"]


def time_us(step: Callable[[], None], num_calls: int, *, num_timings: int = 5) -> float:
    """Return the microseconds of one of the `num_calls` calls in `step`, which is captured in a CUDA graph.

    The median of `num_timings` measurements of four replays each, after as many that warm up. Nothing waits
    for more of the GPU than the stream of the measurements, and other threads may call CUDA meanwhile.
    """
    with _timing_stream() as stream:
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
        times: list[float] = []
        for _ in range(2 * num_timings):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / 4 / num_calls)

    return sorted(times[num_timings:])[num_timings // 2]


@contextmanager
def _timing_stream() -> Iterator[torch.cuda.Stream]:
    """Work of a `with` block goes to the stream of measurements, after that of the current stream."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream


@cache
def _stream(index: int) -> Any:
    """The stream of measurements on a GPU. Libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(index)
