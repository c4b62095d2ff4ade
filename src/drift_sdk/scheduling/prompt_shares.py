"""How the prompts of a step share its prefill tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items

from drift_sdk.scheduling.sequence import Sequence

__all__ = ["MAX_STEPS_PASSED", "share_tokens"]

MAX_STEPS_PASSED = 4
"""Steps in a row in which the first prompt may get no tokens."""


def share_tokens(num_tokens: int, prompts: Items[Sequence]) -> list[int]:
    """How many of `num_tokens` each of the prompts gets. prompts: in order of (priority, arrival), but that
    waiting ones follow running ones.

    Tokens go to the prompts by priority, then to the shortest first: what is left of a long prompt hardly
    waits longer for a short one, and short ones do not wait for all of it. A first prompt that has got none
    in MAX_STEPS_PASSED steps gets half, or all that it needs if that is less, so that it always progresses.
    """
    sizes = [(prompt.priority, prompt.num_unlaunched_tokens) for prompt in prompts]
    shares = [0] * len(prompts)
    if prompts and prompts[0].num_steps_passed >= MAX_STEPS_PASSED:
        shares[0] = min(sizes[0][1], (num_tokens + 1) // 2)
    left = num_tokens - sum(shares)
    for index in sorted(range(len(prompts)), key=sizes.__getitem__):
        more = min(sizes[index][1] - shares[index], left)
        shares[index] += more
        left -= more
    return shares
