"""Log-probabilities of prompt tokens, computed by torch outside the graphs for requests that want them."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.sampling.torch_reference import top_logprobs
from drift_sdk.models.decoder import Decoder
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import PrefillChunk

__all__ = ["PromptLogprobs", "ScoredParts"]

LOGITS_ROWS = 256
"""Most prompt positions whose logits are in memory at once."""

ScoredParts = list[tuple[tuple[int, ...], Tensor, Tensor, Tensor]]
"""For each part: token ids, their log-probabilities [N], the most likely ids and their log-probabilities
[N, num_top]. The tensors are in pinned memory and being copied to."""


class PromptLogprobs:
    """Scores the token after each prompt position, from `hidden` [N, H] of the prefill step launched last.

    The results are valid on the host once that step has ended.
    """

    def __init__(self, decoder: Decoder, hidden: Tensor) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._parts: dict[int, ScoredParts] = {}

    def score(self, chunk: PrefillChunk, first_row: int, num_top: int) -> None:
        """Start to score the known tokens after a chunk's rows, the first of which is `first_row`.

        num_top: how many of the most likely tokens to report at each position.
        """
        if chunk.start == 0:
            self._parts[chunk.slot] = []
        following = (*chunk.token_ids[1:], *([] if chunk.next_token_id is None else [chunk.next_token_id]))
        for first in range(0, len(following), LOGITS_ROWS):
            token_ids = following[first : first + LOGITS_ROWS]
            tokens = torch.tensor(token_ids, dtype=torch.int64).to(self._hidden.device, non_blocking=True)
            rows = self._hidden[first_row + first : first_row + first + len(token_ids)]
            parts = top_logprobs(self._decoder.logits(rows), tokens, num_top)
            host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda) for part in parts]
            for target, part in zip(host, parts, strict=True):
                target.copy_(part, non_blocking=True)
            self._parts.setdefault(chunk.slot, []).append((token_ids, host[0], host[1], host[2]))

    def take(self, slot: int) -> ScoredParts:
        """Remove and return all parts of a slot, so that the slot's next sequence does not find them."""
        return self._parts.pop(slot, [])

    @staticmethod
    def entries(parts: ScoredParts) -> tuple[TokenLogprobs, ...]:
        """An entry for each scored token; call it only after the steps have ended."""
        return tuple(
            TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
            for token_ids, chosen, top_ids, top_values in parts
            for token, logprob, ids, values in zip(
                token_ids, chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
            )
        )
