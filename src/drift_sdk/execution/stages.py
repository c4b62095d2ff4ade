"""Marks around the parts of a round, for measuring. Whoever does not ask for them captures the same graphs as
without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from drift_sdk.execution.device.device import Device, Replay

__all__ = [
    "NO_STAGE_MARKS",
    "GpuMark",
    "Mark",
    "NoStageMarks",
    "NvtxStageMarks",
    "StageMarks",
    "TimedStageMarks",
    "forward_stage",
]

NO_MARK = nullcontext()


def forward_stage(num_draft_tokens: int) -> str:
    """What the model's own part of a round is called."""
    return "verify" if num_draft_tokens > 0 else "base_decode"


class StageMarks(Protocol):
    """`with stages("verify"):` around what a step starts on the device, or around the launch of a replay."""

    def __call__(self, name: str) -> AbstractContextManager[None]: ...

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        """As the device does."""


class NoStageMarks:
    def __call__(self, name: str) -> AbstractContextManager[None]:
        return NO_MARK

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        return device.capture(step)


NO_STAGE_MARKS = NoStageMarks()


class NvtxStageMarks(NoStageMarks):
    """Ranges of a profiler: around each stage while steps are warmed up and captured, and ever after around
    the launches of prefill steps and rounds."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        nvtx: Any = torch.cuda.nvtx
        return nvtx.range(name)  # type: ignore[no-any-return]  # a context manager without annotations


class Mark(Protocol):
    """A point in what the device does, recorded by a step and again by each of its replays."""

    def record(self) -> None: ...

    def seconds_since(self, earlier: Any) -> float: ...


class GpuMark:
    """An event that is a node of the graph in which it is recorded."""

    def __init__(self) -> None:
        event: Any = torch.cuda.Event
        self._event = event(enable_timing=True, external=True)

    def record(self) -> None:
        self._event.record()

    def seconds_since(self, earlier: GpuMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


Span = tuple[str, Mark, Mark]


class TimedStageMarks:
    """Times the stages of captured steps. Kernels on either side of a mark do not overlap, so a round takes a
    little longer with them. A stage within another one is part of that.
    """

    def __init__(self, make_mark: Callable[[], Mark] = GpuMark) -> None:
        self._make_mark = make_mark
        self._spans: list[Span] | None = None  # of the step that is being run
        self._is_within = False
        self._launched: list[list[Span]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._spans is None or self._is_within:
            yield
            return

        start, end = self._make_mark(), self._make_mark()
        self._is_within = True
        start.record()
        try:
            yield
        finally:
            self._is_within = False
        end.record()
        self._spans.append((name, start, end))

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        spans: list[Span] = []
        replay = device.capture(partial(self._run, step, spans))
        return WatchedReplay(replay, lambda: self._launched.append(spans))

    def take(self) -> dict[str, float]:
        """Seconds of each stage in the replays launched since the last call: each once, and all over."""
        found: dict[str, float] = {}
        for name, start, end in (span for spans in self._launched for span in spans):
            found[name] = found.get(name, 0.0) + end.seconds_since(start)
        self._launched.clear()
        return found

    def _run(self, step: Callable[[], None], spans: list[Span]) -> None:
        # A step is run to warm up before it is captured: the latest marks are those of the graph.
        spans.clear()
        self._spans = spans
        try:
            step()
        finally:
            self._spans = None


class WatchedReplay:
    def __init__(self, replay: Replay, on_launch: Callable[[], None]) -> None:
        self._replay, self._on_launch = replay, on_launch

    def launch(self) -> None:
        self._on_launch()
        self._replay.launch()

    def close(self) -> None:
        self._replay.close()
