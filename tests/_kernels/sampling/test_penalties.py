"""The operations that change logits, against formulas in Python."""

from __future__ import annotations

import math

import pytest
import torch

from drift_sdk.execution.eager.sampling import (
    add_bias,
    count_tokens,
    mask_logits,
    penalise_counts,
    penalise_repetition,
    sample,
    select_tokens,
    unpack_mask,
)

ROUNDING = 8 * torch.finfo(torch.float32).eps
VOCAB_SIZES = [1, 31, 32, 33, 500]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_count_tokens_counts_repeated_ids(vocab_size: int) -> None:
    counts = torch.zeros(vocab_size, dtype=torch.int32)
    ids = torch.randint(0, vocab_size, (3 * vocab_size,))
    count_tokens(counts, ids[:5])
    count_tokens(counts, ids[5:])
    count_tokens(counts, ids[:0])
    assert torch.equal(counts.long(), torch.bincount(ids, minlength=vocab_size))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_penalties_equal_their_formulas(vocab_size: int) -> None:
    """Each number is compared with the formulas of OpenAI's API and of the CTRL paper, computed in Python."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size) * 5
    logits[:, 0] = 0.0
    counts = torch.randint(0, 4, (4, vocab_size), dtype=torch.int32)
    frequency, presence = torch.tensor([0.0, 2.0, -2.0, 0.5]), torch.tensor([1.5, 0.0, -2.0, 0.25])
    repetition = torch.tensor([1.0, 2.0, 0.01, 1.25])
    is_seen = torch.rand(4, vocab_size) < 0.5
    untouched = logits.clone()
    by_count = penalise_counts(logits, counts, frequency, presence)
    by_repetition = penalise_repetition(logits, is_seen, repetition)
    assert torch.equal(logits, untouched)
    for row in range(4):
        for token in range(vocab_size):
            logit, count = logits[row, token].item(), counts[row, token].item()
            expected = logit - frequency[row].item() * count - presence[row].item() * (count > 0)
            assert math.isclose(
                by_count[row, token].item(), expected, rel_tol=ROUNDING, abs_tol=32 * ROUNDING
            )

            factor = repetition[row].item() if is_seen[row, token] else 1.0
            expected = logit * factor if logit < 0 else logit / factor
            assert math.isclose(by_repetition[row, token].item(), expected, rel_tol=ROUNDING)


def test_neutral_penalties_change_nothing() -> None:
    logits = torch.randn(3, 70) * 30
    counts = torch.randint(0, 9, (3, 70), dtype=torch.int32)
    assert torch.equal(penalise_counts(logits, counts, torch.zeros(3), torch.zeros(3)), logits)
    assert torch.equal(penalise_repetition(logits, counts > 0, torch.ones(3)), logits)


def test_bias_and_selection_change_only_their_entries() -> None:
    logits = torch.zeros(3, 40)
    rows, ids = torch.tensor([0, 2, 2]), torch.tensor([39, 0, 31])
    found = add_bias(logits, rows, ids, torch.tensor([1.0, -100.0, 100.0]))
    assert found.nonzero().tolist() == [[0, 39], [2, 0], [2, 31]]
    assert found[rows, ids].tolist() == [1.0, -100.0, 100.0]
    assert not logits.any()
    assert select_tokens(3, 40, rows, ids).nonzero().tolist() == [[0, 39], [2, 0], [2, 31]]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_unpack_mask_of_every_bit(vocab_size: int) -> None:
    num_words = -(-vocab_size // 32)
    words = torch.randint(-(2**31), 2**31, (6, num_words), dtype=torch.int64).to(torch.int32)
    words[0], words[1], words[2] = 0, -1, -(2**31)
    found = unpack_mask(words, vocab_size)
    assert found.shape == (6, vocab_size)
    for row in range(6):
        for token in range(vocab_size):
            word = words[row, token // 32].item() % 2**32
            assert found[row, token].item() == bool(word >> (token % 32) & 1), (row, token)


def test_mask_logits_falls_back_where_no_token_is_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    is_kept = torch.tensor([[True, False, False], [False, False, False]])
    at_least = torch.tensor([[False, True, True], [False, True, False]])
    found = mask_logits(logits, is_kept, at_least)
    assert found.tolist() == [[1.0, -math.inf, -math.inf], [-math.inf, 2.0, -math.inf]]


def test_lowest_temperatures_choose_the_arg_max() -> None:
    logits = torch.randn(6, 100) * 20
    given = {
        "temperature": torch.tensor([1e-44, 1e-40, 1e-38, 1e-30, 1e-10, 1e-6]),
        "top_k": torch.tensor([0, 5, 0, 0, 5, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 1.0, 0.9, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.1, 0.1, 0.0]),
        "seed": torch.arange(6),
        "position": torch.arange(6),
    }
    assert torch.equal(sample(logits, **given), logits.argmax(-1))


def test_masked_tokens_are_never_sampled() -> None:
    is_kept = torch.rand(200, 60) < 0.1
    is_kept[:, 7] = True
    logits = mask_logits(torch.randn(200, 60) * 3, is_kept, is_kept)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.99, 0.0), (20, 0.9, 0.05)):
        tokens = sample(
            logits,
            temperature=torch.full((200,), 5.0),
            top_k=torch.full((200,), top_k),
            top_p=torch.full((200,), top_p),
            min_p=torch.full((200,), min_p),
            seed=torch.arange(200),
            position=torch.arange(200),
        )
        assert is_kept[torch.arange(200), tokens].all()
