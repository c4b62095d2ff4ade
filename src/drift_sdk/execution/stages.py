"""Marks around the stages of a step, for measuring. With NO_STAGE_MARKS the captured graphs contain none."""

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
    """The name of the stage in which the target computes a round's rows."""
    return "verify" if num_draft_tokens > 0 else "base_decode"


class StageMarks(Protocol):
    """Used as `with stages("verify"):` around the kernels of a stage, or around the launch of a replay."""

    def __call__(self, name: str) -> AbstractContextManager[None]: ...

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        """Capture a step by `device.capture`, with its marks."""


class NoStageMarks:
    """Marks nothing."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return NO_MARK

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        return device.capture(step)


NO_STAGE_MARKS = NoStageMarks()


class NvtxStageMarks(NoStageMarks):
    """Profiler ranges: around each stage while steps are warmed up and captured, and while serving around the
    launches of prefill steps and rounds."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        nvtx: Any = torch.cuda.nvtx
        return nvtx.range(name)  # type: ignore[no-any-return]  # a context manager without annotations


class Mark(Protocol):
    """A point in the device's work, recorded by a step and again by each of its replays."""

    def record(self) -> None:
        """Put the mark after all work recorded so far."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds of the device between two marks of its latest run."""


class GpuMark:
    """A mark that is a node of the graph in which it is recorded."""

    def __init__(self) -> None:
        event: Any = torch.cuda.Event
        self._event = event(enable_timing=True, external=True)

    def record(self) -> None:
        self._event.record()

    def seconds_since(self, earlier: GpuMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


TimedStage = tuple[str, Mark, Mark]
"""A stage's name and the marks at its start and end."""


class TimedStageMarks:
    """Times the stages of captured steps.

    Kernels on either side of a mark do not overlap, so a round takes a little longer with marks. A stage
    inside another one counts as part of the outer one.
    """

    def __init__(self, make_mark: Callable[[], Mark] = GpuMark) -> None:
        self._make_mark = make_mark
        self._running: list[TimedStage] | None = None  # stages of the step that is being run
        self._is_within = False
        self._launched: list[list[TimedStage]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._running is None or self._is_within:
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
        self._running.append((name, start, end))

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        stages: list[TimedStage] = []
        replay = device.capture(partial(self._run, step, stages))
        return WatchedReplay(replay, lambda: self._launched.append(stages))

    def take(self) -> dict[str, float]:
        """Seconds of each stage, added up over the replays launched since the last call. Each of these
        replays must have been launched once only, and must have ended."""
        found: dict[str, float] = {}
        for name, start, end in (stage for stages in self._launched for stage in stages):
            found[name] = found.get(name, 0.0) + end.seconds_since(start)
        self._launched.clear()
        return found

    def _run(self, step: Callable[[], None], stages: list[TimedStage]) -> None:
        # A step is run once before it is captured: the latest marks are those of the graph.
        stages.clear()
        self._running = stages
        try:
            step()
        finally:
            self._running = None


class WatchedReplay:
    """A replay that calls `on_launch` before each launch."""

    def __init__(self, replay: Replay, on_launch: Callable[[], None]) -> None:
        self._replay, self._on_launch = replay, on_launch

    def launch(self) -> None:
        self._on_launch()
        self._replay.launch()

    def close(self) -> None:
        self._replay.close()
