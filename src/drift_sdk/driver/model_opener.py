"""A model that is ready to serve, and the opening of one: at the start, and again after sleep.

`ModelOpener` is used on the engine's thread.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.driver.callbacks import StageClock
from drift_sdk.driver.prompts import ModelText
from drift_sdk.errors import ConfigError, DriftError, ModelLoadError, error_repr, is_out_of_memory
from drift_sdk.events import Download, Report
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.steps import Executor, ExecutorLimits


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
    kv_dtype, kv_bytes, window_kv_bytes: of its KV cache, as in EngineStats.
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
    kv_bytes: int = 0
    window_kv_bytes: int = 0
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


INTERRUPTIBLE = ("find", "download", "load tokenizer", "load weights")
"""Stages in which opening may be interrupted: there is no executor yet that would have to be closed."""


class ModelOpener:
    """Opens the model and times the stages that it reports.

    check_is_wanted: called at each report of the `INTERRUPTIBLE` stages; an exception that it raises ends the
                     opening.
    """

    def __init__(self, open_model: OpenModel, report: Report, check_is_wanted: Callable[[], None]) -> None:
        self._open_model = open_model
        self._report = report
        self._check_is_wanted = check_is_wanted

    def open(self) -> LoadedModel:
        """Open the model for the first time."""
        model = self._open(self._open_model)
        # Without the executor, which is freed while the engine sleeps.
        self._executor_name, self._limits = model.executor_name, model.executor.limits
        self._scheduling, self._text = model.scheduling, model.text
        return model

    def open_again(self) -> LoadedModel:
        """Open the model with the limits of the first opening. Raises ModelLoadError if requests that began
        with the first one could not continue with it; other weights and default parameters are allowed, and
        another chat template with the same end of messages."""
        limits = self._limits
        try:
            model = self._open(lambda report: self._open_model(report, limits))
        except ConfigError as error:  # it did work with this config at the start
            raise ModelLoadError(f"the model cannot be opened as it was at the start: {error}") from error

        try:
            self._check_same(model)
        except ModelLoadError:
            model.executor.close()
            raise

        # Grammars in use were compiled for the tokenizer of the first opening, which is equal.
        text = msgspec.structs.replace(model.text, tokenizer=self._text.tokenizer)
        return msgspec.structs.replace(model, text=text)

    def _open(self, open_model: Callable[[Report], LoadedModel]) -> LoadedModel:
        def report(stage: str, fraction: float, download: Download | None = None) -> None:
            if stage in INTERRUPTIBLE:
                self._check_is_wanted()
            self._report(stage, fraction, download)

        clock = StageClock(report)
        try:
            model = open_model(clock)
        except DriftError:
            raise
        except BaseException as error:  # also of a library, such as pyo3's PanicException
            raise opening_error(error) from error

        return msgspec.structs.replace(model, start_seconds=clock.seconds)

    def _check_same(self, model: LoadedModel) -> None:
        """ModelLoadError for the first difference to the model of the first opening."""
        compare("executor", self._executor_name, model.executor_name)
        for name in ModelText.__struct_fields__:
            if name not in ("tokenizer", "chat_template", "default_params"):
                compare(name, getattr(self._text, name), getattr(model.text, name))
        for name in SchedulerConfig.__struct_fields__:
            if name not in ("round_costs", "view_costs"):  # measured at each opening
                compare(name, getattr(self._scheduling, name), getattr(model.scheduling, name))
        compare_limits(self._limits, model.executor.limits)
        compare("tokenizer", self._text.tokenizer.fingerprint, model.text.tokenizer.fingerprint)


def compare_limits(first: ExecutorLimits, found: ExecutorLimits) -> None:
    for name in ExecutorLimits.__struct_fields__:
        compare(name, getattr(first, name), getattr(found, name))


def compare(name: str, first: object, found: object) -> None:
    """ModelLoadError if a property differs from that of the first opening."""
    if first != found:
        raise ModelLoadError(f"the model has changed since the start: {name}={found!r}, was {first!r}")


def opening_error(error: BaseException) -> ModelLoadError:
    """The ModelLoadError for an error of a library, raised while a model was opened or examined."""
    found = error_repr(error)
    if is_out_of_memory(error):
        advice = (
            "a smaller kv_cache_tokens, max_model_len or max_num_seqs needs less, and so does a smaller model"
        )
        return ModelLoadError(f"there is not enough memory for the model: {found} ({advice})")

    return ModelLoadError(f"the model cannot be opened: {found}")


def clear_frames(error: BaseException | None) -> None:
    """Clear the local variables of the frames that an error and its causes were raised through, so that an
    error that is kept keeps no weights and caches."""
    cleared: list[BaseException] = []
    while error is not None and error not in cleared:
        cleared.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
