"""How often drafts are right, as measured."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Acceptance"]

MEMORY = 0.99  # share of a weight that a round leaves
PRIOR_RATE = 0.6
MIN_WEIGHT = 4.0  # of a guess, and of what was known long ago
MAX_WEIGHT = 400.0  # enough to be sure: a large batch learns anew within a few rounds


class Acceptance:
    """For each position in a draft, the rate at which it is accepted once those before it were, with a weight
    in trials. Weights fade with every round, rates stay until there is something newer."""

    def __init__(self, num_positions: int) -> None:
        self._rates = [PRIOR_RATE] * num_positions
        self._weights = [MIN_WEIGHT] * num_positions

    def tokens_of_round(self, num_draft_tokens: int) -> float:
        """Tokens that a slot may be expected to emit, the model's own included."""
        total = reached = 1.0
        for rate in self._rates[:num_draft_tokens]:
            reached *= rate
            total += reached

        return total

    def record(self, slots: Sequence[tuple[int, int]]) -> None:
        """A round: (planned, accepted) drafts of every slot. What was planned and not proposed counts."""
        num_positions = len(self._rates)
        hits, trials = [0] * num_positions, [0] * num_positions
        for num_planned, num_accepted in slots:
            for position in range(min(num_accepted + 1, num_planned)):
                hits[position] += position < num_accepted
                trials[position] += 1

        for position, weight in enumerate(self._weights):
            faded = min(max(weight * MEMORY, MIN_WEIGHT), MAX_WEIGHT)
            total = faded + trials[position]
            self._rates[position] += (hits[position] - self._rates[position] * trials[position]) / total
            self._weights[position] = total
