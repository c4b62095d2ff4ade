"""A process that forks while engines in other processes are open, alone and in a pool. Its child checks that
they are closed there."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
import warnings

from letters import letters

from drift_sdk import BaseEngine, EngineClosed, EnginePool, ProcessEngine
from drift_sdk.testing import ScriptedModel


def process_engine() -> ProcessEngine:
    model = ScriptedModel(letters)
    return ProcessEngine("scripted", model.config, open_model=model)


async def check_child(engines: list[BaseEngine]) -> None:
    for engine in engines:
        assert not engine.is_open
        assert ("0 of 2 open" if isinstance(engine, EnginePool) else "state=closed") in repr(engine)
        for use in (engine.pause, engine.resume, engine.sleep, engine.wake):
            try:
                await use()
            except EngineClosed:
                continue
            raise AssertionError(f"{use} did not raise")


async def main() -> None:
    single = process_engine()
    pool = EnginePool([process_engine(), process_engine()])
    async with single, pool:
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.events._set_running_loop(None)
                asyncio.run(check_child([single, pool]))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert status == 0
        assert single.is_open and pool.is_open
        assert (await single.generate("a", max_tokens=3)).finish_reason == "length"


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 advises against forking with threads
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
