from __future__ import annotations

from msgspec import Struct

from drift_sdk.request import ModelText
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.steps import Executor

__all__ = ["OpenedModel"]


class OpenedModel(Struct, frozen=True, kw_only=True):
    """A model ready to serve: how it runs, how it is scheduled, and its text."""

    executor: Executor
    scheduling: SchedulerConfig
    text: ModelText
