"""A program that starts an engine whose child runs another program, and is interrupted meanwhile.

Arguments: the kind of event loop, the program of the child. Prints the child's process id; exits with 130
when interrupted.
"""

from __future__ import annotations

import sys
import time
from threading import Thread

import anyio
import psutil

from drift_sdk import ProcessEngine
from drift_sdk.remote import remote_engine
from drift_sdk.testing import ScriptedModel

loop, remote_engine.PROGRAM = sys.argv[1:]


def report() -> None:
    """Print the id of the child, which stops itself if its program does so."""
    while not (children := psutil.Process().children()):
        time.sleep(0.001)
    (child,) = children
    while "SIGSTOP" in remote_engine.PROGRAM and child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()


async def main() -> None:
    Thread(target=report, daemon=True).start()
    async with ProcessEngine("scripted", open_model=ScriptedModel("a")):
        raise AssertionError("not reached")


try:
    anyio.run(main, backend=loop)
except KeyboardInterrupt:
    sys.exit(130)
