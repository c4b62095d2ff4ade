"""Runs the fuzz targets with a few examples. `runner.py` describes how to run a target for longer."""

from __future__ import annotations

import runner


def test_targets_pass_a_few_examples() -> None:
    # With this seed no example takes seconds. Some grammars do: longer than their limit, on a busy machine.
    runner.fuzz(*runner.targets(), examples=6, seed=2)
