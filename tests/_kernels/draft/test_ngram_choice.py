"""The choice between n-grams and a model's drafts on the device, against the eager drafter."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drift_sdk._kernels.draft.ngrams import num_searchers, score_ngrams, search_ngrams, take_ngrams
from drift_sdk.execution.eager.drafters import HybridDrafter, Span, hybrid_state_of
from drift_sdk.execution.ngram_history import SCORE_SHIFT, SCORE_UNIT, next_score, num_right
from drift_sdk.trees import Draft, DraftLimit

pytestmark = pytest.mark.kernel

NUM_SLOTS, NUM_DRAFTS, MAX_TOKENS, LENGTHS = 5, 3, 110, (2, 4)
ROWS = NUM_DRAFTS + 1
SCORE = {"unit": SCORE_UNIT, "shift": SCORE_SHIFT}


class GivenDrafts:
    """A drafter whose tokens the test sets, by slot."""

    aux_layers = ()
    max_tree_rows = 0

    def __init__(self) -> None:
        self.drafts: dict[int, list[int]] = {}

    def enter(self, slot: Any, cached_token_ids: Any) -> None:
        pass

    def draft_extend(self, spans: Any, aux_hidden: Any, hidden: Any) -> None:
        pass

    def propose(self, slots: Any, limits: Any) -> list[Draft]:
        pairs = zip(slots, limits, strict=True)
        return [Draft.chain(self.drafts[slot.number][: limit.chain_length]) for slot, limit in pairs]


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_rounds_equal_those_of_the_eager_drafter(device: str) -> None:
    """Drafts and scores over many rounds, of slots that draft fewer tokens or none, and with padding."""
    rng = random.Random(5)
    model = GivenDrafts()
    eager = HybridDrafter(model, *LENGTHS)
    slots = [SimpleNamespace(number=number, draft=None, ngrams=None) for number in range(NUM_SLOTS)]
    texts = [[rng.randrange(3) for _ in range(6)] for _ in slots]
    for slot, text in zip(slots, texts, strict=True):
        eager.enter(slot, text)
    history = torch.full((NUM_SLOTS, MAX_TOKENS), -9, dtype=torch.int32, device=device)
    score = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device)
    found = torch.empty((NUM_SLOTS, num_searchers(MAX_TOKENS)), dtype=torch.int64, device=device)
    drafts = torch.full((2, NUM_SLOTS, ROWS), -7, dtype=torch.int32, device=device)
    is_ngram = torch.full((NUM_SLOTS,), -7, dtype=torch.int32, device=device)
    seen, extremes = set(), (0, 0)
    for step in range(24):
        order: list[int] = rng.sample(range(NUM_SLOTS), 4)
        places = [*order[:2], None, *order[2:]]  # None: padding
        limits = {number: rng.choice([NUM_DRAFTS, NUM_DRAFTS, 1, 0]) for number in order}
        model.drafts = {number: [rng.randrange(3) for _ in range(NUM_DRAFTS)] for number in order}
        row_slot, row_token, row_position = [], [], []
        for number in places:
            text = [] if number is None else texts[number]
            most = -1 if number is None else limits[number]
            row_slot += [number if depth <= most else -1 for depth in range(ROWS)]
            row_token += [text[-1], *model.drafts[number]] if number is not None else [-1] * ROWS
            row_position += [len(text) - 1 + depth for depth in range(ROWS)]
            if number is not None:
                history[number, : len(text) - 1] = int32(text[:-1], device)
        rows = [int32(column, device) for column in (row_slot, row_position, row_token)]
        search_ngrams(*rows, history, found, rows_per_slot=ROWS, min_length=LENGTHS[0], max_length=LENGTHS[1])
        take_ngrams(*rows, history, found, score, drafts, is_ngram)

        expected = eager.propose(
            [slots[number] for number in order],
            [DraftLimit(limits[number], limits[number]) for number in order],
        )
        by_slot = dict(zip(order, expected, strict=True))
        chosen, emitted, spans = [], [], []
        for index, number in enumerate(places):
            part = slice(index * ROWS, (index + 1) * ROWS)
            if number is None:
                chosen += [1] * ROWS
                emitted.append(0)
                continue

            draft = by_slot[number]
            live = [slot >= 0 for slot in rows[0][part].tolist()[1:]]
            tokens = rows[2][part].tolist()[1:]
            assert [token for token, is_live in zip(tokens, live, strict=True) if is_live] == draft.token_ids
            assert bool(is_ngram[index]) == draft.is_ngram
            seen.add(draft.is_ngram)
            # The target agrees with the model for some rounds, then with n-grams, so that scores change.
            ngram = [token for token in drafts[0, index].tolist() if token >= 0]
            agreed = model.drafts[number] if step % 12 < 6 else ngram
            truth = [*agreed, *(rng.randrange(3) for _ in range(ROWS))]
            new = truth[: num_right(draft.token_ids, truth) + 1]
            chosen += new + [1] * (ROWS - len(new))
            emitted.append(len(new))
            text = texts[number]
            spans.append(Span(slots[number], len(text) - 1, text[-1], new, range(len(new))))
        score_ngrams(rows[0], int32(chosen, device), int32(emitted, device), drafts, score, **SCORE)
        eager.draft_extend(spans, [], torch.empty(0))
        for span in spans:
            texts[span.slot.number] += span.next_token_ids
        assert score.tolist() == [hybrid_state_of(slot).score for slot in slots]
        extremes = min(extremes[0], int(score.min())), max(extremes[1], int(score.max()))
    assert seen == {False, True} and extremes[0] < 0 < extremes[1]


def test_score_moves_towards_the_difference_of_a_round() -> None:
    assert next_score(0, 3, 1) == 2 * SCORE_UNIT // 4
    assert next_score(0, 0, 3) == -3 * SCORE_UNIT // 4
    assert next_score(SCORE_UNIT, 2, 1) == SCORE_UNIT
    score = 3 * SCORE_UNIT
    for _ in range(30):
        score = next_score(score, 0, 2)
    assert score < -SCORE_UNIT


def test_right_tokens_are_counted_from_the_first_on() -> None:
    assert num_right([1, 2, 3], [1, 2, 3, 4]) == 3
    assert num_right([1, 2, 3], [1, 9, 3, 4]) == 1
    assert num_right([1, 2, 3], [1, 2]) == 2
    assert num_right([], [1]) == 0


def test_choice_names_wrong_arguments(device: str) -> None:
    row = int32([0, 0, 1, 1], device)
    history, score = int32([[1, 2], [3, 4]], device), int32([0, 0], device)
    found = torch.zeros(2, 1, dtype=torch.int64, device=device)
    drafts, is_ngram = torch.zeros(2, 2, 2, dtype=torch.int32, device=device), int32([0, 0], device)
    with pytest.raises(ValueError, match=r"score: \[1\] .*: expected \[2\]"):
        take_ngrams(row, row, row, history, found, score[:1], drafts, is_ngram)
    with pytest.raises(ValueError, match=r"drafts: \[1, 2, 2\] .*: expected \[2, 2, 2\]"):
        take_ngrams(row, row, row, history, found, score, drafts[:1], is_ngram)
    with pytest.raises(ValueError, match=r"emitted: \[1\] .*: expected \[2\]"):
        score_ngrams(row, row, is_ngram[:1], drafts, score, **SCORE)
