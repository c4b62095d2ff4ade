"""A drafter that knows the right tokens and drafts wrong ones with a given probability."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from drift_sdk.execution.eager.drafters import Span
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.trees import Draft, DraftLimit

__all__ = ["OracleDrafter"]


class OracleDrafter:
    """A drafter with a given accuracy.

    answers:     seed -> all tokens of the sequence, prompt included.
    corruption:  probability that a drafted token is wrong.
    histogram:   a -> number of rounds in which exactly the first a drafts were right.
    """

    aux_layers: Sequence[int] = ()
    max_tree_rows = 0

    def __init__(self, answers: dict[int, list[int]], corruption: float, vocab_size: int) -> None:
        self.histogram: dict[int, int] = {}
        self._answers = answers
        self._corruption = corruption
        self._vocab_size = vocab_size

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        pass

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        pass

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        return [
            Draft.chain(self.draft(slot.sampling.seed, slot.length, limit.chain_length))
            for slot, limit in zip(slots, limits, strict=True)
        ]

    def draft(self, seed: int, length: int, most: int) -> list[int]:
        """At most `most` tokens behind the first `length` of a sequence."""
        right = self._answers[seed][length : length + most]
        # Which tokens are wrong depends on request and position, not on the order of rounds.
        rngs = [random.Random(f"{seed} {length + i}") for i in range(len(right))]
        draft = [
            token
            if rng.random() >= self._corruption
            else (token + 1 + rng.randrange(self._vocab_size - 1)) % self._vocab_size
            for rng, token in zip(rngs, right, strict=True)
        ]
        num_right = next(
            (i for i, pair in enumerate(zip(draft, right, strict=True)) if pair[0] != pair[1]), len(right)
        )
        if most:
            self.histogram[num_right] = self.histogram.get(num_right, 0) + 1
        return draft
