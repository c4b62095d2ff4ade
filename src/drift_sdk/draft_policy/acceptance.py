"""Measured acceptance rates of draft tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["Acceptance", "NodeAcceptance"]

MEMORY = 0.99
"""Factor that every round applies to the weights of earlier trials."""
PRIOR_RATE = 0.6
"""Rate assumed before the first trial."""
MIN_WEIGHT = 4.0
"""Weight, in trials, of the assumed rate and of trials long ago."""
MAX_WEIGHT = 400.0
"""Largest weight of earlier trials: enough for a certain rate, and little enough that a large batch replaces
it within a few rounds."""


class Acceptance:
    """The acceptance rate of each position in a draft, given that all positions before it were accepted.

    Each rate has a weight, in trials. Weights decrease with every round; a rate changes only with new trials.
    """

    def __init__(self, num_positions: int) -> None:
        self._rates = [PRIOR_RATE] * num_positions
        self._weights = [MIN_WEIGHT] * num_positions

    def tokens_of_round(self, num_draft_tokens: int) -> float:
        """The expected number of tokens that a slot emits in a round with so many draft tokens: accepted ones
        and the one that the target adds."""
        total = reached = 1.0
        for rate in self._rates[:num_draft_tokens]:
            reached *= rate
            total += reached

        return total

    def record(self, slots: Sequence[tuple[int, int]]) -> None:
        """Add the trials of a round, from the numbers of (planned, accepted) draft tokens of every slot.

        A draft token that was planned but not proposed counts as rejected.
        """
        num_positions = len(self._rates)
        hits, trials = [0] * num_positions, [0] * num_positions
        for (num_planned, num_accepted), num_slots in Counter(slots).items():
            for position in range(min(num_accepted + 1, num_planned)):
                hits[position] += num_slots if position < num_accepted else 0
                trials[position] += num_slots

        for position, weight in enumerate(self._weights):
            faded = min(max(weight * MEMORY, MIN_WEIGHT), MAX_WEIGHT)
            total = faded + trials[position]
            self._rates[position] += (hits[position] - self._rates[position] * trials[position]) / total
            self._weights[position] = total


class NodeAcceptance:
    """The probability that each node of a tree of drafts is accepted, by the node's number.

    Nodes are numbered in the order in which they are preferred, and a round with fewer drafts takes the first
    of them, so rounds of any size are trials of the same probabilities. Until measured, node i counts as
    accepted with probability `PRIOR_RATE` / i. Weights as of `Acceptance`.
    """

    def __init__(self, num_nodes: int) -> None:
        self._rates = [PRIOR_RATE / node for node in range(1, num_nodes + 1)]
        self._weights = [MIN_WEIGHT] * num_nodes

    def tokens_of_round(self, num_draft_tokens: int) -> float:
        """The expected number of tokens that a slot emits in a round with so many draft tokens."""
        return 1.0 + sum(self._rates[:num_draft_tokens])

    def record(self, slots: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Add the trials of a round, from the number of planned draft tokens and the accepted nodes (from 1)
        of every slot.

        A draft token that was planned but not proposed counts as rejected.
        """
        num_nodes = len(self._rates)
        hits, ends = [0] * num_nodes, [0] * (num_nodes + 1)
        for num_planned, accepted in slots:
            ends[num_planned] += 1
            for node in accepted:
                hits[node - 1] += 1

        # Node i was tried in the rounds that planned i draft tokens or more.
        trials = [*accumulate(reversed(ends[1:]))][::-1]
        for node, weight in enumerate(self._weights):
            faded = min(max(weight * MEMORY, MIN_WEIGHT), MAX_WEIGHT)
            total = faded + trials[node]
            self._rates[node] += (hits[node] - self._rates[node] * trials[node]) / total
            self._weights[node] = total
