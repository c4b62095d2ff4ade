from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from drift_sdk.progress import Report, StageClock
from drift_sdk.request import ModelText
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.steps import Executor

__all__ = ["OpenedModel", "open_timed"]


class OpenedModel(Struct, frozen=True, kw_only=True):
    """A model ready to serve: how it runs, how it is scheduled, and its text.

    `fallback` says why "auto" chose a slower executor than the device allows; None if it did not.
    `untuned_shapes`: of weights whose kernels were never measured on this GPU, or cannot be run as measured.
    `start_seconds`: stages of opening it and how long each took, in order.
    """

    executor: Executor
    executor_name: str
    scheduling: SchedulerConfig
    text: ModelText
    fallback: str | None = None
    untuned_shapes: tuple[str, ...] = ()
    start_seconds: tuple[tuple[str, float], ...] = ()


def open_timed(open_model: Callable[[Report], OpenedModel], report: Report) -> OpenedModel:
    """Open a model, with a clock running over the stages it reports."""
    clock = StageClock(report)
    return msgspec.structs.replace(open_model(clock), start_seconds=clock.seconds)
