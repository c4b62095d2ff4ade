"""How the prompts of a step share its prefill tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items

from drift_sdk.scheduling.sequence import Sequence

__all__ = ["share_tokens"]


def share_tokens(num_tokens: int, prompts: Items[Sequence]) -> list[int]:
    """How many of `num_tokens` each of the prompts gets. prompts: in order of (priority, arrival), but that
    waiting ones follow running ones.

    The first prompt gets half, or all that it needs if that is less, so that it always progresses. The rest
    goes to the prompts by priority, then to the shortest first: what is left of a long prompt hardly waits
    longer for a short one, and short ones do not wait for all of it.
    """
    sizes = [(prompt.priority, prompt.num_unlaunched_tokens) for prompt in prompts]
    shares = [0] * len(prompts)
    if prompts:
        shares[0] = min(sizes[0][1], (num_tokens + 1) // 2)
    left = num_tokens - sum(shares)
    for index in sorted(range(len(prompts)), key=sizes.__getitem__):
        more = min(sizes[index][1] - shares[index], left)
        shares[index] += more
        left -= more
    return shares
