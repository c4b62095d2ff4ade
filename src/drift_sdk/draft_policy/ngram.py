"""Prompt look-up: what followed the last time the sequence said this."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NGramIndex"]


class NGramIndex:
    """Where each run of `min_length` to `max_length` tokens of a growing sequence was last continued.

    O(max_length) a token, whatever the sequence's length.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        self._lengths = range(max_length, min_length - 1, -1)
        self._token_ids: list[int] = []
        # Position after the latest occurrence of a run that has a token after it.
        self._continuations: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens = self._token_ids
        for token_id in token_ids:
            position = len(tokens)
            for length in self._lengths:
                if length <= position:
                    self._continuations[tuple(tokens[position - length :])] = position
            tokens.append(token_id)

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens, those that followed the longest run that also ends the sequence."""
        tokens = self._token_ids
        for length in self._lengths:
            if length > len(tokens):
                continue

            position = self._continuations.get(tuple(tokens[len(tokens) - length :]))
            if position is not None:
                return tokens[position : position + num_tokens]

        return []
