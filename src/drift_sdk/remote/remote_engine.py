"""RemoteEngine: an engine in another process, with the methods of an `Engine`.

One event loop of this process calls all of its remote engines.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drift_sdk._display import html_table, state_repr
from drift_sdk._validation import check_float
from drift_sdk.base_engine import BaseEngine, EngineKind
from drift_sdk.config import EngineConfig
from drift_sdk.driver.life_cycle import LifeCycle
from drift_sdk.driver.loops import Latch, LoopThread
from drift_sdk.driver.process_hooks import num_forks
from drift_sdk.driver.prompts import ModelText, Prompt
from drift_sdk.errors import (
    ConfigError,
    DriftError,
    EngineClosed,
    ExecutorError,
    RequestError,
    short_repr,
)
from drift_sdk.remote.connection import Connection, HostLink, unsendable
from drift_sdk.remote.messages import Channel, HostLost, HostUnavailable, Opened, TakeBackPause
from drift_sdk.serving import Submission
from drift_sdk.stats import EngineMetrics, EngineStats, load_of


class Shared:
    """The loop of a process, made at its first use; it lasts until the process ends."""

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.loop: LoopThread | None = None


_shared: dict[int, Shared] = {}
"""By number of forks: in a forked child the parent's lock may be held, and its loop has no thread."""


def calls_loop() -> LoopThread:
    """The loop. In a forked child it is a new one, and after it has failed."""
    shared = _shared.setdefault(num_forks(), Shared())
    with shared.lock:
        if shared.loop is None or shared.loop.has_failed:
            shared.loop = LoopThread("remote-calls")
        return shared.loop


ResultT = TypeVar("ResultT")


class RemoteEngine(BaseEngine):
    """An engine in another process. It is called on an event loop in a daemon thread, one for all remote
    engines of this process.

    It differs from an `Engine` in this:
    - An error that only the other process finds is raised by the stream, not by the call.
    - Statistics are at most about a second old while requests are live.
    - The other process ends with `aclose`, and with this process.
    """

    def __init__(self, model: str | Path, config: EngineConfig | None) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise ConfigError.of("model", model, "a folder, a .gguf file or a hub id")

        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError.of("config", config, "an EngineConfig")

        super().__init__()
        self.model: str | Path = model
        self.config: EngineConfig = config if config is not None else EngineConfig()
        self._life_cycle = LifeCycle[HostLink]()
        self._was_open = False

    @abstractmethod
    async def _open_channel(self) -> Channel:
        """Start the other process. Runs on the calls' loop, in an anyio scope; if that is cancelled, no
        process is left. ConfigError or ModelLoadError if that fails."""

    async def start(self) -> None:
        """Start the other process and the engine there; see `Engine.start`. If the task is cancelled, a
        process that is starting is ended at once, unless another task starts the engine too."""
        loop = calls_loop()
        await self._life_cycle.start(
            lambda: HostLink(self._open_channel, loop, str(self.model), self.config.max_queued_requests)
        )
        self._was_open = True

    async def aclose(self, drain: float = 0.0) -> None:
        """Close the engine, as `Engine.aclose` does, and end the other process: one that does not answer 30
        seconds after `drain` is ended by force."""
        check_float(RequestError, "drain", drain, ge=0.0, le=1e6)
        await self._life_cycle.aclose(drain)

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    async def update_weights(self, tensors: Mapping[str, Any]) -> None:
        allowed = "an engine of this process: tensors are not sent to another one"
        raise RequestError(f"tensors: expected {allowed}", field="tensors", allowed=allowed)

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted, as far as is known here."""
        link = self._link
        return link is not None and link.is_open

    def stats(self) -> EngineStats:
        """A snapshot, at most about a second old; see `Engine.stats`."""
        return self.metrics().stats

    def metrics(self) -> EngineMetrics:
        """The statistics and histograms, at most about a second old; see `Engine.metrics`."""
        return self._connection.metrics

    @property
    def executor(self) -> str:
        return self._host.kind.executor

    def __repr__(self) -> str:
        """Model, state and load."""
        return state_repr(type(self).__name__, self._description())

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return html_table(type(self).__name__, self._description())

    def _description(self) -> dict[str, str]:
        if not hasattr(self, "_was_open"):  # the constructor has failed
            return {"state": "not started"}

        state = "open" if self.is_open else "closed" if self._was_open else "not started"
        shown = {"model": short_repr(str(self.model)), "state": state}
        return shown | load_of(self.stats()) if self.is_open else shown

    async def _pause(self) -> Callable[[], None]:
        connection, undos = self._connection, list[Callable[[], None]]()
        is_wanted = True

        async def pause() -> None:
            number = await connection.ask("pause")
            undos.append(partial(connection.send, TakeBackPause(number)))
            if not is_wanted:
                undos[0]()

        try:
            await run(self._opened_link().loop, pause, is_shielded=False)
        except BaseException:
            is_wanted = False
            for undo in undos:
                undo()
            raise

        return undos[0]

    async def _kind(self) -> EngineKind:
        return self._host.kind

    def _enter(self, submissions: Sequence[Submission]) -> Sequence[Callable[[], None]]:
        return self._connection.submit(submissions)

    def _cancel(self, request_id: str) -> bool:
        link = self._link
        connection = link.connection if link is not None and not link.is_from_parent else None
        return connection is not None and connection.cancel(request_id)

    async def _count_tokens(self, prompt: Prompt) -> int:
        try:
            return await self._ask("count_tokens", prompt, is_shielded=False)
        except DriftError:
            raise
        except Exception as error:  # a prompt that cannot be pickled, say
            raise unsendable(error) from error

    @property
    def _calls_functions(self) -> bool:
        return False

    @property
    def _has_room(self) -> bool:
        connection = self._connection
        return not connection.is_open or connection.has_room()

    def _model_text(self) -> ModelText:
        model_text = self._opened_link().model_text
        assert model_text is not None
        return model_text

    @property
    def _connection(self) -> Connection:
        connection = self._opened_link().connection
        assert connection is not None
        return connection

    @property
    def _host(self) -> Opened:
        host = self._opened_link().host
        assert host is not None
        return host

    async def _ask(self, method: str, *arguments: object, is_shielded: bool = True) -> int:
        """Call a method of the host that may not be repeated. is_shielded: as of `run`."""
        ask = partial(self._connection.ask, method, *arguments)
        return await run(self._opened_link().loop, ask, is_shielded=is_shielded)

    @property
    def _link(self) -> HostLink | None:
        return self._life_cycle.driver

    def _opened_link(self) -> HostLink:
        """The link, which is or was open. EngineClosed if there is none."""
        link = self._link
        if link is None:
            if self._was_open:
                raise EngineClosed("the engine was closed: start() opens it again")

            raise EngineClosed("the engine is not open: start() or its `with` block opens it")

        if link.is_from_parent:
            raise EngineClosed("the engine is used by the process that this one was forked from")

        if link.connection is None:
            raise EngineClosed("the engine is still starting")

        return link


async def run(
    loop: LoopThread, function: Callable[[], Awaitable[ResultT]], *, is_shielded: bool = True
) -> ResultT:
    """Run a coroutine function on another loop. ExecutorError if the host cannot be reached.

    is_shielded: whether a cancellation of the task is raised when the function has ended. Otherwise it is
                 raised at once, and the function goes on.
    """
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
    error = await (done.wait_shielded() if is_shielded else done.wait())
    if error is not None:
        raise error

    return results[0]
