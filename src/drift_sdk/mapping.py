"""Many prompts, one after the other in and out, several at a time within."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TypeVar

import anyio

from drift_sdk.errors import QueueFull
from drift_sdk.results import Completion
from drift_sdk.stream import TokenStream

__all__ = ["map_prompts"]

PromptT = TypeVar("PromptT")

POLL_S = 0.01
"""Seconds between looks at a queue that others have filled."""


async def map_prompts(
    generate: Callable[[PromptT], TokenStream],
    has_room: Callable[[], bool],
    prompts: Iterable[PromptT],
    max_concurrent: int,
) -> AsyncGenerator[Completion, None]:
    """Completions in the order of their prompts, at most `max_concurrent` submitted at a time.

    While the queue is full (`has_room`) it waits: for its own requests, or for those of others if it has
    none. An error of `prompts`, or of a prompt that cannot be submitted, is raised after the completions of
    the prompts before it."""
    waiting = iter(prompts)
    refused: list[PromptT] = []  # the prompt to be submitted next, if there was no room
    streams: deque[TokenStream] = deque()
    failure: Exception | None = None
    is_exhausted = False
    try:
        while True:
            while not is_exhausted and len(streams) < max_concurrent:
                try:
                    if not has_room():
                        break
                    if not refused:
                        refused.append(next(waiting))
                    streams.append(generate(refused[0]))
                    refused.clear()
                except QueueFull:  # others were quicker
                    break
                except StopIteration:
                    is_exhausted = True
                except Exception as error:
                    is_exhausted, failure = True, error

            if streams:
                completion = await streams[0]
                streams.popleft()
                yield completion
            elif not is_exhausted:
                await anyio.sleep(POLL_S)
            elif failure is not None:
                raise failure
            else:
                return
    finally:
        for stream in streams:
            stream.cancel()
