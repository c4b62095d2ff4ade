from __future__ import annotations

from msgspec import Struct

from drift_sdk.request import ModelText
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.steps import Executor

__all__ = ["OpenedModel"]


class OpenedModel(Struct, frozen=True, kw_only=True):
    """A model ready to serve: how it runs, how it is scheduled, and its text.

    `fallback` says why "auto" chose a slower executor than the device allows; None if it did not.
    """

    executor: Executor
    executor_name: str
    scheduling: SchedulerConfig
    text: ModelText
    fallback: str | None = None
