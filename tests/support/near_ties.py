"""Checks that rounding cannot change the tokens of an engine on the CPU.

On a CPU, the bits of a row depend on the other rows: BLAS sums products of one row and of several rows in
different orders. A request therefore has the same tokens alone, in a batch and cut into chunks only if no
choice between tokens is a near tie. Tests that compare tokens for equality check this for their requests;
then equality holds on every CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from drift_sdk.execution.eager import eager_executor as eager
from drift_sdk.steps import SlotSampling

__all__ = ["no_near_ties"]

NUM_DISTURBANCES = 12


@contextmanager
def no_near_ties(bound: float) -> Iterator[None]:
    """Check that eager executors would choose the same tokens if logits changed by up to `bound`.

    Covers all tokens chosen in the block. Raises AssertionError at the end of the block.
    """
    generator = torch.Generator().manual_seed(0)
    ties: list[tuple[int, int]] = []
    choose = eager.choose

    def watched(
        logits: torch.Tensor, samplings: Sequence[SlotSampling], positions: Sequence[int]
    ) -> torch.Tensor:
        tokens = choose(logits, samplings, positions)
        if logits.device.type == "cpu":
            repeated = logits.repeat(NUM_DISTURBANCES, 1)
            signs = torch.randint(0, 2, repeated.shape, generator=generator) * 2 - 1
            others = choose(
                repeated + bound * signs, [*samplings] * NUM_DISTURBANCES, [*positions] * NUM_DISTURBANCES
            )
            is_other = others != tokens.repeat(NUM_DISTURBANCES)
            rows = (is_other.nonzero().flatten() % len(tokens)).tolist()
            ties.extend((samplings[row].seed, positions[row]) for row in rows)
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "choose", watched)
        yield
    assert not ties, f"near ties (seed, position): {sorted(set(ties))}"
