"""A process with an object of its module that closes a SyncEngine when it is deleted: at the exit, after
daemon threads have ended.

python deleted_at_exit.py
"""

from __future__ import annotations

import sys

from drift_sdk import EngineClosed, SyncEngine
from drift_sdk.testing import ScriptedModel


class Service:
    def __init__(self) -> None:
        self.engine = SyncEngine("scripted", open_model=ScriptedModel("fine"))
        self.engine.start()

    def __del__(self) -> None:
        try:
            self.engine.generate("x")
        except EngineClosed:
            sys.stdout.write("closed\n")
        self.engine.close()
        sys.stdout.write("deleted\n")


service = Service()
assert service.engine.generate("x").result().text == "fine"
