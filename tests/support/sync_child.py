"""A process that forks while its SyncEngine is open, and leaves without closing it.

python sync_child.py
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from contextlib import suppress

from drift_sdk import EngineClosed, SyncEngine
from drift_sdk.testing import ScriptedModel

engine = SyncEngine("scripted", open_model=ScriptedModel("fine"))  # global, so that it lives until the exit


def main() -> None:
    engine.start()
    stream = engine.generate("x", max_tokens=500, ignore_eos=True)
    next(stream)  # no module is being imported by a thread that the child lacks
    pid = os.fork()
    if pid == 0:
        check_child()
        sys.exit(3)  # with all exit hooks

    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3, status
    assert stream.result().text.startswith("fine")
    assert engine.generate("x").result().text == "fine"
    threading.Thread(target=wait_in_vain, daemon=True).start()
    sys.exit(4)


def wait_in_vain() -> None:
    with suppress(EngineClosed):
        engine.generate("x", max_tokens=None, ignore_eos=True).result()


def check_child() -> None:
    try:
        assert not engine.is_open
        for use in (lambda: engine.generate("x"), lambda: next(engine.map(["x"])), engine.stats):
            try:
                use()
            except EngineClosed:
                continue
            raise AssertionError("the engine of the parent was used")

        engine.close()
        with engine:  # started again, in this process
            assert engine.generate("x").result().text == "fine"
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 advises against forking with threads
    main()
