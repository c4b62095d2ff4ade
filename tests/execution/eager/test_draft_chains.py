"""Chains of drafts: each token is chosen with the noise of its position."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from scheduled_run import sampling_of
from torch import Tensor

from drift_sdk.execution.eager.drafters import choose_drafts, draft_chains
from drift_sdk.execution.eager.sampling import choose

LENGTHS = (5, 1, 0, 3)


def test_drafts_are_the_tokens_that_a_target_with_these_logits_chooses() -> None:
    samplings = [sampling_of(4, 20, temperature=1.0, seed=seed) for seed in range(len(LENGTHS))]
    slots: list[Any] = [
        SimpleNamespace(sampling=sampling, length=7 + 3 * index) for index, sampling in enumerate(samplings)
    ]
    outputs = torch.randn(len(slots), 50, generator=torch.Generator().manual_seed(1))

    def advance(
        stacked: Tensor, tokens: Sequence[int], owners: Sequence[Any], counts: Sequence[int]
    ) -> Tensor:
        return stacked.roll(1, 1)

    found = draft_chains(slots, list(outputs), LENGTHS, lambda hidden: hidden, advance)
    for slot, output, length, drafts in zip(slots, outputs, LENGTHS, found, strict=True):
        logits = [output.roll(number, 0)[None] for number in range(length)]
        positions = range(slot.length, slot.length + length)
        expected = [choose(each, [slot.sampling], [at]) for each, at in zip(logits, positions, strict=True)]
        assert drafts == [int(token) for token in expected]
    assert len({tuple(drafts) for drafts in found}) == len(LENGTHS)


def test_drafts_of_one_pass_are_chosen_as_those_of_chains_are() -> None:
    samplings = [sampling_of(4, 20, temperature=1.0, seed=seed) for seed in range(len(LENGTHS))]
    slots: list[Any] = [
        SimpleNamespace(sampling=sampling, length=7 + 3 * index) for index, sampling in enumerate(samplings)
    ]
    generator = torch.Generator().manual_seed(1)
    outputs = [torch.randn(length, 50, generator=generator) for length in LENGTHS]
    found = choose_drafts(slots, outputs, lambda hidden: hidden)
    for slot, rows, drafts in zip(slots, outputs, found, strict=True):
        assert drafts == [
            int(choose(row[None], [slot.sampling], [slot.length + number])[0])
            for number, row in enumerate(rows)
        ]
    assert [len(drafts) for drafts in found] == list(LENGTHS)
    assert choose_drafts(slots[2:3], outputs[2:3], lambda hidden: hidden) == [[]]
