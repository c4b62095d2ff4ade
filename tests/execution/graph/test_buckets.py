from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drift_sdk.execution.graph.buckets import GraphBuckets
from drift_sdk.steps import ExecutorLimits


def buckets(max_num_seqs: int, budget: int, **options: Any) -> GraphBuckets:
    decoder: Any = SimpleNamespace(config=SimpleNamespace(head_dim=128), dtype=torch.bfloat16)
    limits = ExecutorLimits(
        max_num_seqs=max_num_seqs, max_model_len=4096, num_blocks=64, block_size=64, vocab_size=100
    )
    return GraphBuckets.of(decoder, limits, budget, **{"is_exact": False} | options)


@pytest.mark.parametrize(
    ("tokens", "rows", "bucket"),
    [
        (1, 1, (112, 16)),
        (112, 16, (112, 16)),
        (113, 16, (240, 16)),
        (448, 17, (448, 64)),
        (449, 64, None),
        (496, 16, (496, 16)),
        (256, 65, (256, 128)),
        (256, 200, (256, 256)),
        (300, 256, None),
    ],
)
def test_mixed_steps_have_at_most_512_rows(tokens: int, rows: int, bucket: tuple[int, int] | None) -> None:
    """A step of more rows is computed in two passes."""
    assert buckets(256, 2048).mixed_bucket(tokens, rows) == bucket


def test_every_mixed_bucket_fits_the_payload() -> None:
    for max_num_seqs, budget in ((256, 2048), (3, 40), (64, 16), (100, 300)):
        found = buckets(max_num_seqs, budget)
        assert found.mixed and found.mixed_slots[-1] == max_num_seqs
        for rows, slots in found.mixed:
            assert rows <= max(budget, 16) + 15 and rows + slots <= max(512, found.most_mixed_rows)
            assert found.mixed_words(rows, slots) <= found.payload_words


def test_rounds_with_drafts_have_a_pass_of_their_own() -> None:
    found = buckets(64, 2048, draft_choices=(1, 3))
    assert found.mixed == () and found.mixed_slots == () and found.mixed_bucket(10, 2) is None
