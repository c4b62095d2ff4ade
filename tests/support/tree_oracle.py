"""A drafter of trees that knows the right tokens and drafts wrong ones with a given probability."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from drift_sdk.execution.eager.drafters import Span
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.trees import MAX_TREE_ROWS, Draft, DraftLimit, TokenTree

__all__ = ["TreeOracle"]


class TreeOracle:
    """A drafter of random trees.

    answers:     seed -> all tokens of the sequence, prompt included.
    corruption:  probability that a path of right tokens ends at a node that has children.
    accepted:    a -> number of rounds in which a drafts on a path were right.
    num_moved:   rounds in which the right path is not the first path.
    """

    aux_layers: Sequence[int] = ()
    max_tree_rows = MAX_TREE_ROWS

    def __init__(self, answers: dict[int, list[int]], corruption: float, vocab_size: int) -> None:
        self.accepted: dict[int, int] = {}
        self.num_moved = 0
        self._answers, self._corruption, self._vocab_size = answers, corruption, vocab_size

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        pass

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        pass

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        return [self._propose(slot, limit) for slot, limit in zip(slots, limits, strict=True)]

    def _propose(self, slot: Slot, limit: DraftLimit) -> Draft:
        if limit.chain_length == 0:
            return Draft.chain(())

        # Which tokens are wrong depends on request and position, not on the order of rounds.
        rng = random.Random(f"{slot.sampling.seed} {slot.length}")
        if limit.is_chain:
            tree = TokenTree.chain(limit.chain_length)
        else:
            parents, depths = [-1], [0]
            for _ in range(limit.num_tokens):
                allowed = [node for node, depth in enumerate(depths) if depth < limit.depth]
                parents.append(rng.choice(allowed[-4:]))
                depths.append(depths[parents[-1]] + 1)
            tree = TokenTree(parents)
        answer = self._answers[slot.sampling.seed]
        tokens = [-1] * tree.num_nodes
        right, path = 0, [0]  # the last node of the right path
        for node in range(tree.num_nodes):
            children = list(tree.children(node))
            wanted = slot.length + tree.depths[node]
            others = [token for token in range(self._vocab_size) if token not in answer[wanted : wanted + 1]]
            for child, token in zip(children, rng.sample(others, len(children)), strict=True):
                tokens[child] = token
            if node == right and children and wanted < len(answer) and rng.random() >= self._corruption:
                right = rng.choice(children)
                tokens[right] = answer[wanted]
                path.append(right)
        num_right = len(path) - 1
        self.accepted[num_right] = self.accepted.get(num_right, 0) + 1
        self.num_moved += tree.first_path[: len(path)] != tuple(path)
        return Draft(tree, tokens[1:])
