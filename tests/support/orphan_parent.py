"""A process that starts an engine in a child, forks, and prints the child's process id; then it waits.

python orphan_parent.py
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from letters import letters

from drift_sdk import ProcessEngine
from drift_sdk.testing import ScriptedModel


def fork() -> None:
    """A fork that has this process's end of the socket, and lives on."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


async def main() -> None:
    model = ScriptedModel(letters, step_s=0.01)
    engine = ProcessEngine("scripted", model.config, open_model=model)
    await engine.start()
    stream = engine.generate("a", max_tokens=None)
    await anext(stream)
    fork()
    sys.stdout.write(f"{engine.pid}\n")
    sys.stdout.flush()
    await stream


if __name__ == "__main__":
    asyncio.run(main())
