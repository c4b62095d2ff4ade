"""The program of a child process that holds an engine; its parent calls it over a socket.

A message of the parent is `(number, method, pickled arguments)`; the answer is `(number, error, pickled
result)`. The first method is "open", whose argument makes the engine.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
from typing import Any

from drift_sdk.errors import DriftError, ExecutorError, error_repr
from drift_sdk.remote.host import EngineHost, portable
from drift_sdk.remote.messages import read_frame, write_frame

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
