"""Numbers that measuring scripts take as arguments: those out of range are refused before anything runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

__all__ = ["at_least", "over_zero"]


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument: a whole number of `least` or more."""

    def whole(text: str) -> int:
        expected = f"{text}: expected a whole number of {least} or more"
        try:
            number = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(expected) from error

        if number < least:
            raise argparse.ArgumentTypeError(expected)

        return number

    return whole


def over_zero(text: str) -> float:
    """The type of an argument: a number over 0."""
    expected = f"{text}: expected a number over 0"
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(expected) from error

    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(expected)

    return number
