"""The command line, `python -m drift_sdk COMMAND`."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Run the command that the process's arguments name, and return its exit status.

    Ctrl-C ends the process without a traceback, also during imports, until a command begins that has to clean
    up. A process that ignores it still does.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from drift_sdk.cli.command_line import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
