"""Candidates of a draft: the order in which the target would choose tokens."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from drift_sdk.execution.eager.sampling import choose, rank
from drift_sdk.steps import SlotSampling

SAMPLING = SlotSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    stop_token_ids=(),
    num_prompt_tokens=1,
    max_length=60,
)
SETTINGS = [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1e-3, "top_p": 0.5}]


@pytest.mark.parametrize("num_candidates", [1, 2, 8])
def test_first_candidate_is_the_token_chosen(num_candidates: int) -> None:
    samplings = [replace(SAMPLING, seed=seed, **SETTINGS[seed % 4]) for seed in range(40)]
    logits = 3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    positions = list(range(5, 45))
    ids, logprobs = rank(logits, samplings, positions, num_candidates)
    assert [row[0] for row in ids] == choose(logits, samplings, positions).tolist()
    for row, values in zip(ids, logprobs, strict=True):
        assert len(set(row)) == num_candidates
        assert values == sorted(values, reverse=True) and values[0] <= 0


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_candidates_do_not_depend_on_the_default_type(default: torch.dtype) -> None:
    """The default type is the host program's to set."""
    samplings = [replace(SAMPLING, seed=seed, **SETTINGS[seed % 4]) for seed in range(8)]
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(4))
    expected = rank(logits, samplings, [*range(8)], 3)
    torch.set_default_dtype(default)
    try:
        assert rank(logits, samplings, [*range(8)], 3) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_next_candidate_is_chosen_where_the_first_is_missing() -> None:
    samplings = [replace(SAMPLING, seed=seed, temperature=0.8) for seed in range(20)]
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    ids, _ = rank(logits, samplings, [9] * 20, 3)
    first = torch.tensor([row[0] for row in ids])
    rest = logits.scatter(1, first[:, None], -torch.inf)
    assert choose(rest, samplings, [9] * 20).tolist() == [row[1] for row in ids]


def test_candidates_of_greedy_rows_are_those_of_the_highest_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, -torch.inf, 1.0, 2.0]])
    ids, logprobs = rank(logits, [SAMPLING, SAMPLING], [3, 7], 3)
    assert ids == [[1, 3, 2], [0, 3, 2]]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids))
    assert torch.tensor(logprobs).allclose(expected)


def test_tokens_that_filters_cut_off_come_last() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3))
    sampling = replace(SAMPLING, temperature=1.0, top_k=4)
    ids, _ = rank(logits, [sampling], [3], 8)
    assert set(ids[0][:4]) == set(logits[0].topk(4).indices.tolist())
