"""The trace of acceptance: how many tokens each round of speculative decoding emits, in order."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from drift_sdk._validation import check_float, check_int
from drift_sdk.errors import ConfigError

__all__ = ["AcceptanceTrace"]

MAX_DENOMINATOR = 1000
"""Longest trace made from a mean: means differ from it by less than a thousandth."""


class AcceptanceTrace(Struct, frozen=True):
    """Numbers of tokens emitted, for each sequence and each of its rounds in order.

    A number counts the model's own token, so it is 1 or more.
    """

    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def of_mean(cls, mean: float) -> Self:
        """The shortest trace with this mean, to a thousandth, and with the least variance.

        It is one sequence: 3.2 is 3, 3, 3, 3, 4.
        """
        ratio = Fraction(mean).limit_denominator(MAX_DENOMINATOR)
        whole = [ratio * index // 1 for index in range(ratio.denominator + 1)]
        return cls((tuple(after - before for before, after in zip(whole, whole[1:], strict=False)),))

    @classmethod
    def of(cls, acceptance: float | Sequence[int]) -> Self:
        """A trace from a mean, or from the number of tokens of each round.

        Raises ConfigError for a mean below 1, for a round of less than one token, and for no rounds.
        """
        if not isinstance(acceptance, Sequence):
            check_float(ConfigError, "acceptance", acceptance, ge=1)
            return cls.of_mean(acceptance)

        if not acceptance:
            raise ConfigError.of("acceptance", acceptance, "rounds")

        for length in acceptance:
            check_int(ConfigError, "acceptance", length, ge=1)
        return cls((tuple(acceptance),))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of all rounds, sequence after sequence."""
        return tuple(chain.from_iterable(self.sequences))

    @property
    def mean(self) -> float:
        """Tokens a round."""
        lengths = self.lengths
        return sum(lengths) / len(lengths)

    def save(self, path: str | Path) -> None:
        """Write the trace to a JSON file."""
        Path(path).write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace that `save` has written. Raises ConfigError for any other file, and for one without
        rounds."""
        try:
            trace = msgspec.json.decode(Path(path).read_bytes(), type=cls)
            cls.of(trace.lengths)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ConfigError.of(
                "path", str(path), f"a file written by AcceptanceTrace.save: {error}"
            ) from error
        return trace
