"""A scripted model whose tokens depend on all that tokens may depend on, and what streams of it saw."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from drift_sdk import Completion, DriftError, TokenStream

__all__ = ["letters", "outcome", "outcomes", "tokens_of"]


def letters(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
    """The next token: a small letter."""
    return 97 + (sum(prompt_ids) + seed + 7 * sum(output_ids) + len(output_ids)) % 26


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
