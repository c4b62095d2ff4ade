"""Blocks of a prompt, by which the router knows a common beginning before the prompt is tokenised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from drift_sdk.driver.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

__all__ = ["BLOCK_TOKENS", "PromptBlocks"]

BLOCK_TOKENS = 64
CHARS_PER_TOKEN = 4
"""Characters that count as a token: the mean of English text. Loads and prefixes are estimates."""
MAX_BLOCKS = 256
"""Most blocks that are hashed: prompts that agree in 16,384 tokens are as good as equal."""


class PromptBlocks(Struct, frozen=True):
    """The size of a prompt and its beginning.

    num_tokens: of the whole prompt; estimated unless it consists of token ids. At least 1.
    hashes:     one for each full block of 64 tokens, at most 256: of the block, all blocks before it and the
                salt. They are equal within this process alone.
    """

    num_tokens: int
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, salt: str | None = None) -> PromptBlocks:
        first = 0 if salt is None else hash(salt)
        if isinstance(prompt, TokenPrompt):
            return cls(max(1, len(prompt.ids)), tuple(rolling_hashes(prompt.ids, BLOCK_TOKENS, first)))

        text = written(prompt)
        num_tokens = max(1, len(text) // CHARS_PER_TOKEN)
        return cls(num_tokens, tuple(rolling_hashes(text, BLOCK_TOKENS * CHARS_PER_TOKEN, first)))


def rolling_hashes(items: Sequence[Any], block_size: int, first: int) -> Iterator[int]:
    """For each full block, a hash of the block and the hash before it, which is `first` for the first block.
    They end before a block with an item that has no hash, which the replica rejects."""
    found = first
    for end in range(block_size, min(len(items), block_size * MAX_BLOCKS) + 1, block_size):
        try:
            found = hash((found, items[end - block_size : end]))
        except Exception:  # of whatever a caller gives for a token id
            return

        yield found


def written(prompt: Prompt) -> str:
    """A text of the prompt whose beginning does not change when messages are added to a conversation."""
    if isinstance(prompt, TextPrompt):
        return prompt.text

    if isinstance(prompt, ChatPrompt):
        parts = (prompt.offered_tools, prompt.template_args, *prompt.messages)
        return "\n".join(map(text_of, parts))

    return ""


def text_of(part: object) -> str:
    """A text of plain data; none of an integer with more digits than Python writes."""
    try:
        return repr(part)
    except ValueError:
        return ""
