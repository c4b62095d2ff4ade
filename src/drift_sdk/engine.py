"""The engine: life cycle, generate, chat."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drift_sdk._plain_data import to_plain
from drift_sdk._validation import check_float, check_int
from drift_sdk.config import EngineConfig
from drift_sdk.driver.commands import Cancel, Pause, Resume, Sleep, Unpause, Wake
from drift_sdk.driver.driver import Driver
from drift_sdk.driver.life_cycle import LifeCycle
from drift_sdk.driver.loaded_model import LoadedModel, OpenModel, with_limits
from drift_sdk.driver.loop_poster import Latch, LoopPoster
from drift_sdk.driver.prompts import ChatPrompt, ModelText, Prompt, TextPrompt, TokenPrompt
from drift_sdk.driver.request import Request
from drift_sdk.driver.startup_progress import reporter
from drift_sdk.driver.stream_updates import StreamUpdates
from drift_sdk.errors import ConfigError, EngineClosed, RequestError
from drift_sdk.progress import Progress, Report
from drift_sdk.results import Completion
from drift_sdk.sampling_params import MAX_SEED, SamplingParams, check_needs_no_host
from drift_sdk.stats import EngineStats
from drift_sdk.steps import ExecutorLimits
from drift_sdk.stream import TokenStream, map_prompts
from drift_sdk.text.tools import tool_names

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["Engine"]


class Engine:
    """A model that serves requests inside the caller's process.

    model:       a folder, a .gguf file or a hub id. A `Path` is never a hub id.
    config:      see `EngineConfig`.
    on_progress: called on the starting task's loop with each stage of starting.
    open_model:  for tests and measurement only: opens the model in place of the files that `model` names. It
                 is called on the engine's thread as `open_model(report, limits)`, at the start with the first
                 argument alone and by `wake()` with both, and returns a `LoadedModel`; see `OpenModel` in
                 drift_sdk/driver/loaded_model.py. `drift_sdk.testing.ScriptedModel` is one.

    `async with`, or `start()` and `aclose()`, from any task of any loop. Nothing of the host process is
    touched; a thread of the engine's own does the work, from start to close.
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

        self.model = model
        self.config = config if config is not None else EngineConfig()
        self._on_progress = on_progress
        self._life_cycle = LifeCycle()
        self._numbers = itertools.count()
        self._seeds = random.SystemRandom()
        self._open_model: OpenModel = open_model or partial(open_files, model, self.config)

    async def start(self) -> None:
        """Load the model and get ready to serve. Idempotent; cancellation is raised when that is done, and
        closes the engine unless another task has started it too. While it is closing, this waits for that
        first.

        ModelLoadError or ConfigError, and the engine is as if never started; EngineClosed if it is closed
        meanwhile."""
        await self._life_cycle.start(self._make_driver)

    async def aclose(self, drain: float = 0.0) -> None:
        """Stop: requests still running after `drain` seconds are cut off with EngineClosed, the thread ends,
        the memory is free. Idempotent; cancellation is raised when that is done."""
        check_float(RequestError, "drain", drain, ge=0.0)
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
        """Submit a prompt, text or token ids, and return its stream at once.

        Raises RequestError for wrong parameters, QueueFull, EngineClosed. What takes tokenising to find out
        (PromptTooLong, an id outside the vocabulary) is raised by the stream.
        """
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise RequestError.of("prompt", prompt, "a string or a sequence of token ids")

        given = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt))
        return self._submit(given, params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> TokenStream:
        """Submit a conversation, rendered with the model's chat template; otherwise as `generate`.

        messages: mappings with at least "role" and "content". tools and template_args are the template's;
        with tools, the completion's `tool_calls` are looked for in its text. All are copied at the call, and
        must be plain data. A model without a template, messages the template refuses: RequestError from the
        stream."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise RequestError.of("messages", messages, "a sequence of mappings with role and content")

        if template_args is not None and not isinstance(template_args, Mapping):
            raise RequestError.of("template_args", template_args, "a mapping")

        prompt = ChatPrompt(
            to_plain("messages", messages),
            to_plain("tools", tools),
            to_plain("template_args", template_args),
        )
        return self._submit(prompt, params, tool_names(prompt.tools) if prompt.tools else None)

    def map(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_concurrent: int = 64,
    ) -> AsyncGenerator[Completion, None]:
        """Completions of many prompts, in order, at most `max_concurrent` of them submitted at a time.

        `prompts` is read as room comes up, so it may be endless; a full queue is waited for. The first error
        ends the iteration, one of `prompts` itself after the completions of the prompts before it; leaving it
        (`aclose`, or cancellation while waiting) cancels what was submitted.
        """
        check_int(RequestError, "max_concurrent", max_concurrent, ge=1)
        generate, has_room = partial(self.generate, params=params), lambda: self._running_driver().has_room
        return map_prompts(generate, has_room, prompts, max_concurrent)

    async def pause(self) -> None:
        """Launch no more steps, until `resume()`; returns when none is running. Requests stay. If it is
        cancelled, the engine is as it was before."""
        driver, command = self._running_driver(), Pause(Latch())
        driver.tell(command)
        try:
            error = await command.done.wait()
        except BaseException:
            driver.tell(Unpause(command))
            raise

        if error is not None:
            raise error

    async def resume(self) -> None:
        """Go on after `pause()`, however often that was called. Cancellation is raised when that is done."""
        await self._tell(Resume)

    async def sleep(self) -> None:
        """Free weights and KV cache, until `wake()`. Requests stay: they compute their context anew.
        Cancellation is raised when that is done."""
        await self._tell(Sleep)

    async def wake(self) -> None:
        """Load the model again after `sleep()`, with as many KV blocks; cancellation is raised afterwards.

        ModelLoadError, and the engine stays asleep, if that fails or its requests cannot go on with the files
        as they are now."""
        await self._tell(Wake)

    async def _tell(self, command: type[Resume] | type[Sleep] | type[Wake]) -> None:
        driver, done = self._running_driver(), Latch()
        driver.tell(command(done))
        error = await done.wait_shielded()
        if error is not None:
            raise error

    @property
    def is_open(self) -> bool:
        """Whether requests are taken in: started, not closing and not failed."""
        driver = self._driver
        return driver is not None and driver.is_open

    def stats(self) -> EngineStats:
        """A snapshot of what the engine is doing and has done since it was started."""
        return self._running_driver().recorder.read()

    def metrics_text(self) -> str:
        """The same and histograms as Prometheus text, from a registry of this engine's own.

        `drift_sdk.prometheus` lists the names. Needs the extra `metrics`.
        """
        from drift_sdk.prometheus import metrics_text

        recorder, model, executor = self._running_driver().recorder, str(self.model), self.executor
        return metrics_text(recorder.read(), recorder.histograms, model=model, executor=executor)

    @property
    def executor(self) -> str:
        """How steps are run; what "auto" has chosen."""
        name = self._running_driver().executor_name
        if name is None:
            raise EngineClosed("the engine is still starting")

        return name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model_text().tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's own defaults, from its generation_config."""
        return self._model_text().default_params

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._model_text().max_model_len

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, tool_names: frozenset[str] | None = None
    ) -> TokenStream:
        if params is None:
            params = self.default_params
        elif not isinstance(params, SamplingParams):
            raise RequestError.of("params", params, "SamplingParams")

        if self.config.strict_performance:
            check_needs_no_host(params, is_speculating=self.config.speculation is not None)
        driver = self._running_driver()
        number = next(self._numbers)
        request = Request(
            request_id=f"req-{number}",
            arrival=number,
            prompt=prompt,
            params=params,
            seed=params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED),
            feed=StreamUpdates(LoopPoster.current()),
            tool_names=tool_names,
        )
        driver.submit(request)
        return TokenStream(request.request_id, request.feed, lambda: driver.tell(Cancel(request)))

    @property
    def _driver(self) -> Driver | None:
        return self._life_cycle.driver

    def _make_driver(self) -> Driver:
        return Driver(self._open_model, reporter(self._on_progress), self.config.max_queued_requests)

    def _running_driver(self) -> Driver:
        driver = self._driver
        if driver is None:
            raise EngineClosed("the engine is not open: use `async with` or start()")

        if driver.is_foreign:
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
            message = f"engine of {self.model} was dropped unclosed"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)


def open_files(
    model: str | Path, config: EngineConfig, report: Report, limits: ExecutorLimits | None = None
) -> LoadedModel:
    # Imported here, on the engine's thread: `import drift_sdk` loads no torch.
    from drift_sdk.startup.model_startup import open_model

    return open_model(model, with_limits(config, limits), report)
