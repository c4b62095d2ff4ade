"""Engine: life cycle, pause and sleep, statistics; and the examination of a model before it is loaded."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drift_sdk._cuda_driver import device_contexts
from drift_sdk._display import html_table, model_name, state_repr
from drift_sdk._fields import check_float, with_config
from drift_sdk._plain_data import first_items
from drift_sdk.base_engine import BaseEngine, EngineKind
from drift_sdk.config import EngineConfig
from drift_sdk.driver.callbacks import ProgressReporter, check_on_event, check_on_progress
from drift_sdk.driver.driver import Driver, Pause, Resume, Sleep, Unpause, UpdateWeights, Wake
from drift_sdk.driver.life_cycle import LifeCycle, LoadedModel, OpenModel, opening_error, with_limits
from drift_sdk.driver.loops import Latch, without_collection
from drift_sdk.driver.prompts import ModelText, Prompt, SharedPrompt
from drift_sdk.driver.requests import Request
from drift_sdk.errors import ConfigError, DriftError, EngineClosed, RequestError, error_repr, short_repr
from drift_sdk.events import Event, Progress, Report
from drift_sdk.model_info import ModelInfo
from drift_sdk.serving import Submission
from drift_sdk.stats import EngineMetrics, EngineStats, load_of
from drift_sdk.steps import ExecutorLimits


@with_config(EngineConfig)
def inspect(model: str | Path, config: EngineConfig | None = None) -> ModelInfo:
    """Find out whether an engine can serve a model with a config on this machine, and what that takes,
    without loading or downloading weights.

    model:  as of `Engine`. For a hub id, the small files (settings and tokenizer) are downloaded to the hub's
            cache, and of a .gguf file there the header.
    config: as of `Engine`. The draft of its speculation is not examined.

    Blocks for as long as files are read and the hub answers: in a coroutine, use
    `await asyncio.to_thread(inspect, model)`. Imports torch, and initialises CUDA if the device is a GPU.

    What keeps an engine from serving the model is in `ModelInfo.reasons`. Raises ModelLoadError if the model
    cannot be found or examined, and ConfigError for a wrong argument.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise ConfigError.of("model", model, "a folder, a .gguf file or a hub id")

    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError.of("config", config, "an EngineConfig")

    try:
        # Imported here, so that `import drift_sdk` loads no torch.
        from drift_sdk.startup.model_startup import inspect_model

        return inspect_model(model, config if config is not None else EngineConfig())
    except DriftError:
        raise
    except Exception as error:
        raise opening_error(error) from error


class Engine(BaseEngine):
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
                 drift_sdk/driver/life_cycle.py. `drift_sdk.testing.ScriptedModel` is one.

    Use it with `async with`, or call `start()` and `aclose()`, from any task of any event loop. A wrong
    argument raises ConfigError. An engine changes no settings of the host process (no signal handlers, no
    event loop policy, no environment variables); a thread that it owns does the work from start to close. It
    registers hooks for the exit of the process and for forks. The first start pauses garbage collection while
    torch is imported, and on a GPU has worker processes compile kernels.
    """

    @with_config(EngineConfig)
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
        self.model: str | Path = model
        self.config: EngineConfig = config if config is not None else EngineConfig()
        self._on_progress = on_progress
        self._on_event = on_event
        self._life_cycle = LifeCycle[Driver]()
        self._new_request: Callable[..., Request] = Request
        self._arrivals = itertools.count()
        self._open_model: OpenModel = open_model or partial(open_files, model, self.config)

    async def start(self) -> None:
        await self._life_cycle.start(self._make_driver)

    async def aclose(self, drain: float = 0.0) -> None:
        check_float(RequestError, "drain", drain, ge=0.0, le=1e6)
        self._check_may_wait()
        await self._life_cycle.aclose(drain)

    async def _pause(self) -> Callable[[], None]:
        self._check_may_wait()
        driver, command = self._running_driver(), Pause(Latch())
        driver.send(command)
        undo = partial(driver.send, Unpause(command))
        try:
            error = await command.done.wait()
        except BaseException:
            undo()
            raise

        if error is not None:
            raise error

        return undo

    async def resume(self) -> None:
        await self._send(Resume)

    async def sleep(self) -> None:
        await self._send(Sleep)

    async def wake(self) -> None:
        await self._send(Wake)

    async def update_weights(self, tensors: Mapping[str, Any]) -> None:
        self._check_may_wait()
        driver, done = self._running_driver(), Latch()
        driver.send(UpdateWeights(done, settled(tensors)))
        error = await done.wait_shielded()
        if error is not None:
            raise error

    async def _send(self, command: type[Resume] | type[Sleep] | type[Wake]) -> None:
        self._check_may_wait()
        driver, done = self._running_driver(), Latch()
        driver.send(command(done))
        error = await done.wait_shielded()
        if error is not None:
            raise error

    @property
    def is_open(self) -> bool:
        driver = self._driver
        return driver is not None and driver.is_open

    def stats(self) -> EngineStats:
        return self._running_driver().stats_recorder.read()

    def metrics(self) -> EngineMetrics:
        recorder = self._running_driver().stats_recorder
        return EngineMetrics(
            model=model_name(self.model),
            executor=self.executor,
            stats=recorder.read(),
            histograms=recorder.histograms,
        )

    @property
    def executor(self) -> str:
        name = self._running_driver().executor_name
        if name is None:
            raise EngineClosed("the engine is still starting")

        return name

    async def _kind(self) -> EngineKind:
        model_text = self._model_text()
        return EngineKind.of(
            str(self.model),
            self.config,
            executor=self.executor,
            max_model_len=model_text.max_model_len,
            default_params=model_text.default_params,
        )

    def _enter(self, submissions: Sequence[Submission]) -> Sequence[Callable[[], None]]:
        self._check_may_wait()
        driver = self._running_driver()
        prompt = submissions[0].prompt
        shared = SharedPrompt(prompt) if len(submissions) > 1 else prompt
        requests = [
            self._new_request(
                request_id=submission.request_id,
                group_id=submission.group_id,
                arrival=next(self._arrivals),
                prompt=shared,
                params=submission.params,
                seed=submission.seed,
                stream_updates=submission.stream_updates,
            )
            for submission in submissions
        ]
        driver.submit(requests)
        return [partial(driver.cancel_request, request) for request in requests]

    def _cancel(self, request_id: str) -> bool:
        driver = self._driver
        return driver is not None and not driver.is_over and driver.cancel(request_id)

    async def _count_tokens(self, prompt: Prompt) -> int:
        return await self._running_driver().count_tokens(prompt)

    @property
    def _has_room(self) -> bool:
        return self._running_driver().has_room

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

    def _check_may_wait(self) -> None:
        """RuntimeError in a function of one of the engine's requests, for which all requests wait."""
        driver = self._driver
        if driver is not None and driver.is_own_thread:
            raise RuntimeError("a function of a request cannot wait for its own engine, which waits for it")

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


def settled(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of a mapping of tensors, after what the caller's GPU streams still write to these: the engine
    reads them on its own. What is no mapping is returned as it is. RequestError for one that cannot be read.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensors, Mapping):
        return tensors

    try:
        given = {name: tensors[name] for name in first_items(tensors, len(tensors))}
        devices = {tensor.device for tensor in given.values() if isinstance(tensor, torch.Tensor)}
    except Exception as error:  # the class of a caller may run any code
        allowed = f"a mapping of names to tensors that can be read ({error_repr(error)})"
        raise RequestError(f"tensors: expected {allowed}", field="tensors", allowed=allowed) from error

    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return given


def description(engine: Engine) -> dict[str, str]:
    """Model, state and load of an engine in any state, also one whose constructor has failed."""
    life_cycle: LifeCycle[Driver] | None = getattr(engine, "_life_cycle", None)
    if life_cycle is None:
        return {"state": "not started"}

    driver = life_cycle.driver
    shown = {"model": short_repr(str(engine.model)), "state": state_of(driver, life_cycle.was_started)}
    if driver is not None and driver.is_open:
        stats = driver.stats_recorder.read()
        if stats.is_asleep or stats.is_paused:
            shown["state"] = "asleep" if stats.is_asleep else "paused"
        shown["executor"] = driver.executor_name or ""
        shown |= load_of(stats)
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
    with device_contexts(config.device, config.tensor_parallel):
        with without_collection():
            # Imported here, so that `import drift_sdk` loads no torch.
            from drift_sdk.startup.model_startup import open_model

        return open_model(model, with_limits(config, limits), report)
