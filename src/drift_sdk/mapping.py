"""Many prompts, one after the other in and out, several at a time within."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import islice
from typing import TypeVar

from drift_sdk.results import Completion
from drift_sdk.stream import TokenStream

__all__ = ["map_prompts"]

PromptT = TypeVar("PromptT")


async def map_prompts(
    generate: Callable[[PromptT], TokenStream], prompts: Iterable[PromptT], max_concurrent: int
) -> AsyncGenerator[Completion, None]:
    """Completions in the order of their prompts, at most `max_concurrent` submitted at a time."""
    waiting = iter(prompts)
    streams: deque[TokenStream] = deque()
    try:
        while True:
            for prompt in islice(waiting, max_concurrent - len(streams)):
                streams.append(generate(prompt))
            if not streams:
                return

            completion = await streams[0]
            streams.popleft()
            yield completion
    finally:
        for stream in streams:
            stream.cancel()
