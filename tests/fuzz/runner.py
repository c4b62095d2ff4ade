"""Runs fuzz targets in child processes with limits of memory and time.

A target is a module of this folder, `tests/fuzz/<target>.py`:

    strategy = st.text() | st.binary()      # a hypothesis strategy whose examples can be pickled

    def run(data) -> None:                  # feeds one example to the code under test
        load(data)

An example passes if `run` returns or raises a `DriftError`. Any other exception (BaseExceptions and
assertions of `run` included), a signal, running out of memory and a hang are failures, and are reported with
the example.

In the test suite, `test_fuzz.py` runs all targets with a few examples. To run a target for longer:

    python tests/fuzz/runner.py <target> --seconds 120 [--seed 7]
    python tests/fuzz/runner.py <target> --replay example.pickle

Each example runs on a thread with a small stack, so that native recursion that is safe here is safe on every
platform. The limits are stated below; the limit of memory is in addition to that of the target's imports.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import itertools
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent
MEMORY_BYTES = 2 << 30
CPU_S = 20  # CPU time of an example
WALL_S = 120  # elapsed time of an example, for hangs that use no CPU time
STACK_BYTES = 512 << 10
SHOWN_CHARS = 3000
NO_TARGETS = {"runner", "following", "conftest"}
NOT_IMPORTED = "the target could not be imported"  # in place of an example


class FuzzFailure(AssertionError):
    """The failure of a target, with the example."""


def targets() -> list[str]:
    names = [path.stem for path in FOLDER.glob("*.py")]
    return sorted(n for n in names if n not in NO_TARGETS and not n.startswith("test_"))


def fuzz(*names: str, examples: int = 0, seconds: float = 0, seed: int = 0) -> None:
    """Run targets in one child process, one after the other, each for a number of examples or seconds. Raises
    `FuzzFailure` at the first failure."""
    with tempfile.NamedTemporaryFile(prefix="fuzz-", suffix=".pickle", delete=False) as file:
        journal = Path(file.name)

    options = [f"--examples={examples}", f"--seconds={seconds}", f"--seed={seed}", f"--journal={journal}"]
    child = subprocess.run(
        [sys.executable, __file__, *names, "--child", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # With backtraces, errors of llguidance take time quadratic in the depth of a grammar.
        env=os.environ | {"RUST_BACKTRACE": "0"},
    )
    if child.returncode == 0:
        journal.unlink()
        print(child.stdout, end="")  # noqa: T201
        return

    name, data = pickle.loads(journal.read_bytes())
    example = repr(data)
    end = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit {child.returncode}"
    output = child.stdout[-SHOWN_CHARS:]
    raise FuzzFailure(f"{name}: {end}\nlast example, in {journal}:\n{example[:SHOWN_CHARS]}\n{output}")


def work(module: ModuleType, journal: Path, examples: int, seconds: float, seed: int) -> None:
    """Draw examples and run them, in the child process. journal: file for the target's name and the current
    example."""
    import hypothesis

    end = time.monotonic() + seconds
    settings = hypothesis.settings(
        max_examples=examples or 100,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    num_run = 0
    for number in itertools.count(seed):

        @hypothesis.seed(number)
        @settings
        @hypothesis.given(data=module.strategy)
        def attempt(data: Any) -> None:
            nonlocal num_run
            num_run += 1
            journal.write_bytes(pickle.dumps((module.__name__, data)))
            try_one(module, data)

        attempt()
        if time.monotonic() >= end:
            break

    print(f"{module.__name__}: {num_run} examples passed")  # noqa: T201


def try_one(module: ModuleType, data: Any) -> None:
    """Run an example within the limits of time. Raises `FuzzFailure`."""
    from drift_sdk.errors import DriftError

    failures: list[BaseException] = []

    def body() -> None:
        try:
            module.run(data)
        except DriftError as error:
            if isinstance(error.__cause__, MemoryError):
                failures.append(error.__cause__)
        except BaseException as error:
            failures.append(error)

    limit_cpu()
    faulthandler.dump_traceback_later(WALL_S, exit=True)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    faulthandler.cancel_dump_traceback_later()
    if failures:
        raise FuzzFailure(f"{type(failures[0]).__qualname__}: {failures[0]}") from failures[0]


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the memory that is taken in a `with` block, not that of the modules of the next target."""
    if sys.platform != "linux":
        yield  # other systems do not enforce the limit
        return

    import resource

    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    num_bytes = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def limit_cpu() -> None:
    if sys.platform == "win32":
        return

    import resource

    seconds = math.ceil(time.process_time()) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs fuzz targets.")
    parser.add_argument("targets", nargs="+", choices=targets(), metavar="target")
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--replay", type=Path, help="run only this example, in this process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.child and args.replay is None:
        try:
            fuzz(*args.targets, examples=args.examples, seconds=args.seconds, seed=args.seed)
        except FuzzFailure as failure:
            sys.exit(str(failure))
        return

    faulthandler.enable()
    sys.path.insert(0, str(FOLDER))
    threading.stack_size(STACK_BYTES)
    for name in args.targets:
        if args.journal is not None:
            args.journal.write_bytes(pickle.dumps((name, NOT_IMPORTED)))
        module = importlib.import_module(name)
        with limited_memory():
            if args.replay is not None:
                try_one(module, pickle.loads(args.replay.read_bytes())[1])
            else:
                work(module, args.journal, args.examples, args.seconds, args.seed)


if __name__ == "__main__":
    main()
