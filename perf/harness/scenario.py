"""Scenarios: the number of sequences and the length of their contexts."""

from __future__ import annotations

import random
import re
from itertools import cycle, islice

from msgspec import Struct

from perf.harness.byte_tokenizer import NUM_SPECIAL

__all__ = ["LENGTHS", "SCENARIOS", "Scenario", "Text", "random_tokens"]

LENGTHS = (8, 264)
"""Tokens of the two generations whose difference gives the decode rate. Prefill and start cancel out."""


class Text(Struct, frozen=True):
    """A text to take prompts from. name: of its file."""

    name: str
    token_ids: tuple[int, ...]


class Scenario(Struct, frozen=True):
    """`batch` sequences of `context` prompt tokens each."""

    name: str
    batch: int
    context: int

    @classmethod
    def parse(cls, name: str) -> Scenario:
        """Parse "single-512" or "batch4-16k" (k = 1,024). Raises ValueError for anything else."""
        match = re.fullmatch(r"(?:single|batch([1-9]\d*))-([1-9]\d*)(k?)", name)
        if match is None:
            raise ValueError(f"scenario={name!r}: expected single-N or batchB-N, N in tokens or like 16k")

        batch, context, is_kilo = match.groups()
        return cls(name, int(batch or 1), int(context) * (1024 if is_kilo else 1))

    def mean_context(self, lengths: tuple[int, int] = LENGTHS) -> float:
        """Mean tokens of a sequence during the timed part of a generation."""
        return self.context + sum(lengths) / 2

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts, different for each sequence, the same in every process."""
        return [random_tokens(vocab_size, self.context, seed=index) for index in range(self.batch)]

    def text_prompts(self, text: Text) -> list[list[int]]:
        """Prompts from a text, which begin at places that are spread evenly over it. The end of the text is
        followed by its beginning."""
        starts = [index * len(text.token_ids) // self.batch for index in range(self.batch)]
        return [list(islice(cycle(text.token_ids), start, start + self.context)) for start in starts]


SCENARIOS = tuple(
    Scenario.parse(name) for name in ("single-512", "single-32k", "batch4-16k", "batch8-512", "batch64-512")
)


def random_tokens(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Random token ids without special tokens."""
    return random.Random(seed).choices(range(NUM_SPECIAL, vocab_size), k=num_tokens)
