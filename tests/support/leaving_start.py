"""A program that exits, with status 3, while an engine starts whose child runs another program.

Argument: the program of the child. Prints the child's process id.
"""

from __future__ import annotations

import asyncio
import sys

import psutil

from drift_sdk import ProcessEngine
from drift_sdk.remote import remote_engine
from drift_sdk.testing import ScriptedModel

remote_engine.PROGRAM = sys.argv[1]
engine = ProcessEngine("scripted", open_model=ScriptedModel("a"))


async def begin() -> asyncio.Task[None]:
    """Start the engine; returns when the child has stopped itself."""
    task = asyncio.create_task(engine.start())
    while not any(  # noqa: ASYNC110 - nothing tells of it
        child.status() == psutil.STATUS_STOPPED for child in psutil.Process().children()
    ):
        await asyncio.sleep(0.001)
    return task


loop = asyncio.new_event_loop()
task = loop.run_until_complete(begin())
(child,) = psutil.Process().children()
sys.stdout.write(f"{child.pid}\n")
sys.stdout.flush()
sys.exit(3)
