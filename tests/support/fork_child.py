"""A process that forks while its engine is running. Its children check how the engine behaves there.

python fork_child.py TIMES
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
import warnings
from typing import Any

from drift_sdk import Engine, EngineClosed, SamplingParams, TokenStream
from drift_sdk.testing import scripted_engine

TEXT = "What the parent's engine says is not disturbed by any number of children."
LIMIT_S = 120.0


async def check_child(engine: Engine, streams: list[TokenStream]) -> None:
    assert not engine.is_open
    for use in (
        lambda: engine.generate("x"),
        lambda: engine.chat([]),
        engine.stats,
        lambda: engine.tokenizer,
    ):
        try:
            use()
        except EngineClosed:
            continue
        raise AssertionError("the engine of the parent was used")

    for start in (
        engine.pause,
        engine.resume,
        engine.sleep,
        engine.wake,
        engine.map(["x"]).__anext__,
        *streams,
    ):
        try:
            await (start() if callable(start) else start)
        except EngineClosed:
            continue
        raise AssertionError(f"{start} did not raise")

    for stream in streams:
        stream.cancel()
        await stream.aclose()
    await engine.aclose(drain=60.0)
    await engine.aclose()
    async with engine:  # started again, in this process
        assert (await engine.generate("x")).text == TEXT
    async with scripted_engine("a child's own") as own:
        assert (await own.generate("x")).text == "a child's own"


def drop_all(engines: list[Engine], streams: list[TokenStream]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unraisable: list[Any] = []
        sys.unraisablehook = unraisable.append
        engines.clear()
        streams.clear()
        gc.collect()
        assert not unraisable, unraisable


def child(number: int, engines: list[Engine], streams: list[TokenStream]) -> None:
    """Check and end the child: every third one normally, with its exit hooks, the others by os._exit."""
    try:
        if number % 2:
            asyncio.run(check_child(engines[0], streams))
        drop_all(engines, streams)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if number % 3:
        os._exit(0)
    sys.exit(0)


def wait_for(pid: int) -> None:
    ends_at = time.monotonic() + LIMIT_S
    while time.monotonic() < ends_at:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            assert status == 0, f"a child ended with {status}"
            return

        time.sleep(0.005)
    os.kill(pid, 9)
    raise AssertionError("a child hangs")


def main(times: int) -> None:
    loop = asyncio.new_event_loop()
    engine = scripted_engine(TEXT, step_s=0.001)
    loop.run_until_complete(engine.start())

    async def submit() -> list[TokenStream]:
        # One is running; the other has ended, but this loop has not run since.
        return [engine.generate("x", SamplingParams(max_tokens=500, ignore_eos=True)), engine.generate("x")]

    streams = loop.run_until_complete(submit())
    is_over = False

    def load() -> None:
        """Submit requests repeatedly, so that locks are often held at a fork."""

        async def ask() -> None:
            while not is_over:
                await engine.generate("y" * 50, SamplingParams(max_tokens=3))

        asyncio.run(ask())

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(times):
        pid = os.fork()
        if pid == 0:
            child(number, [engine], streams)
        wait_for(pid)
    is_over = True
    for thread in threads:
        thread.join()

    async def finish() -> None:
        assert engine.is_open
        assert (await streams[1]).text == TEXT
        assert len((await streams[0]).token_ids) == 500
        await engine.aclose()

    loop.run_until_complete(finish())
    loop.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 advises against forking with threads
    main(int(sys.argv[1]))
