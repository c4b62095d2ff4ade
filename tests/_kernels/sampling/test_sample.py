"""The reference of sampling, against transformers and against probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_near
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drift_sdk.execution.eager.sampling import filter_logits, sample, top_logprobs


def columns(num_rows: int, **given: list[float]) -> dict[str, torch.Tensor]:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
    integers = ("top_k", "seed", "position")
    return {
        name: torch.tensor(
            given.get(name, [default] * num_rows),
            dtype=torch.int64 if name in integers else torch.float32,
        )
        for name, default in defaults.items()
    }


def test_greedy_chooses_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, **columns(2, temperature=[0.0, 0.0])).tolist() == [1, 0]


def test_sampled_row_does_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(24, 501) * 3
    given = columns(
        24,
        temperature=[0.0, 0.5, 1.0, 2.0] * 6,
        top_k=[0, 1, 50, 1000, 7, 0] * 4,
        top_p=[1.0, 0.9, 0.1] * 8,
        min_p=[0.0, 0.05] * 12,
        seed=[i * 7919 for i in range(24)],
        position=list(range(24)),
    )
    together = sample(logits, **given)
    for row in range(24):
        alone = sample(logits[row : row + 1], **{name: value[row : row + 1] for name, value in given.items()})
        assert alone.item() == together[row].item()
    order = torch.randperm(24)
    assert torch.equal(
        sample(logits[order], **{name: value[order] for name, value in given.items()}), together[order]
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1000])
def test_filters_equal_transformers(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    for _ in range(40):
        logits = torch.randn(1, vocab_size) * 4
        top_k = int(torch.randint(0, vocab_size + 3, ()))
        top_p = float(torch.rand(()).clamp(min=0.01)) if torch.rand(()) < 0.7 else 1.0
        min_p = float(torch.rand(()) * 0.3) if torch.rand(()) < 0.5 else 0.0
        expected = logits
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = MinPLogitsWarper(min_p)(None, expected)
        found = filter_logits(logits, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
        assert torch.equal(found, expected), (top_k, top_p, min_p)


def test_filters_keep_ties_with_the_last_token_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    one, zero = torch.ones(1), torch.zeros(1)
    kept = filter_logits(logits, torch.tensor([1]), one, zero)
    assert kept.isfinite().tolist() == [[False, True, True, False]]


def test_samples_follow_the_filtered_softmax() -> None:
    """Chi-square over many positions of one row."""
    num_draws = 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, -8.0])
    given = columns(
        num_draws,
        temperature=[0.8] * num_draws,
        top_p=[0.95] * num_draws,
        seed=[11] * num_draws,
        position=list(range(num_draws)),
    )
    tokens = sample(logits.expand(num_draws, -1), **given)
    kept = filter_logits(logits[None] / 0.8, torch.tensor([0]), torch.tensor([0.95]), torch.zeros(1))
    probs = kept.softmax(-1)[0].double()
    counts = torch.bincount(tokens, minlength=8).double()
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * num_draws
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum().item()
    degrees = int((probs > 0).sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_top_logprobs_equal_log_softmax() -> None:
    logits = torch.randn(5, 33)
    tokens = torch.tensor([0, 5, 32, 7, 7])
    chosen, ids, values = top_logprobs(logits, tokens, 4)
    reference = logits.double().log_softmax(-1)
    assert_near(chosen, reference.gather(-1, tokens[:, None])[:, 0], inner=1, depth=2)
    assert torch.equal(ids, reference.topk(4).indices)
    assert_near(values, reference.topk(4).values, inner=1, depth=2)
    assert top_logprobs(logits, tokens, 0)[1].shape == (5, 0)
    assert top_logprobs(logits, tokens, 50)[1].shape == (5, 33)
