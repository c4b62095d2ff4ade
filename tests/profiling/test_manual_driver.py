from __future__ import annotations

from drift_sdk.profiling.manual_driver import _prefill_steps
from drift_sdk.steps import MAX_CHUNKS


def test_prompts_are_cut_by_the_budget_and_the_most_chunks() -> None:
    steps = [*_prefill_steps([[1, 2, 3]] * (MAX_CHUNKS + 2), budget=1000)]
    assert [len(chunks) for chunks in steps] == [MAX_CHUNKS, 2]
    cut = [*_prefill_steps([[1, 2, 3], [4, 5, 6]], budget=4)]
    assert [[(chunk.slot, chunk.start, chunk.token_ids) for chunk in chunks] for chunks in cut] == [
        [(0, 0, (1, 2, 3)), (1, 0, (4,))],
        [(1, 1, (5, 6))],
    ]
