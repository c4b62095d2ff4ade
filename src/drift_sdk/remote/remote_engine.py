"""Engines in other processes, with the methods of an `Engine`, and the program of a child process.

One event loop of this process calls all of its remote engines. A child process is called over a socket: a
message of the parent is `(number, method, pickled arguments)`, the answer `(number, error, pickled result)`.
The first method is "open", whose argument makes the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio

from drift_sdk._display import html_table, state_repr
from drift_sdk._fields import check_float, with_config
from drift_sdk.base_engine import BaseEngine, EngineKind
from drift_sdk.config import EngineConfig
from drift_sdk.driver.life_cycle import LifeCycle, OpenModel
from drift_sdk.driver.loops import Latch, LoopThread, num_forks
from drift_sdk.driver.prompts import ModelText, Prompt
from drift_sdk.engine import Engine
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
from drift_sdk.remote.connection import Connection, HostLink, unsendable
from drift_sdk.remote.host import (
    Channel,
    EngineHost,
    HostLost,
    HostUnavailable,
    Opened,
    TakeBackPause,
    portable,
    read_frame,
    write_frame,
)
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


PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from drift_sdk.remote.remote_engine import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""Of the child: it imports what its parent can import, and not the parent's main module."""
REAP_S = 0.002
"""Seconds between two looks at a child that was killed."""
DIE_S = 10.0
"""Most seconds that are waited for the end of a killed child: it may hang in a driver of the system."""

log: logging.Logger = logging.getLogger("drift_sdk")


class ProcessEngine(RemoteEngine):
    """An engine in a child process, with the methods of an `Engine`: it has an interpreter of its own, and
    what ends its process does not end this one.

    model, config: as of `Engine`.
    open_model:    as of `Engine`, for tests: it must be possible to pickle it.

    It differs from an `Engine` in this: an error that only the child finds, such as a `request_id` in use, is
    raised by the stream, not by the call; and statistics, with `is_paused` and `is_asleep`, are up to about a
    second old.

    The child runs the same interpreter with the environment and `sys.path` of this process, and writes to its
    standard output and error. It ignores SIGINT and SIGTERM, and ends with `aclose` and with this process.
    """

    @with_config(EngineConfig)
    def __init__(
        self, model: str | Path, config: EngineConfig | None = None, *, open_model: OpenModel | None = None
    ) -> None:
        super().__init__(model, config)
        if open_model is not None and not callable(open_model):
            raise ConfigError.of("open_model", open_model, "a function that opens a model, or None")

        self._open_model = open_model

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if there is none, or if it is that of another process."""
        link = self._link
        if link is None or link.is_from_parent or not isinstance(link.channel, ProcessChannel):
            return None

        return link.channel.pid

    async def _open_channel(self) -> Channel:
        make_engine = partial(Engine, self.model, self.config, open_model=self._open_model)
        return await ProcessChannel.open(make_engine)


class ProcessChannel:
    """Calls the methods of the host in a child process. Used on one asyncio loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._loss: HostLost | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def open(cls, make_engine: Callable[[], BaseEngine]) -> ProcessChannel:
        """Start a child with the host of an engine. If the scope is cancelled, the child is ended.
        ConfigError if `make_engine` cannot be pickled, ModelLoadError if the child cannot be started."""
        try:
            packed = packed_arguments(make_engine)
        except Exception as error:  # __reduce__ may run any code
            allowed = "a function that another process can import"
            raise ConfigError.of("open_model", make_engine, allowed) from error

        ours, theirs = socket.socketpair()
        try:
            with anyio.CancelScope(shield=True):  # a thread cannot be cancelled, and its child not be lost
                process = await asyncio.to_thread(start_child, theirs)
        except OSError as error:
            ours.close()
            raise ModelLoadError(f"no process can be started for an engine: {error}") from error
        finally:
            theirs.close()
        with anyio.CancelScope(shield=True):
            channel = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            await channel._send("open", packed)
        except (HostLost, ExecutorError) as error:
            await channel.kill()
            raise ModelLoadError(f"the process of an engine could not be started: {error}") from error
        except BaseException:
            await channel.kill()
            raise

        return channel

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self._send(method, packed_arguments(*arguments))

    async def _send(self, method: str, packed: bytes) -> Any:
        if self._loss is not None:
            raise HostLost(str(self._loss))

        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await write_frame(self._writer, (number, method, packed))
        except OSError:
            pass  # `_read` says why
        except ValueError:
            del self._calls[number]
            raise
        except asyncio.CancelledError:
            answer.cancel()
            raise
        found = await answer
        try:
            return pickle.loads(found)
        except Exception as error:
            raise ExecutorError(
                f"the answer of the engine's host to {method} cannot be read: {error_repr(error)}"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    async def kill(self) -> None:
        """End the child, also one that is stopped. Not cancelled by anyio's scopes."""
        self._process.kill()
        self._writer.transport.abort()  # a fork of the child may have its end of the socket
        with anyio.CancelScope(shield=True):
            await self._reading

    async def _read(self) -> None:
        """Take the answers until the child has ended, or sends something else and is ended; the calls that
        are left then raise HostLost."""
        cause = ""
        try:
            while True:
                number, error, found = await read_frame(self._reader)
                self._take(number, error, found)
        except (EOFError, OSError):
            pass
        except Exception as wrong:
            cause = f" after a message that cannot be read: {error_repr(wrong)}"

        self._process.kill()
        # At the interpreter's exit no thread can be started that waits.
        deadline = time.monotonic() + DIE_S
        while (status := self._process.poll()) is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(REAP_S)
        if status is None:
            log.error("process %d does not end %g s after it was killed", self.pid, DIE_S)
        self._loss = HostLost(f"its process has ended with status {status}{cause}")
        self._writer.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(HostLost(str(self._loss)))
        self._calls.clear()

    def _take(self, number: int, error: BaseException | None, found: bytes) -> None:
        """Take an answer. Any exception for one that is wrong; the call then remains."""
        answer = self._calls[number]
        if not answer.done():  # the call was not cancelled
            if isinstance(error, StopIteration):  # Python 3.12 puts a RuntimeError in its place
                raise TypeError("an answer that is a StopIteration")
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(found)
        del self._calls[number]


def packed_arguments(*arguments: Any) -> bytes:
    return pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)


def start_child(end: socket.socket) -> subprocess.Popen[bytes]:
    """Start the child that serves this end of a socket. OSError if that fails."""
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])
    # Without -P, what the program imports before it sets the path could be of the working directory.
    # The child compares its parent with this process, which may have ended when the child's program begins.
    command = [sys.executable, "-P", "-c", PROGRAM, str(end.fileno()), str(os.getpid()), paths]
    return subprocess.Popen(command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL)


PARENT_S = 1.0
"""Seconds between two looks at the parent, whose end of the socket a fork of it may keep open."""


class Program:
    """Carries out the calls of the parent, each in a task of its own."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._host: EngineHost | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, parent: int) -> None:
        """Carry out calls until the parent, which has this process id, ends."""
        self._start(end_with_parent(parent))
        while True:
            try:
                number, method, arguments = await read_frame(reader)
            except (EOFError, OSError):
                leave()
            self._start(self._answer(number, method, arguments))

    async def _answer(self, number: int, method: str, packed: bytes) -> None:
        error: BaseException | None = None
        found = b""
        try:
            found = pickle.dumps(await self._call(method, pickle.loads(packed)), pickle.HIGHEST_PROTOCOL)
        except DriftError as raised:
            error = portable(raised)
        except Exception as raised:
            error = ExecutorError(f"the engine's host has failed: {error_repr(raised)}")
        try:
            try:
                await write_frame(self._writer, (number, error, found))
            except ValueError as too_large:
                failure = ExecutorError(f"the answer of the engine's host to {method}: {too_large}")
                await write_frame(self._writer, (number, failure, b""))
        except OSError:
            leave()

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "open":
            (make_engine,) = arguments
            self._host = EngineHost(make_engine)
            return None

        return await getattr(self._host, method)(*arguments)

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def end_with_parent(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing tells of its end if a fork of it lives on
        await asyncio.sleep(PARENT_S)
    leave()


def leave() -> None:
    """End this process at once: nobody waits for its engine."""
    os._exit(0)


async def serve(descriptor: int, parent: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    await Program(writer).serve(reader, parent)


def main(descriptor: int, parent: int) -> None:
    """Serve the process of the id `parent` over the socket of this descriptor. Signals that a terminal or a
    supervisor sends to all processes of a program are for the parent, which may let its engines finish their
    requests."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    asyncio.run(serve(descriptor, parent))
