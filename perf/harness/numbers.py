"""Numbers that measuring scripts take as arguments: those out of range are refused before anything runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

__all__ = ["at_least", "over_zero"]

T = TypeVar("T", int, float)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument: a whole number of `least` or more."""
    return partial(_number, int, lambda number: number >= least, f"a whole number of {least} or more")


def over_zero(text: str) -> float:
    """The type of an argument: a number over 0."""
    return _number(float, lambda number: 0 < number < math.inf, "a number over 0", text)


def _number(convert: Callable[[str], T], is_in_range: Callable[[T], bool], expected: str, text: str) -> T:
    try:
        number = convert(text)
    except ValueError:
        pass
    else:
        if is_in_range(number):
            return number

    raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
