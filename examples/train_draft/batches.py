"""Answers as batches of padded sequences, and the rows of them that a head is trained on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import torch
from msgspec import Struct

from .answers import Answer

__all__ = ["Batch", "Conversation", "draft_vocabulary", "make_batches", "unused_token"]

SORTED_TOGETHER = 64
"""Batches whose sequences are sorted by length, so that little is padded."""


class Conversation(Struct, frozen=True, kw_only=True):
    """The tokens of a question and its answer; those from `start` on are the answer's."""

    token_ids: list[int]
    start: int

    @classmethod
    def of(cls, answer: Answer, max_length: int) -> Conversation:
        """A conversation, cut at `max_length` tokens."""
        token_ids = [*answer.prompt_ids, *answer.token_ids][:max_length]
        return cls(token_ids=token_ids, start=len(answer.prompt_ids))


class Batch:
    """Conversations of a batch, padded at their ends.

    token_ids:  [batch, length] int64.
    rows:       [N] int64, the rows (of the batch laid flat) that draft tokens of an answer. Row i drafts
                token i + 2.
    """

    def __init__(self, conversations: Sequence[Conversation], device: torch.device) -> None:
        length = max(len(each.token_ids) for each in conversations)
        token_ids = torch.zeros(len(conversations), length, dtype=torch.int64)
        rows: list[int] = []
        depths: list[int] = []
        for index, each in enumerate(conversations):
            end = len(each.token_ids)
            token_ids[index, :end] = torch.tensor(each.token_ids)
            first = max(each.start - 2, 0)
            rows += range(index * length + first, index * length + end - 2)
            depths += range(end - 2 - first, 0, -1)

        self.conversations = conversations
        self.num_tokens = sum(len(each.token_ids) for each in conversations)
        self._device = device
        self._depths = torch.tensor(depths)
        self.token_ids = self._copy(token_ids)
        self.rows = self._copy(torch.tensor(rows))

    def known(self, step: int) -> torch.Tensor:
        """Indices in `rows` of the rows whose draft of a step is a token of the conversation."""
        return self._copy((self._depths > step).nonzero().view(-1))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, made without waiting for the work of the GPU."""
        if self._device.type == "cpu":
            return tensor

        return tensor.pin_memory().to(self._device, non_blocking=True)


def make_batches(
    conversations: Sequence[Conversation], num_tokens: int, seed: int
) -> list[list[Conversation]]:
    """Conversations in batches of at most `num_tokens`, padding included, in an order drawn from `seed`."""
    order = random.Random(seed)
    shuffled = list(conversations)
    order.shuffle(shuffled)
    mean = max(1, sum(len(each.token_ids) for each in shuffled) // max(1, len(shuffled)))
    group = SORTED_TOGETHER * max(1, num_tokens // mean)
    batches: list[list[Conversation]] = []
    for first in range(0, len(shuffled), group):
        batch: list[Conversation] = []
        for each in sorted(shuffled[first : first + group], key=lambda each: len(each.token_ids)):
            if batch and (len(batch) + 1) * len(each.token_ids) > num_tokens:
                batches.append(batch)
                batch = []
            batch.append(each)
        batches.append(batch)

    order.shuffle(batches)
    return batches


def draft_vocabulary(answers: Sequence[Answer], size: int) -> tuple[torch.Tensor, float]:
    """The `size` most frequent tokens of answers, [size] int64 in ascending order, and the share of the
    answers' tokens that they make up. Of equally frequent tokens, the lowest ids are taken."""
    counts = Counter(token for answer in answers for token in answer.token_ids)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = set(ranked)
    unused = (token for token in range(size + len(chosen)) if token not in chosen)
    ids = sorted([*ranked, *(next(unused) for _ in range(size - len(ranked)))])
    return torch.tensor(ids), sum(counts[token] for token in ranked) / max(1, counts.total())


def unused_token(answers: Sequence[Answer], vocab_size: int) -> int:
    """The rarest token of questions and answers, of equally rare ones the last."""
    counts = Counter(token for answer in answers for token in (*answer.prompt_ids, *answer.token_ids))
    return min(range(vocab_size), key=lambda token: (counts[token], -token))
