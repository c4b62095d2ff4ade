"""What is measured: how many sequences, on how long a context, with how many drafted tokens."""

from __future__ import annotations

import random
import re

from msgspec import Struct

from perf.harness.byte_tokenizer import NUM_SPECIAL

__all__ = ["LENGTHS", "SCENARIOS", "Scenario", "random_tokens"]

LENGTHS = (8, 264)
"""Tokens generated in the two runs whose difference is the decode rate: prefill and start drop out of it."""


class Scenario(Struct, frozen=True):
    """`batch` sequences of `context` prompt tokens each."""

    name: str
    batch: int
    context: int

    @classmethod
    def parse(cls, name: str) -> Scenario:
        """From "single-512" or "batch4-16k", k being 1,024; ValueError for anything else."""
        match = re.fullmatch(r"(?:single|batch([1-9]\d*))-([1-9]\d*)(k?)", name)
        if match is None:
            raise ValueError(f"scenario={name!r}: expected single-N or batchB-N, N in tokens or like 16k")

        batch, context, is_kilo = match.groups()
        return cls(name, int(batch or 1), int(context) * (1024 if is_kilo else 1))

    def mean_context(self, lengths: tuple[int, int] = LENGTHS) -> float:
        """Tokens of a sequence, on average, while those that are timed are generated."""
        return self.context + sum(lengths) / 2

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random tokens, others for each sequence, the same in every process."""
        return [random_tokens(vocab_size, self.context, seed=index) for index in range(self.batch)]


SCENARIOS = tuple(
    Scenario.parse(name) for name in ("single-512", "single-32k", "batch4-16k", "batch8-512", "batch64-512")
)


def random_tokens(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(NUM_SPECIAL, vocab_size), k=num_tokens)
