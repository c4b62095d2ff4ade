"""A model that is ready to serve, and the protocol of functions that open one."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.driver.prompts import ModelText
from drift_sdk.progress import Report
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.steps import Executor, ExecutorLimits

__all__ = ["LoadedModel", "OpenModel", "with_limits"]


class LoadedModel(Struct, frozen=True, kw_only=True):
    """A model that is ready to serve.

    executor:       runs its steps.
    executor_name:  "graph", "eager" or "scripted".
    scheduling:     how its sequences are scheduled.
    text:           tokenizer, chat template and what else turns text into tokens and back.
    fallback:       why executor="auto" chose a slower executor than this kind of device allows; None if it
                    did not.
    num_tuned_shapes: shapes of weights whose kernels run as measured on this GPU.
    untuned_shapes: shapes of weights whose kernels were never measured on this GPU, or cannot be run as
                    measured.
    kv_dtype:       numbers of its KV cache, as in EngineStats.
    start_seconds:  stages of opening it and the seconds that each took, in order.
    """

    executor: Executor
    executor_name: str
    scheduling: SchedulerConfig
    text: ModelText
    fallback: str | None = None
    num_tuned_shapes: int = 0
    untuned_shapes: tuple[str, ...] = ()
    kv_dtype: str = ""
    start_seconds: tuple[tuple[str, float], ...] = ()


class OpenModel(Protocol):
    """A function that opens a model. It is called on the engine's thread.

    report: to be called with each stage and the fraction of it that is done, 0 to 1.
    limits: None at the start. When the engine wakes up, those of the start: they are kept, instead of being
            computed from the memory that is free now.

    Raises ModelLoadError or ConfigError.
    """

    def __call__(self, report: Report, limits: ExecutorLimits | None = None) -> LoadedModel: ...


def with_limits(config: EngineConfig, limits: ExecutorLimits | None) -> EngineConfig:
    """The config with the context and KV cache of these limits, which then do not depend on the memory that
    is free; None: the config itself."""
    if limits is None:
        return config

    return config.replace(
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        kv_cache_tokens=limits.num_blocks * limits.block_size,
    )
