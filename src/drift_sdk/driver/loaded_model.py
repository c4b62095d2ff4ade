"""A model ready to serve, and how one is asked for."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.driver.request import ModelText
from drift_sdk.progress import Report
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.steps import Executor, ExecutorLimits

__all__ = ["LoadedModel", "OpenModel", "with_limits"]


class LoadedModel(Struct, frozen=True, kw_only=True):
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


class OpenModel(Protocol):
    """Opens a model on the engine's thread, reporting (stage, fraction done) as it goes.

    `limits`: those of an earlier opening, which are kept instead of being worked out from the memory free
    now."""

    def __call__(self, report: Report, limits: ExecutorLimits | None = None) -> LoadedModel: ...


def with_limits(config: EngineConfig, limits: ExecutorLimits | None) -> EngineConfig:
    """The config that asks for these limits, whatever memory is free."""
    if limits is None:
        return config

    return config.replace(
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        kv_cache_tokens=limits.num_blocks * limits.block_size,
    )
