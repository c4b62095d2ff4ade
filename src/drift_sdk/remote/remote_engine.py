"""RemoteEngine: an engine in another process, with the methods of an `Engine`."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from drift_sdk._display import html_table, state_repr
from drift_sdk._validation import check_float
from drift_sdk.base_engine import BaseEngine
from drift_sdk.config import EngineConfig
from drift_sdk.driver.loop_poster import Latch
from drift_sdk.driver.loop_thread import LoopThread
from drift_sdk.driver.process_hooks import close_at_exit
from drift_sdk.driver.prompts import ModelText, Prompt
from drift_sdk.engine_kind import EngineKind
from drift_sdk.errors import (
    ConfigError,
    DriftError,
    EngineClosed,
    ExecutorError,
    ModelLoadError,
    RequestError,
    error_repr,
    short_repr,
)
from drift_sdk.remote.calls_loop import calls_loop
from drift_sdk.remote.connection import Connection
from drift_sdk.remote.messages import Channel, HostLost, HostUnavailable, Opened, TakeBackPause
from drift_sdk.stats import EngineMetrics, EngineStats, load_of
from drift_sdk.submission import Submission

__all__ = ["RemoteEngine"]

ResultT = TypeVar("ResultT")

CLOSE_S = 30.0
"""Most seconds, after those of draining, that closing waits for the engine in the other process. A process
that does not answer, because it is stopped or hangs, is then ended."""
FLUSH_S = 10.0
"""Most seconds that closing waits for the last news of a closed engine."""


class RemoteEngine(BaseEngine):
    """An engine in another process. It is called on an event loop in a daemon thread, one for all remote
    engines of this process.

    It differs from an `Engine` in this:
    - An error that only the other process finds is raised by the stream, not by the call.
    - Statistics are at most about a second old while requests are live.
    - A cancelled call of `start`, `pause` or `count_tokens` raises the cancellation when it has ended.
    - The other process ends with `aclose`, and with this process.
    """

    def __init__(self, model: str | Path, config: EngineConfig | None) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise ConfigError.of("model", model, "a folder, a .gguf file or a hub id")

        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError.of("config", config, "an EngineConfig")

        super().__init__()
        self.model = model
        self.config = config if config is not None else EngineConfig()
        self._link: Link | None = None
        self._was_started = False
        self._num_starting = 0
        self._changing: asyncio.Lock | None = None  # of the calls' loop

    @abstractmethod
    async def _open_channel(self) -> Channel:
        """Start the other process. Runs on the calls' loop. ConfigError or ModelLoadError if that fails."""

    async def start(self) -> None:
        """Start the other process and the engine there; see `Engine.start`."""
        if self._link is not None and self._link.loop.is_from_parent:
            self._link = self._changing = None
        was_open = self.is_open
        self._num_starting += 1
        try:
            await run(calls_loop(), self._open)
        except BaseException:
            if not was_open and self._num_starting == 1 and self.is_open:  # the task was cancelled
                await self.aclose()
            raise
        finally:
            self._num_starting -= 1

    async def aclose(self, drain: float = 0.0) -> None:
        """Close the engine, as `Engine.aclose` does, and end the other process."""
        check_float(RequestError, "drain", drain, ge=0.0, le=1e6)
        link = self._link
        if link is not None and not link.loop.is_from_parent:
            link.connection.close()
            await run(link.loop, partial(self._close, link, drain))

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted, as far as is known here."""
        link = self._link
        return link is not None and not link.loop.is_from_parent and link.connection.is_open

    def stats(self) -> EngineStats:
        """A snapshot, at most about a second old; see `Engine.stats`."""
        return self.metrics().stats

    def metrics(self) -> EngineMetrics:
        """The statistics and histograms, at most about a second old; see `Engine.metrics`."""
        return self._opened_link().connection.metrics

    @property
    def executor(self) -> str:
        return self._opened_link().opened.kind.executor

    def __repr__(self) -> str:
        """Model, state and load."""
        return state_repr(type(self).__name__, self._description())

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return html_table(type(self).__name__, self._description())

    def _description(self) -> dict[str, str]:
        if not hasattr(self, "_was_started"):  # the constructor has failed
            return {"state": "not started"}

        state = "open" if self.is_open else "closed" if self._was_started else "not started"
        shown = {"model": short_repr(str(self.model)), "state": state}
        return shown | load_of(self.stats()) if self.is_open else shown

    async def _pause(self) -> Callable[[], None]:
        connection, undos = self._opened_link().connection, list[Callable[[], None]]()

        async def pause() -> None:
            number = await connection.ask("pause")
            undos.append(partial(connection.send, TakeBackPause(number)))

        try:
            await run(self._opened_link().loop, pause)
        except BaseException:
            for undo in undos:
                undo()
            raise

        return undos[0]

    async def _kind(self) -> EngineKind:
        return self._opened_link().opened.kind

    def _enter(self, submissions: Sequence[Submission]) -> Sequence[Callable[[], None]]:
        return self._opened_link().connection.submit(submissions)

    def _cancel(self, request_id: str) -> bool:
        link = self._link
        return link is not None and not link.loop.is_from_parent and link.connection.cancel(request_id)

    async def _count_tokens(self, prompt: Prompt) -> int:
        try:
            return await self._ask("count_tokens", prompt)
        except DriftError:
            raise
        except Exception as error:  # a prompt that cannot be pickled, say
            raise DriftError(
                f"the prompt cannot be sent to the engine's host: {error_repr(error)}"
            ) from error

    @property
    def _has_room(self) -> bool:
        connection = self._opened_link().connection
        return not connection.is_open or connection.has_room()

    def _model_text(self) -> ModelText:
        return self._opened_link().model_text

    async def _ask(self, method: str, *arguments: object) -> int:
        """Call a method of the host that may not be repeated."""
        link = self._opened_link()
        return await run(link.loop, partial(link.connection.ask, method, *arguments))

    def _opened_link(self) -> Link:
        link = self._link
        if link is None:
            if self._was_started:
                raise EngineClosed("the engine was closed: start() opens it again")

            raise EngineClosed("the engine is not open: start() or its `with` block opens it")

        if link.loop.is_from_parent:
            raise EngineClosed("the engine is used by the process that this one was forked from")

        return link

    async def _open(self) -> None:
        """Start the other process, unless it serves already. Runs on the calls' loop."""
        if self._changing is None:
            self._changing = asyncio.Lock()
        async with self._changing:
            if self._link is not None:
                if self._link.connection.is_open:
                    return

                await self._link.end()
                self._link = None
            channel = await self._open_channel()
            try:
                opened: Opened = await channel.call("start")
            except (HostLost, HostUnavailable) as error:
                await channel.kill()
                raise ModelLoadError(f"{self.model}: the process ended while it started: {error}") from error
            except BaseException:
                await channel.kill()
                raise

            queued = self.config.max_queued_requests
            limit = None if queued is None else opened.num_slots + queued
            self._link = Link(channel, opened, calls_loop(), limit)
            self._was_started = True

    async def _close(self, link: Link, drain: float) -> None:
        """Close the engine and end the other process. Runs on the calls' loop."""
        try:
            async with asyncio.timeout(drain + CLOSE_S):
                await link.channel.call("aclose", drain)
            async with asyncio.timeout(FLUSH_S):
                await link.connection.ended.wait()
        except (HostLost, HostUnavailable, TimeoutError):
            pass  # `end` ends what is left
        finally:
            assert self._changing is not None
            async with self._changing:
                await link.end()
                if self._link is link:  # another task may have started the engine again
                    self._link = None


class Link:
    """An open host and what is known of it. Made on the calls' loop. The other process is ended at the
    interpreter's exit too."""

    def __init__(self, channel: Channel, opened: Opened, loop: LoopThread, limit: int | None) -> None:
        self.channel = channel
        self.opened = opened
        self.loop = loop
        self.connection = Connection(channel, opened.metrics, loop, limit)
        self.model_text = ModelText(
            tokenizer=opened.tokenizer,
            chat_template=None,  # conversations are rendered by the host
            eos_token_ids=opened.eos_token_ids,
            max_model_len=opened.kind.max_model_len,
            vocab_size=opened.vocab_size,
            default_params=opened.kind.default_params,
            has_drafts=opened.has_drafts,
        )
        self._following = asyncio.get_running_loop().create_task(self.connection.follow())
        self._has_ended = threading.Event()
        close_at_exit(self)

    async def end(self) -> None:
        """End the other process and the requests that it has."""
        try:
            await self.channel.kill()
            await self._following
        finally:
            self._has_ended.set()

    def close(self, drain_s: float) -> None:
        """Have the other process ended, without waiting for that. Called at the interpreter's exit."""
        if not self._has_ended.is_set():
            self.connection.close()
            self.loop.spawn(self.end)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the other process, so many seconds at most."""
        self._has_ended.wait(timeout_s)


async def run(loop: LoopThread, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run a coroutine function on another loop. If the task is cancelled, the cancellation is raised when the
    function has ended. ExecutorError if the host cannot be reached."""
    done, results = Latch(), list[ResultT]()

    async def call() -> None:
        error: BaseException | None = None
        try:
            results.append(await function())
        except (HostLost, HostUnavailable) as loss:
            error = ExecutorError(f"the engine's host is lost: {loss}")
        except BaseException as raised:
            error = raised
        done.set(error)

    loop.spawn(call)
    error = await done.wait_shielded()
    if error is not None:
        raise error

    return results[0]
