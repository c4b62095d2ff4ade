"""Prompt lookup: draft tokens from earlier occurrences of the last tokens of the same sequence.

A sequence chooses between n-grams and the drafts of a model by a score. In every round for which both have a
draft, the tokens that would have been accepted of each are counted, whichever was taken: as far as the
round's tokens show it. The score is a moving mean of the difference, in integers, so that every executor
computes the same. n-grams are taken while it is not negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FIRST_ROOM = 1024


class NGramHistory:
    """The tokens of a growing sequence, in which its last `min_length` to `max_length` tokens are looked up.

    Adding a token takes constant time, and a look-up time proportional to the sequence's length for each
    token that is found.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        self._min_length, self._max_length = min_length, max_length
        self._token_ids = np.empty(FIRST_ROOM, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        end = self._length + len(token_ids)
        if end > len(self._token_ids):
            larger = np.empty(max(end, 2 * len(self._token_ids)), np.int32)
            larger[: self._length] = self._token_ids[: self._length]
            self._token_ids = larger
        self._token_ids[self._length : end] = token_ids
        self._length = end

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that followed the latest earlier occurrence of the sequence's last
        tokens.

        As many of them as possible are looked up, up to `max_length`; empty if the last `min_length` do not
        occur before.
        """
        tokens, length = self._token_ids[: self._length], self._length
        # Entry i tells whether the `run` tokens up to position i + run - 1 equal the last ones.
        run, equal = 0, np.ones(length, np.bool_)
        while run < min(self._max_length, length - 1):
            longer = equal[1:] & (tokens[: length - 1 - run] == tokens[length - 1 - run])
            if not longer.any():
                break
            run, equal = run + 1, longer
        if run < self._min_length:
            return []

        end = int(np.flatnonzero(equal)[-1]) + run
        found: list[int] = tokens[end : end + num_tokens].tolist()
        return found


SCORE_UNIT = 256
"""A difference of one token."""
SCORE_SHIFT = 2
"""Each round moves the score by 1 / 2**SCORE_SHIFT of its distance from the round's difference."""


def num_right(draft: Sequence[int], token_ids: Sequence[int]) -> int:
    """The number of tokens, from the first on, that a draft has in common with a round's tokens."""
    number = 0
    for drafted, token in zip(draft, token_ids, strict=False):
        if drafted != token:
            break
        number += 1

    return number


def next_score(score: int, num_ngram: int, num_model: int) -> int:
    """The score after a round in which so many tokens of each draft were right."""
    return score + (((num_ngram - num_model) * SCORE_UNIT - score) >> SCORE_SHIFT)
