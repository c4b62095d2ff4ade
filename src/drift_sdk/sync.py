"""SyncEngine: an engine for code without an event loop, such as scripts and Celery tasks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Unpack, overload

from drift_sdk._display import html_table, state_repr
from drift_sdk._fields import with_config
from drift_sdk._plain_data import IdArray
from drift_sdk.config import EngineConfig
from drift_sdk.conversation import Message, ToolSpec
from drift_sdk.driver.life_cycle import starting_error
from drift_sdk.driver.loops import LoopThread, check_no_loop
from drift_sdk.driver.model_opener import OpenModel
from drift_sdk.engine import Engine, description
from drift_sdk.errors import EngineClosed, RequestKeywordError
from drift_sdk.events import Event
from drift_sdk.grammars import ParsedT
from drift_sdk.jobs import JobDone, JobFailed, JobMap, JobResult, PromptLike, check_prompts
from drift_sdk.progress import Progress
from drift_sdk.results import Completion
from drift_sdk.sampling_params import SamplingOptions, SamplingParams
from drift_sdk.stats import EngineMetrics, EngineStats
from drift_sdk.stream import TokenStream
from drift_sdk.sync_stream import SyncStream

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["SyncEngine"]

ResultT = TypeVar("ResultT")


class SyncEngine:
    """An `Engine` whose methods block: for scripts, worker processes and threads.

    Arguments are those of `Engine`. Use it with `with`, or call `start()` and `close()`. All methods may be
    called from any number of threads; the requests of all are batched. It runs an event loop in a thread of
    its own, in which `on_progress` is called.

    A method that blocks raises RuntimeError in a thread that runs an event loop: use `Engine` there. After a
    fork, an engine of the parent is closed in the child: start one in each worker process. An exception that
    interrupts a call, such as KeyboardInterrupt, cancels what the call was waiting for, and leaving the
    `with` block closes the engine.
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
        self._engine = Engine(
            model, config, on_progress=on_progress, on_event=on_event, open_model=open_model
        )
        self._loop: LoopThread | None = None
        self._finalizer: weakref.finalize[..., SyncEngine] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Load the model and get ready to serve; returns at once if the engine is open. Raises as
        `Engine.start` does. A start that fails or is interrupted leaves the engine closed."""
        check_no_loop()
        if self._loop is not None and self._loop.is_from_parent:
            self._loop, self._lock = None, threading.Lock()
        try:
            with self._lock:
                loop = self._working_loop()
            loop.call(self._engine.start)
        except BaseException:
            self.close()
            raise

    def close(self, drain: float = 0.0) -> None:
        """Close the engine as `Engine.aclose` does; returns at once if it is closed."""
        check_no_loop()
        loop = self._loop
        if loop is None or loop.is_from_parent:
            return

        if loop.has_failed:
            with self._lock:
                loop = self._working_loop()
        try:
            loop.call(self._engine.aclose, drain)
        except EngineClosed:  # another thread has closed it
            return

        with self._lock:
            if self._loop is not loop:
                return

            loop.abandon()  # also if this is interrupted
            self._loop = None
            assert self._finalizer is not None
            self._finalizer.detach()
        loop.stop()

    def _working_loop(self) -> LoopThread:
        """The loop, or a new one if there is none or it has failed. Used with the lock held."""
        loop = self._loop
        return loop if loop is not None and not loop.has_failed else self._open_loop()

    def _open_loop(self) -> LoopThread:
        """A loop that is ended when this object is collected, and also if this is interrupted."""
        try:
            loop = LoopThread()
        except (OSError, RuntimeError) as error:
            raise starting_error(error) from error

        try:
            self._finalizer = weakref.finalize(self, loop.abandon)
            self._finalizer.atexit = False
            self._loop = loop
        except BaseException:
            loop.abandon()
            self._loop = None
            raise

        return loop

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: make one in each process")

    def __repr__(self) -> str:
        """As that of `Engine`."""
        return state_repr(type(self).__name__, self._description())

    def _repr_html_(self) -> str:
        """As that of `Engine`."""
        return html_table(type(self).__name__, self._description())

    def _description(self) -> dict[str, str]:
        engine = getattr(self, "_engine", None)  # none if the constructor has failed
        return description(engine) if engine is not None else {"state": "not started"}

    def __enter__(self) -> SyncEngine:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompt: str | Sequence[int] | IdArray,
        params: SamplingParams[ParsedT] | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> SyncStream[ParsedT]:
        """Submit a prompt and return its stream at once; see `Engine.generate`."""
        engine = self._engine
        return self._stream(lambda: engine.generate(prompt, params, request_id=request_id, **options))

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams[ParsedT] | None = None,
        tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        tool_choice: str = "auto",
        continue_final: bool = False,
        request_id: str | None = None,
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> SyncStream[ParsedT]:
        """Submit a conversation and return its stream at once; see `Engine.chat`."""
        return self._stream(
            lambda: self._engine.chat(
                messages,
                params,
                tools,
                template_args,
                tool_choice=tool_choice,
                continue_final=continue_final,
                request_id=request_id,
                **options,
            )
        )

    def samples(
        self,
        prompt: str | Sequence[int] | IdArray | Sequence[Message | Mapping[str, Any]],
        n: int,
        params: SamplingParams[ParsedT] | None = None,
        tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        tool_choice: str = "auto",
        continue_final: bool = False,
        request_id: str | None = None,
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> list[SyncStream[ParsedT]]:
        """Submit a prompt or a conversation `n` times and return the streams at once; see
        `Engine.samples`."""
        engine = self._engine

        async def submit() -> Sequence[TokenStream[ParsedT]]:
            samples = engine.samples(
                prompt,
                n,
                params,
                tools,
                template_args,
                tool_choice=tool_choice,
                continue_final=continue_final,
                request_id=request_id,
                **options,
            )
            return samples[:]

        return [SyncStream(stream, self._call) for stream in self._call(submit)]

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike[ParsedT]],
        params: SamplingParams[ParsedT] | None = None,
        *,
        max_concurrent: int = 64,
        ordered: bool = True,
        errors: Literal["raise"] = "raise",
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> Generator[Completion[ParsedT], None, None]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike[ParsedT]],
        params: SamplingParams[ParsedT] | None = None,
        *,
        max_concurrent: int = 64,
        ordered: bool = True,
        errors: Literal["yield"],
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> Generator[JobDone[ParsedT] | JobFailed, None, None]: ...

    def map(
        self,
        prompts: Iterable[PromptLike[ParsedT]],
        params: SamplingParams[ParsedT] | None = None,
        *,
        max_concurrent: int = 64,
        ordered: bool = True,
        errors: Literal["raise", "yield"] = "raise",
        **options: Unpack[SamplingOptions[ParsedT]],
    ) -> Generator[Completion[ParsedT], None, None] | Generator[JobDone[ParsedT] | JobFailed, None, None]:
        """Completions of many prompts, as a generator; see `Engine.map`. `prompts` is read in the thread that
        iterates."""
        job_map = self._engine._job_map(params, max_concurrent, ordered, errors, options)
        check_prompts(prompts)
        results = self._results(job_map, prompts)
        return results if errors == "yield" else completions_of(results)

    @with_config(EngineConfig, RequestKeywordError)
    def count_tokens(
        self,
        prompt: str | Sequence[int] | IdArray | Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        tool_choice: str = "auto",
        continue_final: bool = False,
    ) -> int:
        """The number of tokens of a prompt or of messages; see `Engine.count_tokens`."""
        engine = self._engine
        count = partial(engine.count_tokens, tool_choice=tool_choice, continue_final=continue_final)
        number: int = self._call(count, prompt, tools, template_args)
        return number

    def cancel(self, request_id: str) -> bool:
        """Cancel the live request, or all samples, of this id; see `Engine.cancel`."""
        return self._engine.cancel(request_id)

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted."""
        loop = self._loop
        return self._engine.is_open and loop is not None and not loop.has_failed

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; see `Engine.tokenizer`."""
        return self._engine.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """The model's own defaults. EngineClosed if the engine is not open."""
        return self._engine.default_params

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together. EngineClosed if the engine is not open."""
        return self._engine.max_model_len

    def stats(self) -> EngineStats:
        """A snapshot of the engine's state and of its counters; see `Engine.stats`."""
        return self._engine.stats()

    def metrics(self) -> EngineMetrics:
        """The statistics and histograms, for `drift_sdk.prometheus.collector`; see `Engine.metrics`."""
        return self._engine.metrics()

    def _call(self, function: Callable[..., Awaitable[ResultT]], *arguments: Any) -> ResultT:
        """Run a coroutine function on the engine's event loop and wait for its result."""
        check_no_loop()
        loop = self._loop
        if loop is None or loop.is_from_parent:
            _ = self._engine._running_driver()  # raises EngineClosed, which says why
            raise EngineClosed("the engine was closed")

        return loop.call(function, *arguments)

    def _stream(self, submit: Callable[[], TokenStream[ParsedT]]) -> SyncStream[ParsedT]:
        async def submit_on_loop() -> tuple[TokenStream[ParsedT]]:
            return (submit(),)  # a stream by itself would be awaited

        (stream,) = self._call(submit_on_loop)
        return SyncStream(stream, self._call)

    def _results(self, job_map: JobMap, prompts: Iterable[PromptLike]) -> Generator[JobResult, None, None]:
        async def feed(read: Iterator[PromptLike]) -> None:
            job_map.feed(read)

        waiting, loop = iter(prompts), self._loop
        try:
            while (result := self._call(job_map.step)) is not None:
                if isinstance(result, JobResult):
                    yield result
                else:
                    self._call(feed, read_next(waiting))
        finally:
            if loop is not None:
                loop.post(job_map.cancel)


def read_next(prompts: Iterator[PromptLike]) -> Iterator[PromptLike]:
    """The next prompt as an iterator of its own, so that prompts are read in the calling thread; it raises
    what reading the prompt has raised."""
    try:
        prompt = next(prompts)
    except StopIteration:
        return iter(())
    except Exception as error:
        return raising(error)

    return iter((prompt,))


def raising(error: Exception) -> Iterator[PromptLike]:
    raise error
    yield ""


def completions_of(results: Generator[JobResult, None, None]) -> Generator[Completion, None, None]:
    """The completions of results, where errors are raised."""
    with closing(results):
        for result in results:
            assert result.error is None
            yield result.completion
