"""Drafts from known answers, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from drift_sdk.execution.forward.rows import Rows
from perf.harness.oracle import KnownAnswers, OracleRoundDrafter

pytestmark = pytest.mark.kernel

NUM_DRAFTS, VOCAB_SIZE = 3, 50
ANSWERS = {11: [*range(20)], 12: [*range(20, 45)]}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_all_numbers_of_right_drafts_occur() -> None:
    drafter = OracleRoundDrafter(torch.tensor([12, 11, 99], device=DEVICE), KnownAnswers(ANSWERS, VOCAB_SIZE))
    numbers = set()
    for position in range(8):
        # Two slots, a padding slot, an unknown request, and a slot that has room for one draft.
        slots = [[0] * 4, [1] * 4, [-1] * 4, [2] * 4, [0, 0, -1, -1]]
        rows = Rows(
            slot=torch.tensor(slots, dtype=torch.int32, device=DEVICE).flatten(),
            token=torch.full((20,), 77, dtype=torch.int32, device=DEVICE),
            position=torch.full((20,), position, dtype=torch.int32, device=DEVICE),
        )
        drafter.propose(rows, num_slots=5, num_draft_tokens=NUM_DRAFTS)
        drafted = rows.token.reshape(5, 4)[:, 1:].tolist()
        for tokens, answer in zip(drafted[:2], (ANSWERS[12], ANSWERS[11]), strict=True):
            right = answer[position + 1 : position + 1 + NUM_DRAFTS]
            are_right = [one == other for one, other in zip(tokens, right, strict=True)]
            assert are_right == sorted(are_right, reverse=True)
            numbers.add(sum(are_right))
        assert drafted[2] == [77] * 3 and drafted[3] == [0] * 3
        assert drafted[4] == [drafted[0][0], 77, 77]
        assert rows.token[::4].tolist() == [77] * 5
    assert numbers == {0, 1, 2, 3}


def test_nothing_is_right_behind_a_known_answer() -> None:
    drafter = OracleRoundDrafter(torch.tensor([11], device=DEVICE), KnownAnswers(ANSWERS, VOCAB_SIZE))
    rows = Rows(
        *(torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([0] * 4, [5] * 4, [19] * 4))
    )
    drafter.propose(rows, num_slots=1, num_draft_tokens=NUM_DRAFTS)
    assert rows.token.tolist() == [5, 0, 0, 0]
