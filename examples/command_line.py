"""Arguments, exit status and one-line errors of the examples."""

import argparse
import io
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import anyio
import smollm2

from drift_sdk import DriftError


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the argument MODEL; the first paragraph of the module's docstring is its help."""
    description = (doc or "").partition("\n\n")[0]
    made = argparse.ArgumentParser(description=description)
    made.add_argument("model", nargs="?", help="a folder, a .gguf file or a hub id (default: SmolLM2-135M)")
    return made


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an argument that is a whole number in a range."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value}: expected {least} to {most}")

        return value

    number.__name__ = "whole number"  # argparse names it in its message
    return number


def run(main: Callable[..., Awaitable[None]], model: str | None, *arguments: Any) -> NoReturn:
    """Run `main(model, *arguments)` on asyncio and exit with its status.

    0: finished. 1: an error, in one line on stderr, or a reader of stdout that went away. 130: Ctrl-C.
    """
    # Text that the terminal cannot show, or input that is not in its encoding, is no reason to end.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(status_of(lambda: anyio.run(main, model or str(smollm2.path()), *arguments)))


def status_of(program: Callable[[], None]) -> int:
    try:
        program()
        status = 0
    except BaseException as raised:
        error = first_of(raised)
        if not isinstance(error, KeyboardInterrupt | BrokenPipeError | DriftError | OSError):
            raise

        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, DriftError | OSError) and not isinstance(error, BrokenPipeError):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)

    return status if can_flush() else status or 1


def can_flush() -> bool:
    """Whether stdout takes what is still buffered. If not, it is dropped: the interpreter would try again."""
    if sys.stdout is None:
        return True

    try:
        sys.stdout.flush()
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


def first_of(error: BaseException) -> BaseException:
    """The first error of a task group's, which may be groups themselves."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
