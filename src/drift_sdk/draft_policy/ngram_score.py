"""The measured advantage of n-grams over the drafts of a model, by which a sequence chooses between them.

In every round for which both have a draft, the tokens that would have been accepted of each are counted,
whichever was taken: as far as the round's tokens show it. The score is a moving mean of the difference, in
integers, so that every executor computes the same. n-grams are taken while it is not negative.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SCORE_SHIFT", "SCORE_UNIT", "next_score", "num_right"]

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
