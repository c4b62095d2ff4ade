"""How many tokens rounds of speculative decoding emit, one after the other."""

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


class AcceptanceTrace(Struct, frozen=True):
    """Tokens that each round of each sequence emitted, the model's own included, so 1 or more."""

    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def of_mean(cls, mean: float) -> Self:
        """The shortest of this mean, to a thousandth, and of the least variance: 3.2 is 3, 3, 3, 3, 4."""
        ratio = Fraction(mean).limit_denominator(MAX_DENOMINATOR)
        whole = [ratio * index // 1 for index in range(ratio.denominator + 1)]
        return cls((tuple(after - before for before, after in zip(whole, whole[1:], strict=False)),))

    @classmethod
    def of(cls, acceptance: float | Sequence[int]) -> Self:
        """From a mean or from tokens round by round.

        Raises ConfigError for a mean under one token, for rounds of less, and for no rounds at all.
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
        """Of all rounds, sequence after sequence."""
        return tuple(chain.from_iterable(self.sequences))

    @property
    def mean(self) -> float:
        lengths = self.lengths
        return sum(lengths) / len(lengths)

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises ConfigError for a file that is not one of `save`."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError.of("path", str(path), f"the file of a trace: {error}") from error
