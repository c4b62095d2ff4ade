"""A process that compiles kernels for another one, see parallel_compile.py. Pickled kernels come in on
stdin."""

from __future__ import annotations

import os
import pickle
import sys


def main() -> None:
    """Compile one kernel after the other; a byte on stdout follows each, also one that does not compile."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what compilers print is no answer
    from drift_sdk._kernels.launch.parallel_compile import DONE, Compilation

    while True:
        try:
            compilation: Compilation = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # there is nothing to finish, and the parent waits

        try:
            compilation.make()
        except Exception as error:
            sys.stderr.write(f"{compilation}: {error!r}\n")
        answers.write(DONE)


if __name__ == "__main__":
    main()
