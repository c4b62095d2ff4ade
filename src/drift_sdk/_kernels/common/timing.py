"""Times of kernels in a captured graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["time_us"]


def time_us(step: Callable[[], None], num_calls: int, *, num_timings: int = 5) -> float:
    """Return the microseconds of one of the `num_calls` calls in `step`, which is captured in a CUDA graph.

    The median of `num_timings` measurements of four replays each, after as many that warm up.
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
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
