"""How the prompts of a step share its prefill tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items

from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.steps import MAX_CHUNKS

__all__ = ["MAX_STEPS_WITHOUT_TOKENS", "share_tokens"]

MAX_STEPS_WITHOUT_TOKENS = 4
"""Steps in a row in which the first prompt may get no tokens."""


def share_tokens(num_tokens: int, prompts: Items[Sequence]) -> list[int]:
    """Share `num_tokens` between prompts: the number of each. At most MAX_CHUNKS of them get any.

    Tokens go to the prompts by priority, then to the shortest first: a short prompt delays a long one only
    slightly, and does not wait for all of it. A first prompt that has got none in MAX_STEPS_WITHOUT_TOKENS
    steps gets half, or all that it needs if that is less, so that it always progresses.

    prompts: in order of (priority, arrival).
    """
    sizes = [(prompt.priority, prompt.num_unplanned_tokens) for prompt in prompts]
    shares = [0] * len(prompts)
    if prompts and prompts[0].num_steps_without_tokens >= MAX_STEPS_WITHOUT_TOKENS:
        shares[0] = min(sizes[0][1], (num_tokens + 1) // 2)
    left = num_tokens - sum(shares)
    num_chunks = int(sum(shares) > 0)
    for index in sorted(range(len(prompts)), key=sizes.__getitem__):
        more = min(sizes[index][1] - shares[index], left)
        if shares[index] == 0 and more:
            if num_chunks == MAX_CHUNKS:
                continue
            num_chunks += 1
        shares[index] += more
        left -= more
    return shares
