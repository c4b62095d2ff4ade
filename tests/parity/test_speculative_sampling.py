"""Sampled speculative output follows the model's own distribution."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from drift_sdk._kernels.sample import sample

VOCAB_SIZE = 12
NUM_TOKENS = 200_000
DEPTH = 4


@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_walking_down_a_draft_samples_the_model(agreement: float) -> None:
    """A Markov model over a small vocabulary. Each round drafts with a model mixed from the true one and
    another, chooses the true model's token at every position, and walks while they agree."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 1.5
    draft = (
        agreement * target + (1 - agreement) * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 1.5
    )
    num_rows = 500
    seeds = torch.arange(num_rows, dtype=torch.int64) * 7919 + 3

    def choose(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(seed))
        return sample(logits, ones, torch.zeros_like(seed), ones, torch.zeros(len(seed)), seed, position)

    newest = torch.zeros(num_rows, dtype=torch.int64)
    position = torch.zeros(num_rows, dtype=torch.int64)
    pairs: Counter[tuple[int, int]] = Counter()
    plain: dict[int, list[int]] = {row: [0] for row in range(num_rows)}
    lengths: Counter[int] = Counter()
    while sum(pairs.values()) < NUM_TOKENS:
        drafted, token = [], newest
        for depth in range(DEPTH):
            token = choose(draft[token], seeds, position + 1 + depth)
            drafted.append(token)
        walking = torch.arange(num_rows)
        token, accepted = newest.clone(), torch.zeros(num_rows, dtype=torch.int64)
        for depth in range(DEPTH + 1):
            chosen = choose(target[token[walking]], seeds[walking], position[walking] + 1 + depth)
            for row, before, after in zip(
                walking.tolist(), token[walking].tolist(), chosen.tolist(), strict=True
            ):
                pairs[before, after] += 1
                plain[row].append(after)
            token[walking] = chosen
            accepted[walking] += 1
            if depth == DEPTH:
                break
            walking = walking[chosen == drafted[depth][walking]]
            if len(walking) == 0:
                break
        for count in accepted.tolist():
            lengths[count] += 1
        newest, position = token, position + accepted

    # Seed by seed the same tokens as one at a time.
    token = torch.zeros(num_rows, dtype=torch.int64)
    for depth in range(1, min(len(tokens) for tokens in plain.values())):
        token = choose(target[token], seeds, torch.full((num_rows,), depth))
        assert token.tolist() == [plain[row][depth] for row in range(num_rows)]

    probs = target.double().softmax(-1)
    chi_square, degrees = 0.0, 0
    for before in range(VOCAB_SIZE):
        total = sum(pairs[before, after] for after in range(VOCAB_SIZE))
        for after in range(VOCAB_SIZE):
            expected = total * probs[before, after].item()
            chi_square += (pairs[before, after] - expected) ** 2 / expected
        degrees += VOCAB_SIZE - 1
    # Wilson and Hilferty: the cube root of chi-square over its degrees is nearly normal. 2.326: p = 0.01.
    z = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert z < 2.326
    if agreement == 1.0:
        assert set(lengths) == {DEPTH + 1}
    else:
        assert set(lengths) == set(range(1, DEPTH + 2))
