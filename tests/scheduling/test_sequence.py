"""Numbers of tokens that are drafted for a sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import SlotSampling

SAMPLING = SlotSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    stop_token_ids=(),
    num_prompt_tokens=1,
    max_length=51,
    num_logprobs=None,
)


@pytest.mark.parametrize(("is_slow", "num_tokens"), [(None, 3), (False, 3), (True, 0)])
def test_nothing_is_drafted_while_masks_take_long(is_slow: bool | None, num_tokens: int) -> None:
    sequence = Sequence(
        request_id="x",
        prompt_ids=[5],
        sampling=SAMPLING,
        priority=0,
        arrival=0,
        constraint=None if is_slow is None else SimpleNamespace(is_slow=is_slow),
    )
    assert sequence.num_draft_tokens(3) == num_tokens
    assert sequence.num_tree_tokens(3, 3) == num_tokens
