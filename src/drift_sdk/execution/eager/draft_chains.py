"""Chains of tokens from a draft model: the next token is chosen from the output of the token before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drift_sdk.execution.eager.sampling import choose
from drift_sdk.execution.eager.slot import Slot

__all__ = ["Advance", "draft_chains"]

Advance = Callable[[Tensor, Sequence[int], Sequence[Slot], Sequence[int]], Tensor]
"""Takes the draft's outputs [M, H], the tokens chosen from them, the slots, and how many tokens each slot has
drafted, these included. Returns the outputs [M, H] of these tokens."""


def draft_chains(
    slots: Sequence[Slot],
    hidden: Sequence[Tensor],
    lengths: Sequence[int],
    logits_of: Callable[[Tensor], Tensor],
    advance: Advance,
) -> list[list[int]]:
    """Draft as many tokens as `lengths` says after the newest token of each slot.

    A token is sampled with the target's noise for its position, so that it equals the target's token where
    the logits agree.

    hidden: the draft's output [H] for each slot's newest token. logits_of: gives logits [M, vocab_size] fp32
    over the target's vocabulary, of outputs [M, H].
    """
    drafts: list[list[int]] = [[] for _ in slots]
    outputs = list(hidden)
    active = [index for index, length in enumerate(lengths) if length > 0]
    while active:
        stacked = torch.stack([outputs[index] for index in active])
        owners = [slots[index] for index in active]
        positions = [slots[index].length + len(drafts[index]) for index in active]
        tokens = choose(logits_of(stacked), [slot.sampling for slot in owners], positions).tolist()
        for index, token in zip(active, tokens, strict=True):
            drafts[index].append(token)
        continued = [n for n, index in enumerate(active) if len(drafts[index]) < lengths[index]]
        if not continued:
            break

        active = [active[n] for n in continued]
        output = advance(
            stacked[continued],
            [drafts[index][-1] for index in active],
            [slots[index] for index in active],
            [len(drafts[index]) for index in active],
        )
        for n, index in enumerate(active):
            outputs[index] = output[n]

    return drafts
