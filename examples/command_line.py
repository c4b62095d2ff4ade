"""Common parts of the examples: arguments, exit status and one-line errors."""

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
    """A parser with the argument MODEL. Its help is the first paragraph of `doc`, the module's docstring."""
    description = (doc or "").partition("\n\n")[0]
    made = argparse.ArgumentParser(description=description)
    made.add_argument("model", nargs="?", help="a folder, a .gguf file or a hub id (default: SmolLM2-135M)")
    return made


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` to `most`."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value}: expected {least} to {most}")

        return value

    number.__name__ = "whole number"  # for argparse's error messages
    return number


def run(main: Callable[..., Awaitable[None]], model: str | None, *arguments: Any) -> NoReturn:
    """Run `main(model, *arguments)` on asyncio and exit with its status.

    0: finished. 1: an error, printed to stderr in one line, or stdout was closed. 130: Ctrl-C.
    """
    # Text that the terminal cannot show, or input in another encoding, must not end the program.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(status_of(lambda: anyio.run(main, model or str(smollm2.path()), *arguments)))


def status_of(program: Callable[[], None]) -> int:
    """Run a program, print its error if it has one, and return its exit status."""
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
    """True if the buffer of stdout can be written.

    If not, it is discarded, or the interpreter would retry.
    """
    if sys.stdout is None:
        return True

    try:
        sys.stdout.flush()
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


def first_of(error: BaseException) -> BaseException:
    """The first error of an exception group, whose members may be groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
