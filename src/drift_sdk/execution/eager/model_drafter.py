"""The eager drafter that decodes with a small model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk.execution.eager.draft_chains import draft_chains
from drift_sdk.execution.eager.drafters import Span
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits
from drift_sdk.trees.growth import Draft, DraftLimit

__all__ = ["ModelDrafter"]


class ModelState:
    """The state of a small model in a slot.

    num_rows: tokens of the sequence whose keys and values it has, from the first on.
    hidden:   its output for the newest token, [H]; None before the first step.
    """

    __slots__ = ("hidden", "num_rows")

    def __init__(self) -> None:
        self.num_rows: int = 0
        self.hidden: Tensor | None = None


class ModelDrafter:
    """Drafts with a small model of the target's vocabulary.

    Keys and values of a token lie at its position in the sequence's blocks, as those of the target do, but
    they are computed one step earlier: together with the tokens of a step, the newest of which the target has
    not computed yet. So its output for the newest token is known when the next round begins, and drafting K
    tokens takes K - 1 passes of one row. The draft's KV of a block depends only on the tokens of the block
    and of those before it, and a prefix hit covers both models.
    """

    aux_layers: Sequence[int] = ()
    max_tree_rows = 0

    def __init__(self, draft: Decoder, limits: ExecutorLimits) -> None:
        self._draft = draft
        self._cache = draft.empty_kv_cache(limits.num_blocks, limits.block_size)

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        slot.draft = ModelState()

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        spans = [span for span in spans if span.next_token_ids]
        if not spans:
            return

        tokens: list[int] = []
        rows: list[SequenceRows] = []
        for span in spans:
            state = state_of(span.slot)
            # The token at `start` was the newest one before, and was computed then, unless the sequence
            # begins with it or a prefix hit ends before it.
            is_known = state.num_rows > span.start
            new = span.next_token_ids if is_known else (span.token_id, *span.next_token_ids)
            end = span.start + 1 + len(span.next_token_ids)
            tokens.extend(new)
            rows.append(SequenceRows(span.slot.block_table, end - len(new), len(new)))
            state.num_rows = end

        output = self._forward(tokens, rows)
        last = -1
        for span, row in zip(spans, rows, strict=True):
            last += row.num_rows
            state_of(span.slot).hidden = output[last]

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        hidden = [output_of(slot) for slot in slots]
        lengths = [limit.chain_length for limit in limits]
        chains = draft_chains(slots, hidden, lengths, self._draft.logits, self._advance)
        return [Draft.chain(tokens) for tokens in chains]

    def _advance(
        self, outputs: Tensor, tokens: Sequence[int], slots: Sequence[Slot], num_drafted: Sequence[int]
    ) -> Tensor:
        rows = [
            SequenceRows(slot.block_table, slot.length - 1 + number, 1)
            for slot, number in zip(slots, num_drafted, strict=True)
        ]
        return self._forward(tokens, rows)

    def _forward(self, tokens: Sequence[int], rows: Sequence[SequenceRows]) -> Tensor:
        """The model's output [N, H] for tokens."""
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=self._draft.device)
        return self._draft.forward(token_ids, AttentionBatch(rows, self._cache), self._cache)[0]


def output_of(slot: Slot) -> Tensor:
    """The model's output [H] for the newest token. A slot that decodes has taken part in a step before."""
    output = state_of(slot).hidden
    assert output is not None
    return output


def state_of(slot: Slot) -> ModelState:
    """The state that a ModelDrafter keeps for a slot."""
    assert isinstance(slot.draft, ModelState)
    return slot.draft
