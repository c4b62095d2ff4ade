"""A scripted model whose tokens depend on all that tokens may depend on, and what streams of it saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drift_sdk import Completion, DriftError, TokenStream

__all__ = ["HeldLetters", "letters", "outcome", "outcomes", "tokens_of"]

WAIT_S = 120.0


def letters(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
    """The next token: a small letter."""
    return 97 + (sum(prompt_ids) + seed + 7 * sum(output_ids) + len(output_ids)) % 26


@dataclass(frozen=True)
class HeldLetters:
    """`letters` up to a number of tokens; further ones when a file exists. Another process can have it."""

    file: Path
    number: int

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        ends_at = time.monotonic() + WAIT_S
        while len(output_ids) >= self.number and not self.file.exists():
            assert time.monotonic() < ends_at
            time.sleep(0.001)
        return letters(prompt_ids, output_ids, seed)


def tokens_of(prompt: str, seed: int, number: int) -> tuple[int, ...]:
    """The first tokens of a prompt."""
    output: list[int] = []
    while len(output) < number:
        output.append(letters(prompt.encode(), output, seed))
    return tuple(output)


async def outcome(stream: TokenStream) -> tuple[tuple[int, ...], Completion | DriftError]:
    """The tokens of all chunks, and how the stream ended."""
    got: list[int] = []
    try:
        async for chunk in stream:
            got += chunk.token_ids
        return tuple(got), await stream
    except DriftError as error:
        return tuple(got), error


async def outcomes(streams: Sequence[TokenStream]) -> list[tuple[tuple[int, ...], Completion | DriftError]]:
    """The outcomes of all streams, read at the same time."""
    return await asyncio.gather(*map(outcome, streams))
