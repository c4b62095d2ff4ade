"""The life of an engine: start, sleep, wake and close, by any number of tasks of any event loops at once.

`ModelOpener` opens a model and gives its memory back. It is used on the engine's thread.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import anyio
import msgspec
from anyio.lowlevel import checkpoint_if_cancelled
from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.driver.callbacks import StageClock
from drift_sdk.driver.loops import Latch, life_cycle_lock, num_forks
from drift_sdk.driver.prompts import ModelText
from drift_sdk.errors import (
    ConfigError,
    DriftError,
    EngineClosed,
    ModelLoadError,
    error_repr,
    is_out_of_memory,
)
from drift_sdk.events import Download, Report
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.steps import Executor, ExecutorLimits


class Startable(ABC):
    """What serves the requests of an engine between a start and the close after it.

    opened: set when it serves, or with the error that prevented that.
    closed: set when it has released everything, with the error of closing if there was one.

    In a forked child, `is_from_parent` is true, and it does nothing.
    """

    def __init__(self) -> None:
        self.opened: Latch = Latch()
        self.closed: Latch = Latch()
        self._num_forks = num_forks()
        self._num_starters = 0

    @abstractmethod
    def start(self) -> None:
        """Begin to open, without waiting for that. Called once."""

    @abstractmethod
    def close(self, drain_s: float) -> None:
        """Reject new requests, and end once the live ones have ended, after `drain_s` seconds at the latest.
        What is being opened is given up. Returns at once. May be called again, from any thread."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> None:
        """Block until the end, `timeout_s` seconds at most (None = no limit)."""

    @property
    @abstractmethod
    def is_closing(self) -> bool:
        """Whether `close` has been called, or it has ended by itself."""

    @property
    def is_from_parent(self) -> bool:
        """Whether it was made by a process that this one is a fork of."""
        return self._num_forks != num_forks()

    @property
    def is_over(self) -> bool:
        """Whether it will do nothing more."""
        return self.is_from_parent or self.closed.is_set

    def add_starter(self) -> bool:
        """Count one more task that wants the engine open. Returns False, and counts nothing, if it is
        closing."""
        with life_cycle_lock():
            self._num_starters += not self.is_closing
            return not self.is_closing

    def remove_starter(self) -> bool:
        """Called when a task that `add_starter` has counted is cancelled. If it was the only one, `close` is
        called and True is returned."""
        with life_cycle_lock():
            self._num_starters -= 1
            if self._num_starters:
                return False

            self.close(0.0)
            return True


def starting_error(error: Exception) -> ModelLoadError:
    """The ModelLoadError for an error of the system, which lacks something that an engine needs."""
    return ModelLoadError(f"the engine cannot be started: {error}")


StartableT = TypeVar("StartableT", bound=Startable)


class LifeCycle(Generic[StartableT]):
    """The driver of an engine: `driver`, None while the engine is closed.

    The first `start` makes and starts a driver, and later ones share it. While a driver is closing, `start`
    waits for its end and then makes a new one. `was_started`: whether there has ever been a driver.
    """

    def __init__(self) -> None:
        self.driver: StartableT | None = None
        self.was_started: bool = False

    async def start(self, make_driver: Callable[[], StartableT]) -> None:
        """Wait until a driver has opened its model. Raises the error of opening, or EngineClosed if it is
        closed meanwhile. If the task is cancelled, the driver is closed unless another task starts it too."""
        try:
            await self._start(make_driver)
        except OSError as error:  # of the first use of an event loop, for which anyio imports a module
            raise starting_error(error) from error

    async def _start(self, make_driver: Callable[[], StartableT]) -> None:
        driver = await self._share_driver(make_driver)
        try:
            with anyio.CancelScope():  # keeps a pending task, which asyncio reports if the exit destroys it
                error = await driver.opened.wait()
                await checkpoint_if_cancelled()
        except GeneratorExit:  # the coroutine is destroyed, and cannot wait
            driver.remove_starter()
            raise
        except BaseException:
            if driver.remove_starter():
                await self._finish(driver)
            raise

        if error is not None:
            await self._finish(driver)
            raise error

        if driver.is_closing:
            raise EngineClosed("the engine was closed while it was starting")

    async def aclose(self, drain_s: float) -> None:
        """Close the driver, if there is one, and wait for its end. Live requests may go on for `drain_s`
        seconds. Raises the error of closing."""
        driver = self.driver
        if driver is None:
            return

        if driver.is_from_parent:  # there is nothing to close in this process
            self.driver = None
            return

        driver.close(drain_s)
        error = await self._finish(driver)
        if error is not None:
            raise error

    async def _share_driver(self, make_driver: Callable[[], StartableT]) -> StartableT:
        """The driver that is starting or open, counted as wanted by this task; a new one if there is none."""
        while True:
            with life_cycle_lock():
                driver = self.driver
                if driver is None or driver.is_over:
                    driver = self.driver = make_driver()
                    self.was_started = True
                    driver.add_starter()
                    try:
                        driver.start()
                    except BaseException as error:
                        self.driver = None
                        driver.close(0.0)
                        if isinstance(error, RuntimeError):  # the process may not have more threads
                            raise starting_error(error) from error

                        raise

                    return driver

                if driver.add_starter():
                    return driver

            await driver.closed.wait()

    async def _finish(self, driver: StartableT) -> BaseException | None:
        """Wait for the end of a driver that is closing, and forget it. Returns the error of closing."""
        try:
            return await driver.closed.wait_shielded()
        finally:
            driver.join()
            with life_cycle_lock():
                if self.driver is driver:  # another task may have started the engine again
                    self.driver = None


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
