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

from drift_sdk.bridge import Bridge, Latch
from drift_sdk.commands import Cancel, Pause, Resume, Sleep, Wake
from drift_sdk.config import EngineConfig
from drift_sdk.driver import Driver
from drift_sdk.errors import ConfigError, EngineClosed, RequestError
from drift_sdk.feed import Feed
from drift_sdk.mapping import map_prompts
from drift_sdk.metrics import EngineStats
from drift_sdk.opened_model import OpenedModel, open_timed
from drift_sdk.params import MAX_SEED, SamplingParams, check_needs_no_host
from drift_sdk.progress import Progress, Report, reporter
from drift_sdk.request import ModelText, Prompt, Request
from drift_sdk.results import Completion
from drift_sdk.stream import TokenStream
from drift_sdk.text.tools import tool_names
from drift_sdk.validation import check_float, check_int

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["Engine"]

OpenModel = Callable[[Report], OpenedModel]
"""Opens a model, reporting (stage, fraction done) as it goes; runs on the engine's thread."""


class Engine:
    """A model that serves requests inside the caller's process.

    model:       a folder, a .gguf file or a hub id. A `Path` is never a hub id.
    config:      see `EngineConfig`.
    on_progress: called on the starting task's loop with each stage of starting.

    `async with`, or `start()` and `aclose()`, from any task of any loop. Nothing of the host process is
    touched; a thread of the engine's own does the work, from start to close.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise ConfigError.of("model", model, "a folder, a .gguf file or a hub id")

        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError.of("config", config, "an EngineConfig")

        self.model = model
        self.config = config if config is not None else EngineConfig()
        self._on_progress = on_progress
        self._driver: Driver | None = None
        self._numbers = itertools.count()
        self._seeds = random.SystemRandom()
        self._open: OpenModel = partial(open_files, model, self.config)

    async def start(self) -> None:
        """Load the model and get ready to serve. Idempotent; not interrupted by cancellation.

        Raises ModelLoadError or ConfigError; the engine is then as if never started.
        """
        starts = self._driver is None or self._driver.closed.is_set
        if starts:
            self._driver = Driver(self._opener(), self.config.max_queued_requests)
            self._driver.start()

        driver = self._running_driver()
        try:
            error = await driver.opened.wait_shielded()
        except BaseException:
            if starts:
                await self.aclose()
            raise

        if error is not None:
            await self.aclose()
            raise error

    async def aclose(self, drain: float = 0.0) -> None:
        """Stop: requests still running after `drain` seconds are cut off with EngineClosed, the thread ends,
        the memory is free. Idempotent; not interrupted by cancellation."""
        check_float(RequestError, "drain", drain, ge=0.0)
        driver = self._driver
        if driver is None:
            return

        driver.close(drain)
        try:
            await driver.closed.wait_shielded()
        finally:
            driver.join()
            # Another task may have started the engine anew meanwhile.
            if self._driver is driver:
                self._driver = None

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

        given = prompt if isinstance(prompt, str) else tuple(prompt)  # the caller may change a list later

        def token_ids(model: ModelText) -> Sequence[int]:
            return model.tokenizer.encode(given) if isinstance(given, str) else given

        return self._submit(token_ids, params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> TokenStream:
        """Submit a conversation, rendered with the model's chat template; otherwise as `generate`.

        messages: mappings with at least "role" and "content". tools and template_args are the template's;
        with tools, the completion's `tool_calls` are looked for in its text.
        A model without a template, messages the template refuses: RequestError from the stream.
        """
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise RequestError.of("messages", messages, "a sequence of mappings with role and content")

        def prompt(model: ModelText) -> list[int]:
            if model.chat_template is None:
                raise RequestError.of(
                    "messages", len(messages), "a model with a chat template; use generate()"
                )

            text = model.chat_template.render(messages, tools=tools, template_args=template_args)
            return model.tokenizer.encode(text, add_special_tokens=False)

        return self._submit(prompt, params, tool_names(tools) if tools else None)

    def map(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_concurrent: int = 64,
    ) -> AsyncGenerator[Completion, None]:
        """Completions of many prompts, in order, at most `max_concurrent` of them submitted at a time.

        `prompts` is read as room comes up, so it may be endless. The first error ends the iteration;
        leaving it (`aclose`, or cancellation while waiting) cancels what was submitted.
        """
        check_int(RequestError, "max_concurrent", max_concurrent, ge=1)
        return map_prompts(lambda prompt: self.generate(prompt, params), prompts, max_concurrent)

    async def pause(self) -> None:
        """Launch no more steps, until `resume()`; returns when none is running. Requests stay."""
        await self._tell(Pause)

    async def resume(self) -> None:
        """Go on after `pause()`."""
        await self._tell(Resume)

    async def sleep(self) -> None:
        """Free weights and KV cache, until `wake()`. Requests stay: they compute their context anew."""
        await self._tell(Sleep)

    async def wake(self) -> None:
        """Load the model again after `sleep()`; ModelLoadError if that fails, and the engine stays asleep."""
        await self._tell(Wake)

    async def _tell(self, command: type[Pause] | type[Resume] | type[Sleep] | type[Wake]) -> None:
        driver, done = self._running_driver(), Latch()
        driver.tell(command(done))
        error = await done.wait()
        if error is not None:
            raise error

    @property
    def is_open(self) -> bool:
        """Whether requests are taken in: started, not closing and not failed."""
        return self._driver is not None and self._driver.is_open

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
            feed=Feed(Bridge.current()),
            tool_names=tool_names,
        )
        driver.submit(request)
        return TokenStream(request.request_id, request.feed, lambda: driver.tell(Cancel(request)))

    def _opener(self) -> Callable[[], OpenedModel]:
        """What the engine's thread calls to open the model; it must not hold the engine itself."""
        open_model, report = self._open, reporter(self._on_progress)
        return lambda: open_timed(open_model, report)

    def _running_driver(self) -> Driver:
        if self._driver is None:
            raise EngineClosed("the engine is not open: use `async with` or start()")

        return self._driver

    def _model_text(self) -> ModelText:
        model_text = self._running_driver().model_text
        if model_text is None:
            raise EngineClosed("the engine is still starting")

        return model_text

    def __del__(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None and not driver.closed.is_set:
            driver.close(0.0)
            message = f"engine of {self.model} was dropped unclosed"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)


def open_files(model: str | Path, config: EngineConfig, report: Report) -> OpenedModel:
    # Imported here, on the engine's thread: `import drift_sdk` loads no torch.
    from drift_sdk.opening import open_model

    return open_model(model, config, report)
