"""Whether rounding could change what an engine says on the CPU.

There a row's bits depend on its neighbours: BLAS adds up products of one row and of many in another order. So
the same request has the same tokens alone, in a batch and cut into chunks as long as no choice is a near tie.
Tests that compare tokens for equality hold their requests to that: then equality holds on every CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from drift_sdk.execution.eager import executor as eager
from drift_sdk.steps import SlotSampling

__all__ = ["no_near_ties"]

NUM_DISTURBANCES = 12


@contextmanager
def no_near_ties(bound: float) -> Iterator[None]:
    """Every token that eager executors choose in this block stays the choice if logits move by `bound`."""
    generator = torch.Generator().manual_seed(0)
    ties: list[tuple[int, int]] = []
    choose = eager.choose

    def watched(
        logits: torch.Tensor, samplings: Sequence[SlotSampling], positions: Sequence[int]
    ) -> torch.Tensor:
        tokens = choose(logits, samplings, positions)
        if logits.device.type == "cpu":
            for _ in range(NUM_DISTURBANCES):
                signs = torch.randint(0, 2, logits.shape, generator=generator) * 2 - 1
                is_other = choose(logits + bound * signs, samplings, positions) != tokens
                ties.extend((samplings[row].seed, positions[row]) for row in is_other.nonzero().flatten())
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "choose", watched)
        yield
    assert not ties, f"near ties (seed, position): {sorted(set(ties))}"
