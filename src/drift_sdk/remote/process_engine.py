"""ProcessEngine: an engine in a child process."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from drift_sdk._fields import with_config
from drift_sdk.base_engine import BaseEngine
from drift_sdk.config import EngineConfig
from drift_sdk.driver.model_opener import OpenModel
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError, ExecutorError, ModelLoadError, error_repr
from drift_sdk.remote.messages import Channel, HostLost, read_frame, write_frame
from drift_sdk.remote.remote_engine import RemoteEngine

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from drift_sdk.remote.process_host import main; main(int(sys.argv[1]), int(sys.argv[2]))"
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
