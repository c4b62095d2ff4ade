"""Engine: life cycle, `generate`, `chat`, `map`, statistics."""

from __future__ import annotations

import itertools
import logging
import random
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drift_sdk._plain_data import to_plain
from drift_sdk._validation import check_bool, check_float, check_int
from drift_sdk.config import EngineConfig
from drift_sdk.driver.commands import Cancel, Pause, Resume, Sleep, Unpause, Wake
from drift_sdk.driver.driver import Driver
from drift_sdk.driver.life_cycle import LifeCycle
from drift_sdk.driver.loaded_model import LoadedModel, OpenModel, with_limits
from drift_sdk.driver.loop_poster import Latch, LoopPoster
from drift_sdk.driver.prompts import ChatPrompt, ModelText, Prompt, as_prompt, check_tool_choice
from drift_sdk.driver.request import Request
from drift_sdk.driver.startup_progress import ProgressReporter, check_on_progress
from drift_sdk.driver.stream_updates import StreamUpdates
from drift_sdk.errors import ConfigError, EngineClosed, RequestError
from drift_sdk.progress import Progress, Report
from drift_sdk.results import Completion
from drift_sdk.sampling_params import MAX_SEED, SamplingParams, check_needs_no_host
from drift_sdk.stats import EngineStats
from drift_sdk.steps import ExecutorLimits
from drift_sdk.stream import TokenStream, check_prompts, map_prompts

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["Engine"]

log = logging.getLogger("drift_sdk")


class Engine:
    """A model that serves requests inside the caller's process.

    model:       a folder, a .gguf file or a hub id. A `Path` is never a hub id.
    config:      how it runs; None = `EngineConfig()`.
    on_progress: a function, not a coroutine function, that is called with a `Progress` for each stage of
                 starting, on the event loop of the task that starts the engine. If it raises an exception,
                 that is logged and the function is not called again during this start. None = no calls.
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
        open_model: OpenModel | None = None,
    ) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise ConfigError.of("model", model, "a folder, a .gguf file or a hub id")

        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError.of("config", config, "an EngineConfig")

        check_on_progress(on_progress)
        if open_model is not None and not callable(open_model):
            raise ConfigError.of("open_model", open_model, "a function that opens a model, or None")

        self.model = model
        self.config = config if config is not None else EngineConfig()
        self._on_progress = on_progress
        self._life_cycle = LifeCycle()
        self._request_numbers = itertools.count()
        self._seeds = random.SystemRandom()
        self._has_warned_of_tools = False
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

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> TokenStream:
        """Submit a prompt and return its stream at once. Must be called from a coroutine: the stream belongs
        to the running event loop (RuntimeError if there is none).

        prompt: a text, or token ids of the model, at least one.
        params: None = the model's own defaults, `default_params`.

        Raises RequestError for a wrong argument, QueueFull, and EngineClosed. What is known only after the
        prompt has been tokenised (PromptTooLong, a token id outside the vocabulary, no tokens) is raised by
        the stream."""
        return self._submit(as_prompt(prompt), params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        tool_choice: str = "auto",
        continue_final: bool = False,
    ) -> TokenStream:
        """Submit a conversation, rendered with the model's chat template, and return its stream at once, as
        `generate` does. The answer comes in parts: text, reasoning and tool calls.

        messages:       mappings with at least a string "role" and "content". Content is a string; a list of
                        parts works only with templates that take one.
        params:         None = the model's own defaults, `default_params`.
        tools:          descriptions of functions for the template. Tool calls are then looked for in the
                        answer. If the model's template ignores tools, the model does not see them, and that
                        is logged as a warning, once per engine.
        template_args:  further variables of the template, by name.
        tool_choice:    "auto" (the model calls tools or not), "none" (the tools are left out), "required"
                        (the answer consists of calls, at least one) or the name of a tool (of calls of this
                        one). The last two are a grammar: arguments follow the tools' schemas, reasoning may
                        come first, and `params` can have no other grammar.
        continue_final: the answer continues the last message, which must be the assistant's and have text.

        All of them are copied at the call and must be plain data (mappings, sequences and scalars). Raises
        what `generate` raises. The stream raises RequestError if the model has no template or the template
        rejects the messages."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise RequestError.of("messages", messages, "a sequence of mappings with role and content")

        if template_args is not None and not isinstance(template_args, Mapping):
            raise RequestError.of("template_args", template_args, "a mapping")

        check_bool(RequestError, "continue_final", continue_final)
        prompt = ChatPrompt(
            messages=to_plain("messages", messages),
            tools=to_plain("tools", tools),
            template_args=to_plain("template_args", template_args),
            tool_choice=tool_choice,
            continue_final=continue_final,
        )
        needs_no_host = self.config.strict_performance and self.config.speculation is not None
        check_tool_choice(prompt, params, needs_no_host=needs_no_host)
        stream = self._submit(prompt, params)
        if prompt.offered_tools:
            self._warn_if_tools_are_ignored()
        return stream

    def map(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_concurrent: int = 64,
    ) -> AsyncGenerator[Completion, None]:
        """Completions of many prompts, in their order, as an async generator.

        prompts:        each as of `generate`; read when there is room, so it may be endless.
        params:         of all prompts; None = the model's own defaults, `default_params`.
        max_concurrent: most prompts submitted at a time, at least 1.

        While the queue is full it waits, so QueueFull is not raised. The first error ends the iteration; an
        error of `prompts` itself, or of a prompt that cannot be submitted, is raised after the completions of
        the prompts before it. Ending the iteration early (`aclose`, or cancellation while waiting) cancels
        what was submitted. A wrong argument raises RequestError at the call.
        """
        check_int(RequestError, "max_concurrent", max_concurrent, ge=1)
        check_prompts(prompts)
        generate, has_room = partial(self.generate, params=params), lambda: self._running_driver().has_room
        return map_prompts(generate, has_room, prompts, max_concurrent)

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

    def metrics_text(self) -> str:
        """The statistics and histograms as Prometheus text, from a registry that belongs to this engine.

        The docstring of `drift_sdk.prometheus` lists the names. Needs the extra `metrics`: DriftError without
        it. EngineClosed if the engine is not open.
        """
        from drift_sdk.prometheus import metrics_text

        recorder, model, executor = self._running_driver().stats_recorder, str(self.model), self.executor
        return metrics_text(recorder.read(), recorder.histograms, model=model, executor=executor)

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
        """The model's tokenizer. EngineClosed if the engine is not open."""
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

    def _submit(self, prompt: Prompt, params: SamplingParams | None) -> TokenStream:
        if params is None:
            params = self.default_params
        elif not isinstance(params, SamplingParams):
            raise RequestError.of("params", params, "SamplingParams")

        if self.config.strict_performance:
            check_needs_no_host(params, is_speculating=self.config.speculation is not None)
        driver = self._running_driver()
        number = next(self._request_numbers)
        request = Request(
            request_id=f"req-{number}",
            arrival=number,
            prompt=prompt,
            params=params,
            seed=params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED),
            stream_updates=StreamUpdates(LoopPoster.current()),
        )
        driver.submit(request)
        return TokenStream(request.request_id, request.stream_updates, lambda: driver.send(Cancel(request)))

    def _warn_if_tools_are_ignored(self) -> None:
        model_text = self._driver.model_text if self._driver is not None else None
        template = model_text.chat_template if model_text is not None else None
        if template is not None and not template.uses_tools and not self._has_warned_of_tools:
            self._has_warned_of_tools = True
            log.warning("the chat template of %s ignores tools: the model does not see them", self.model)

    @property
    def _driver(self) -> Driver | None:
        return self._life_cycle.driver

    def _make_driver(self) -> Driver:
        return Driver(self._open_model, ProgressReporter(self._on_progress), self.config.max_queued_requests)

    def _running_driver(self) -> Driver:
        driver = self._driver
        if driver is None:
            if self._life_cycle.was_started:
                raise EngineClosed("the engine was closed: start() opens it again")

            raise EngineClosed("the engine is not open: use `async with` or start()")

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


def open_files(
    model: str | Path, config: EngineConfig, report: Report, limits: ExecutorLimits | None = None
) -> LoadedModel:
    """Open the model's files; the default of `open_model`. Runs on the engine's thread."""
    # Imported here, so that `import drift_sdk` loads no torch.
    from drift_sdk.startup.model_startup import open_model

    return open_model(model, with_limits(config, limits), report)
