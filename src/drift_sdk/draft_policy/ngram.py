"""Prompt lookup: draft tokens from earlier occurrences of the last tokens of the same sequence."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NGramIndex"]


class NGramIndex:
    """Index of a growing sequence: the latest continuation of each n-gram of `min_length` to `max_length`
    tokens.

    Adding a token takes time proportional to the number of lengths times `max_length`, independent of the
    sequence's length.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        self._lengths = range(max_length, min_length - 1, -1)
        self._token_ids: list[int] = []
        # Position after the latest occurrence of an n-gram that has a token after it.
        self._continuations: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        tokens = self._token_ids
        for token_id in token_ids:
            position = len(tokens)
            for length in self._lengths:
                if length <= position:
                    self._continuations[tuple(tokens[position - length :])] = position
            tokens.append(token_id)

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that followed the latest earlier occurrence of the sequence's last
        tokens.

        The longest n-gram with an earlier occurrence is used; empty if there is none.
        """
        tokens = self._token_ids
        for length in self._lengths:
            if length > len(tokens):
                continue

            position = self._continuations.get(tuple(tokens[len(tokens) - length :]))
            if position is not None:
                return tokens[position : position + num_tokens]

        return []
