"""Engine: life cycle, pause and sleep, statistics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from drift_sdk._display import html_table, state_repr
from drift_sdk._validation import check_float
from drift_sdk.config import EngineConfig
from drift_sdk.driver.commands import Pause, Resume, Sleep, Unpause, Wake
from drift_sdk.driver.driver import Driver
from drift_sdk.driver.event_sender import check_on_event
from drift_sdk.driver.life_cycle import LifeCycle
from drift_sdk.driver.loaded_model import LoadedModel, OpenModel, with_limits
from drift_sdk.driver.loop_poster import Latch
from drift_sdk.driver.prompts import ModelText
from drift_sdk.driver.startup_progress import ProgressReporter, check_on_progress
from drift_sdk.errors import ConfigError, EngineClosed, RequestError, short_repr
from drift_sdk.events import Event
from drift_sdk.progress import Progress, Report
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.serving import Serving
from drift_sdk.stats import EngineMetrics, EngineStats, load_of
from drift_sdk.steps import ExecutorLimits

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["Engine"]


class Engine(Serving):
    """A model that serves requests inside the caller's process.

    model:       a folder, a .gguf file or a hub id. A `Path` is never a hub id.
    config:      how it runs; None = `EngineConfig()`.
    on_progress: a function, not a coroutine function, that is called with a `Progress` for each stage of
                 starting, on the event loop of the task that starts the engine. If it raises an exception,
                 that is logged and the function is not called again during this start. None = no calls.
    on_event:    a function, not a coroutine function, that is called with each `Event` of drift_sdk.events,
                 on a thread of its own, one call at a time: it may take time, and is on no event loop. If it
                 raises an exception, that is logged once. None = no calls.
    open_model:  for tests and measurement only: opens the model in place of the files that `model` names. It
                 is called on the engine's thread as `open_model(report, limits)`, at the start with the first
                 argument alone and by `wake()` with both, and returns a `LoadedModel`; see `OpenModel` in
                 drift_sdk/driver/loaded_model.py. `drift_sdk.testing.ScriptedModel` is one.

    Use it with `async with`, or call `start()` and `aclose()`, from any task of any event loop. A wrong
    argument raises ConfigError. An engine changes nothing in the host process (no signal handlers, no event
    loop policy, no environment variables); a thread that it owns does the work from start to close.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
        open_model: OpenModel | None = None,
    ) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise ConfigError.of("model", model, "a folder, a .gguf file or a hub id")

        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError.of("config", config, "an EngineConfig")

        check_on_progress(on_progress)
        check_on_event(on_event)
        if open_model is not None and not callable(open_model):
            raise ConfigError.of("open_model", open_model, "a function that opens a model, or None")

        super().__init__()
        self.model = model
        self.config = config if config is not None else EngineConfig()
        self._on_progress = on_progress
        self._on_event = on_event
        self._life_cycle = LifeCycle()
        self._open_model: OpenModel = open_model or partial(open_files, model, self.config)

    async def start(self) -> None:
        """Load the model and get ready to serve; returns at once if the engine is open. While it is closing,
        wait for that first.

        If the task is cancelled, the cancellation is raised when starting has ended, and the engine is closed
        unless another task has started it too. Raises ModelLoadError or ConfigError, after which the engine
        is as if it had never been started, and EngineClosed if it is closed meanwhile."""
        await self._life_cycle.start(self._make_driver)

    async def aclose(self, drain: float = 0.0) -> None:
        """Close the engine: reject new requests, end those that still run after `drain` seconds with
        EngineClosed, end the thread and free the memory. Returns when that is done; returns at once if the
        engine is closed. If the task is cancelled, the cancellation is raised afterwards.

        drain: seconds, 0 to 1,000,000; RequestError otherwise.
        """
        check_float(RequestError, "drain", drain, ge=0.0, le=1e6)
        await self._life_cycle.aclose(drain)

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def pause(self) -> None:
        """Launch no more steps until `resume()`. Returns when no step is running. Requests are kept, and new
        ones are admitted. If the task is cancelled, the engine is as it was before. EngineClosed if it is not
        open."""
        driver, command = self._running_driver(), Pause(Latch())
        driver.send(command)
        try:
            error = await command.done.wait()
        except BaseException:
            driver.send(Unpause(command))
            raise

        if error is not None:
            raise error

    async def resume(self) -> None:
        """End all calls of `pause()`. If the task is cancelled, the cancellation is raised afterwards.
        EngineClosed if the engine is not open."""
        await self._send(Resume)

    async def sleep(self) -> None:
        """Free weights and KV cache until `wake()`. Requests are kept and compute their context again after
        that. If the task is cancelled, the cancellation is raised afterwards. EngineClosed if the engine is
        not open."""
        await self._send(Sleep)

    async def wake(self) -> None:
        """Load the model again after `sleep()`, with the same number of KV blocks. If the task is cancelled,
        the cancellation is raised afterwards.

        ModelLoadError if that fails or requests cannot go on with the files as they are now; the engine then
        stays asleep. EngineClosed if it is not open.
        """
        await self._send(Wake)

    async def _send(self, command: type[Resume] | type[Sleep] | type[Wake]) -> None:
        driver, done = self._running_driver(), Latch()
        driver.send(command(done))
        error = await done.wait_shielded()
        if error is not None:
            raise error

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted: the engine is started, not closing and has not failed."""
        driver = self._driver
        return driver is not None and driver.is_open

    def stats(self) -> EngineStats:
        """A snapshot of the engine's state and of its counters since the start. EngineClosed if it is not
        open."""
        return self._running_driver().stats_recorder.read()

    def metrics(self) -> EngineMetrics:
        """The statistics and histograms, with the names of model and executor. EngineClosed if the engine is
        not open.

        `drift_sdk.prometheus.collector` shows them in a registry of the host, those of several engines on one
        page.
        """
        recorder = self._running_driver().stats_recorder
        return EngineMetrics(
            model=str(self.model),
            executor=self.executor,
            stats=recorder.read(),
            histograms=recorder.histograms,
        )

    def metrics_text(self) -> str:
        """The statistics and histograms as Prometheus text, from a registry that belongs to this engine.

        The docstring of `drift_sdk.prometheus` lists the names. Needs the extra `metrics`: DriftError without
        it. EngineClosed if the engine is not open.
        """
        from drift_sdk.prometheus import metrics_text

        shown = self.metrics()
        return metrics_text(shown.stats, shown.histograms, model=shown.model, executor=shown.executor)

    @property
    def executor(self) -> str:
        """The executor that runs the steps, "graph" or "eager": with executor="auto" the one that was chosen.
        EngineClosed if the engine is not open."""
        name = self._running_driver().executor_name
        if name is None:
            raise EngineClosed("the engine is still starting")

        return name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; of a model without one, its `has_text` is False and it rejects every text.
        EngineClosed if the engine is not open."""
        return self._model_text().tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """Parameters of a request that gives none: the model's own defaults, from its generation_config.
        EngineClosed if the engine is not open."""
        return self._model_text().default_params

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together. EngineClosed if the engine is not open."""
        return self._model_text().max_model_len

    def __repr__(self) -> str:
        """Model and state; of an open engine also executor, running and waiting sequences and KV use."""
        return state_repr(type(self).__name__, description(self))

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return html_table(type(self).__name__, description(self))

    @property
    def _driver(self) -> Driver | None:
        return self._life_cycle.driver

    def _make_driver(self) -> Driver:
        report = ProgressReporter(self._on_progress)
        return Driver(self._open_model, report, self.config.max_queued_requests, self._on_event)

    def _running_driver(self) -> Driver:
        driver = self._driver
        if driver is None:
            if self._life_cycle.was_started:
                raise EngineClosed("the engine was closed: start() opens it again")

            raise EngineClosed("the engine is not open: start() or its `with` block opens it")

        if driver.is_from_parent:
            raise EngineClosed("the engine runs in the process that this one was forked from")

        return driver

    def _model_text(self) -> ModelText:
        model_text = self._running_driver().model_text
        if model_text is None:
            raise EngineClosed("the engine is still starting")

        return model_text

    def __del__(self) -> None:
        life_cycle = getattr(self, "_life_cycle", None)
        driver = life_cycle.driver if life_cycle is not None else None
        if driver is not None and not driver.is_over:
            driver.close(0.0)
            message = f"the engine of {self.model} was garbage-collected without being closed"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)


def description(engine: Engine) -> dict[str, str]:
    """Model, state and load of an engine in any state, also one whose constructor has failed."""
    life_cycle: LifeCycle | None = getattr(engine, "_life_cycle", None)
    if life_cycle is None:
        return {"state": "not started"}

    driver = life_cycle.driver
    shown = {"model": short_repr(str(engine.model)), "state": state_of(driver, life_cycle.was_started)}
    if driver is not None and driver.is_open:
        shown["executor"] = driver.executor_name or ""
        shown |= load_of(driver.stats_recorder.read())
    return shown


def state_of(driver: Driver | None, was_started: bool) -> str:
    """The state of an engine with this driver in a word."""
    if driver is None:
        return "closed" if was_started else "not started"

    if driver.is_over:
        return "closed"

    if driver.is_open:
        return "open"

    return "closing" if driver.is_closing else "starting"


def open_files(
    model: str | Path, config: EngineConfig, report: Report, limits: ExecutorLimits | None = None
) -> LoadedModel:
    """Open the model's files; the default of `open_model`. Runs on the engine's thread."""
    # Imported here, so that `import drift_sdk` loads no torch.
    from drift_sdk.startup.model_startup import open_model

    return open_model(model, with_limits(config, limits), report)
