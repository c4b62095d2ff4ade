"""The command line, `python -m drift_sdk COMMAND`."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Run the command that the process's arguments name, and return its exit status.

    Until the commands are imported, Ctrl-C ends the process without a traceback. A process that ignores it
    still does.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from drift_sdk.cli.command_line import main

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
