"""Runs a coroutine function on each kind of event loop."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import pytest
import trio

LOOPS = ["asyncio", "uvloop", "trio"]

# Limit of a wait in a test, in seconds: it ends tests that hang, and is long enough for any machine.
WAIT_S = 120.0

on_every_loop = pytest.mark.parametrize("loop", LOOPS)


def run(loop: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """Run `main` on a new loop of the kind `loop`, one of LOOPS."""
    options = {"use_uvloop": True} if loop == "uvloop" else {}
    return anyio.run(main, backend="trio" if loop == "trio" else "asyncio", backend_options=options)


async def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait until a condition is true. It polls, because the engine's thread sets no event for it."""
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - see above
            await anyio.sleep(0.001)


@types.coroutine
def with_checkpoints(
    coroutine: Coroutine[Any, Any, Any], on_checkpoint: Callable[[], None]
) -> Generator[Any, Any, Any]:
    """Run a coroutine and call `on_checkpoint` each time it hands control to the event loop."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            trap = coroutine.throw(error) if error is not None else coroutine.send(value)
        except StopIteration as stop:
            return stop.value

        on_checkpoint()
        value, error = None, None
        try:
            value = yield trap
        except BaseException as exc:
            error = exc


def num_tasks() -> int:
    """Number of tasks of the running loop (asyncio or trio)."""
    if trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_statistics().tasks_living

    return len(asyncio.all_tasks())
