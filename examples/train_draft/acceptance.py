"""Acceptance of a head's drafts, from answers that the target has given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from msgspec import Struct

from .answers import MAX_REPEATED_SHARE, Answer, repeated_share
from .batches import Batch, Conversation
from .head import DraftHead
from .target import Target

__all__ = ["Acceptance", "evaluate", "evaluation_groups", "walk"]

NUM_DRAFTS = 3


class Acceptance(Struct, frozen=True, kw_only=True):
    """Rounds of decoding: at index i of `accepted_at`, those that accepted draft i and all before it."""

    num_rounds: int = 0
    accepted_at: tuple[int, ...] = (0,) * NUM_DRAFTS

    @property
    def length(self) -> float:
        """Mean tokens a round, the target's own included."""
        return 1 + sum(self.accepted_at) / max(1, self.num_rounds)

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(count / max(1, self.num_rounds) for count in self.accepted_at)

    def plus(self, other: Acceptance) -> Acceptance:
        # Rounds of different shapes have different numbers of positions.
        pairs = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        return Acceptance(
            num_rounds=self.num_rounds + other.num_rounds, accepted_at=tuple(a + b for a, b in pairs)
        )


def evaluation_groups(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """Answers by kind and temperature, such as "chat 0"; those that repeat themselves by themselves, as
    "repetitive"."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        is_repetitive = repeated_share(answer.token_ids) > MAX_REPEATED_SHARE
        name = "repetitive" if is_repetitive else f"{answer.kind} {answer.temperature:g}"
        groups.setdefault(name, []).append(answer)
    return groups


@torch.no_grad()
def evaluate(head: DraftHead, target: Target, answers: Sequence[Answer], batch_size: int = 16) -> Acceptance:
    """The acceptance of greedy drafts of NUM_DRAFTS tokens in rounds of decoding that give these answers.

    It is what an engine counts, but for rounds at the end of an answer; see `walk`.
    """
    weights = head.cast(target.decoder.dtype)
    total = Acceptance()
    longest = sorted(answers, key=lambda answer: -len(answer.token_ids) - len(answer.prompt_ids))
    for first in range(0, len(longest), batch_size):
        conversations = [
            Conversation.of(answer, target.spec.max_position_embeddings)
            for answer in longest[first : first + batch_size]
        ]
        batch = Batch(conversations, target.device)
        num_accepted = accepted_drafts(head, weights, target, batch)
        for each, row in zip(conversations, num_accepted.tolist(), strict=True):
            total = total.plus(walk(row, each.start, len(each.token_ids)))

    return total


def accepted_drafts(
    head: DraftHead, weights: dict[str, torch.Tensor], target: Target, batch: Batch
) -> torch.Tensor:
    """The number of drafts that are accepted in a round that begins at each row, [batch, length] int64."""
    token_ids = batch.token_ids
    features, _ = target.run(token_ids, head.aux_layers)
    head_pass = head.open(weights, token_ids.shape[1])
    is_accepted = torch.ones_like(token_ids, dtype=torch.bool)
    num_accepted = torch.zeros_like(token_ids)

    def take(step: int, hidden: torch.Tensor) -> torch.Tensor:
        newest = head.target_ids[head_pass.logits(hidden).argmax(-1)]
        is_accepted.logical_and_(newest == token_ids.roll(-2 - step, 1))
        num_accepted.add_(is_accepted)
        return newest

    head_pass.draft(target, token_ids, features, NUM_DRAFTS, take)
    return num_accepted


def walk(num_accepted: Sequence[int], start: int, end: int) -> Acceptance:
    """The rounds of decoding an answer of tokens `start` to `end`, without those that could emit more than
    the rest of it.

    num_accepted: at index i, the number of drafts that a round accepts whose newest token is i + 1.
    """
    rounds: list[int] = []
    row = start - 1
    while row + 2 + NUM_DRAFTS < end:
        rounds.append(num_accepted[row])
        row += num_accepted[row] + 1

    accepted_at = tuple(sum(count > index for count in rounds) for index in range(NUM_DRAFTS))
    return Acceptance(num_rounds=len(rounds), accepted_at=accepted_at)
