"""SyncEngine and SyncStream: for code without an event loop, such as scripts and Celery tasks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, TypeVar, Unpack, overload

from drift_sdk._display import html_table, state_repr
from drift_sdk._fields import check_float, with_config
from drift_sdk._plain_data import IdArray
from drift_sdk.config import EngineConfig
from drift_sdk.conversation import Message, ToolSpec
from drift_sdk.driver.life_cycle import OpenModel, starting_error
from drift_sdk.driver.loops import LoopThread, check_no_loop
from drift_sdk.driver.stream_updates import StreamUpdates
from drift_sdk.engine import Engine, description
from drift_sdk.errors import EngineClosed, RequestError, RequestKeywordError
from drift_sdk.events import Event, Progress
from drift_sdk.grammars import ParsedT, ParsedT_co
from drift_sdk.jobs import JobDone, JobFailed, JobMap, JobResult, PromptLike, check_prompts
from drift_sdk.results import Chunk, Completion, Decision, Embedding, StateKind
from drift_sdk.sampling_params import SamplingOptions, SamplingParams
from drift_sdk.stats import EngineMetrics, EngineStats
from drift_sdk.stream import TokenStream, completion_within, description_of_stream, updates_of

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

ResultT = TypeVar("ResultT")


class SyncStream(Iterator[Chunk], Generic[ParsedT_co]):
    """A submitted request: iterate over its chunks, or get its completion with `result()`, or both in turn.

    Under `with`, leaving the block cancels the request. An exception that interrupts a wait, such as
    KeyboardInterrupt, cancels it too, except in such a block. May be used from any thread, by one at a time.
    A request that has ended can be read after the engine is closed.

    request_id: the name of the request in its completion and in the log.
    """

    def __init__(self, stream: TokenStream[ParsedT_co], call: Callable[..., Any]) -> None:
        self.request_id: str = stream.request_id
        self._stream = stream
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._read(unread_chunk, next_chunk)
        if chunk is None:
            raise StopIteration

        return chunk

    def __repr__(self) -> str:
        """As that of `TokenStream`."""
        return state_repr(type(self).__name__, description_of_stream(getattr(self, "_stream", None)))

    def _repr_html_(self) -> str:
        """As that of `TokenStream`."""
        return html_table(type(self).__name__, description_of_stream(getattr(self, "_stream", None)))

    def accepted(self) -> int | None:
        """Wait until the request is accepted, and return the number of its prompt's tokens; see
        `TokenStream.accepted`."""
        return self._read(num_accepted, TokenStream.accepted)

    def result(self, timeout: float | None = None) -> Completion[ParsedT_co]:
        """Wait for the end of the request. Chunks can still be read afterwards. Raises the request's error if
        it failed: RequestError, EngineClosed or ExecutorError.

        timeout: seconds, 0 to 1,000,000, after which TimeoutError is raised, as by the `result` of a
                 `concurrent.futures.Future`. The request goes on: wait again, or `cancel()` it. None = no
                 limit. RequestError for another value.
        """
        check_float(RequestError, "timeout", timeout, ge=0.0, le=1e6, optional=True)
        return self._read(completion_of, completion_within, timeout)

    def cancel(self) -> None:
        """End the request; tokens generated so far can still be read. May be called more than once."""
        self._stream.cancel()

    def __enter__(self) -> Self:
        self._read(lambda updates: self._stream, TokenStream.__aenter__)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _read(
        self,
        read: Callable[[StreamUpdates], ResultT],
        wait: Callable[..., Awaitable[ResultT]],
        *arguments: object,
    ) -> ResultT:
        """Await `wait` with the stream and arguments on the stream's event loop, and return its result. Of a
        request that has ended, return the result of `read`: the event loop may have ended too."""
        check_no_loop()
        updates = updates_of(self._stream)
        try:
            if not updates.is_done:
                result: ResultT = self._call(wait, self._stream, *arguments)
                return result
        except EngineClosed:  # by another thread, perhaps after the end of the request
            if not updates.is_done:
                raise

        return read(updates)


async def next_chunk(stream: TokenStream) -> Chunk | None:
    """The next chunk of a stream; None at its end."""
    return await anext(stream, None)


def unread_chunk(updates: StreamUpdates) -> Chunk | None:
    """The next chunk of a request that has ended; None after the last one. Raises the request's error if it
    failed."""
    if updates.has_chunk:
        return updates.take_chunk()

    if updates.error is not None:
        raise updates.error

    return None


def completion_of(updates: StreamUpdates) -> Completion:
    """The completion of a request that has ended. Raises the request's error if it failed."""
    if updates.completion is None:
        assert updates.error is not None
        raise updates.error

    return updates.completion


def num_accepted(updates: StreamUpdates) -> int | None:
    """The number of a prompt's tokens. Raises the error of a request that has failed before it was
    accepted."""
    if updates.error is not None and not updates.is_accepted:
        raise updates.error

    return updates.num_prompt_tokens


class SyncEngine:
    """An `Engine` whose methods block: for scripts, worker processes and threads.

    Arguments are those of `Engine`. Use it with `with`, or call `start()` and `close()`. All methods may be
    called from any number of threads; the requests of all are batched. It runs an event loop in a thread of
    its own, in which `on_progress` is called.

    A method that blocks raises RuntimeError in a thread that runs an event loop: use `Engine` there. It also
    does in a function of one of the engine's requests, for which all requests wait. After a fork, an engine
    of the parent is closed in the child: start one in each worker process. An exception that interrupts a
    call, such as KeyboardInterrupt, cancels what the call was waiting for, and leaving the `with` block
    closes the engine.
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
        self._engine._check_may_wait()
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

    @with_config(EngineConfig, RequestKeywordError)
    def embed(
        self,
        prompts: Sequence[str | Sequence[int] | IdArray],
        *,
        pooling: StateKind = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Embedding]:
        """The embedding of each prompt; see `Engine.embed`."""
        embed = partial(
            self._engine.embed,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
            priority=priority,
            cache_salt=cache_salt,
        )
        found: list[Embedding] = self._call(embed, prompts)
        return found

    @with_config(EngineConfig, RequestKeywordError)
    def decide(
        self,
        prompt: str | Sequence[int] | IdArray | Sequence[Message | Mapping[str, Any]],
        choices: Sequence[str | Sequence[int]],
        *,
        template_args: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Decision:
        """How probable each of several answers to a prompt is; see `Engine.decide`."""
        decide = partial(
            self._engine.decide, template_args=template_args, priority=priority, cache_salt=cache_salt
        )
        decision: Decision = self._call(decide, prompt, choices)
        return decision

    def update_weights(self, tensors: Mapping[str, Any]) -> None:
        """Replace weights between two steps; see `Engine.update_weights`."""
        self._call(self._engine.update_weights, tensors)

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
        self._engine._check_may_wait()
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
