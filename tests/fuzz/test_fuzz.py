"""Runs every fuzz target with a few examples. `runner.py` describes how to run a target for longer."""

from __future__ import annotations

import pytest
import runner


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", runner.targets())
def test_target_passes_a_few_examples(target: str) -> None:
    runner.fuzz(target, examples=6, seed=0)
