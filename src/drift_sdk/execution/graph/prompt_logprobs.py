"""Log-probabilities of prompt tokens, for those who ask: outside the graphs, by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.sampling.sample import top_logprobs
from drift_sdk.models.decoder import Decoder
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import PrefillChunk

__all__ = ["PromptLogprobs", "ScoredParts"]

LOGITS_ROWS = 256
"""Positions whose logits are held at a time."""

ScoredParts = list[tuple[tuple[int, ...], Tensor, Tensor, Tensor]]
"""Token ids, their log-probabilities, the likeliest ids and theirs, on their way to the host."""


class PromptLogprobs:
    """Scores what follows each prompt position, from `hidden` [N, H] of the prefill step that has just been
    started. The results are on their way to the host until that step is over."""

    def __init__(self, decoder: Decoder, hidden: Tensor) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._parts: dict[int, ScoredParts] = {}

    def score(self, chunk: PrefillChunk, first_row: int, num_top: int) -> None:
        """The known tokens behind a chunk's rows, which begin at `first_row`."""
        if chunk.start == 0:
            self._parts[chunk.slot] = []
        following = (*chunk.token_ids[1:], *([] if chunk.next_token_id is None else [chunk.next_token_id]))
        for first in range(0, len(following), LOGITS_ROWS):
            token_ids = following[first : first + LOGITS_ROWS]
            tokens = torch.tensor(token_ids).to(self._hidden.device, non_blocking=True)
            rows = self._hidden[first_row + first : first_row + first + len(token_ids)]
            parts = top_logprobs(self._decoder.logits(rows), tokens, num_top)
            host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda) for part in parts]
            for target, part in zip(host, parts, strict=True):
                target.copy_(part, non_blocking=True)
            self._parts.setdefault(chunk.slot, []).append((token_ids, host[0], host[1], host[2]))

    def take(self, slot: int) -> ScoredParts:
        """All of a slot's parts: nothing of them is left to the sequence that has the slot next."""
        return self._parts.pop(slot, [])

    @staticmethod
    def entries(parts: ScoredParts) -> tuple[TokenLogprobs, ...]:
        """An entry for each scored token, once the steps are over."""
        return tuple(
            TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
            for token_ids, chosen, top_ids, top_values in parts
            for token, logprob, ids, values in zip(
                token_ids, chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
            )
        )
