"""Times of the stages of a round, by marks that the captured steps of a graph executor record.

The stages are those of `drift_sdk.measurement.profiled_engine`. The parts of a stage, such as the draft's
layers for each drafted token, are added up. The marks between stages take a few microseconds each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec import Struct

from drift_sdk import EngineConfig
from drift_sdk.events import ignore_progress
from drift_sdk.execution.device.device import Device, Replay
from drift_sdk.execution.device.stages import AcceptanceFactory, WatchedReplay
from drift_sdk.startup.model_startup import open_model
from drift_sdk.steps import Executor, SlotOutput
from perf.harness.manual_driver import ManualDriver

__all__ = ["GpuMark", "Mark", "StageTiming", "TimedStageMarks", "staged_executor", "time_stages"]

NUM_WARM_UP_ROUNDS = 3
"""Rounds run before the first one that is timed, so that clocks and caches are in their steady state."""


class StageTiming(Struct, frozen=True, kw_only=True):
    """Means over rounds, in seconds.

    stages: time on the device of each stage of a round, by its name; the parts of a stage are added up.
    round_seconds: time on the device of a whole round. cpu_seconds: CPU time of the thread that launches and
    collects a round. tokens_per_round, drafts_per_round: tokens emitted and drafted for one sequence.
    num_rounds: how many rounds were timed.
    """

    stages: dict[str, float]
    round_seconds: float
    cpu_seconds: float
    tokens_per_round: float
    drafts_per_round: float
    num_rounds: int

    @property
    def unaccounted_share(self) -> float:
        """The share of the round, 0 to 1, that belongs to no stage: between stages, before and after them."""
        return 1 - sum(self.stages.values()) / self.round_seconds


def time_stages(
    slots: ManualDriver,
    take_stages: Callable[[], dict[str, float]],
    *,
    batch: int,
    context: int,
    num_draft_tokens: int,
    num_rounds: int,
) -> StageTiming:
    """Fill the slots, then time rounds, one at a time.

    take_stages: returns the seconds of each stage in the steps since its last call. batch: number of
    sequences. context: prompt tokens of each. num_draft_tokens: drafts of a sequence in each round.
    num_rounds: how many rounds are timed, after NUM_WARM_UP_ROUNDS that are not. Raises ConfigError if the
    executor has no room for the sequences, see `ManualDriver.fill`.
    """
    max_length = context + 1 + (NUM_WARM_UP_ROUNDS + num_rounds) * (num_draft_tokens + 1)
    slots.fill(context, [max_length + 1] * batch)
    for _ in range(NUM_WARM_UP_ROUNDS):
        slots.round(num_draft_tokens)
    take_stages()
    stages: dict[str, list[float]] = {}
    durations: list[float] = []
    outputs: list[SlotOutput] = []
    cpu_seconds = 0.0
    for _ in range(num_rounds):
        started_at = time.thread_time()
        result = slots.round(num_draft_tokens)
        cpu_seconds += time.thread_time() - started_at
        durations.append(result.duration_s)
        outputs += result.decode
        for name, seconds in take_stages().items():
            stages.setdefault(name, []).append(seconds)

    return StageTiming(
        stages={name: sum(seconds) / num_rounds for name, seconds in stages.items()},
        round_seconds=statistics.mean(durations),
        cpu_seconds=cpu_seconds / num_rounds,
        tokens_per_round=statistics.mean(len(output.token_ids) for output in outputs),
        drafts_per_round=statistics.mean(output.num_drafted for output in outputs),
        num_rounds=num_rounds,
    )


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


@contextmanager
def staged_executor(
    model: str | Path, config: EngineConfig, acceptance: AcceptanceFactory | None = None
) -> Iterator[tuple[Executor, Callable[[], dict[str, float]]]]:
    """An executor of CUDA graphs with marks between stages, and a function that returns the seconds of each
    stage in the steps since its last call. The executor is closed at the end of the block.

    model, config: of an engine. acceptance: accepts drafts in place of their comparison. Raises ConfigError.
    """
    config = config.replace(executor="graph")
    stages = TimedStageMarks()
    opened = open_model(model, config, ignore_progress, acceptance=acceptance, stages=stages)
    try:
        yield opened.executor, stages.take
    finally:
        opened.executor.close()
