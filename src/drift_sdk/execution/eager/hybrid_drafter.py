"""The eager drafter that takes n-grams in place of a model's drafts where they are accepted more often."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from drift_sdk.draft_policy.ngram import NGramHistory
from drift_sdk.draft_policy.ngram_score import next_score, num_right
from drift_sdk.execution.eager.drafters import Drafter, Span
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.trees.growth import Draft, DraftLimit

__all__ = ["HybridDrafter"]


class HybridState:
    """The state of n-grams in a slot.

    score:  see `draft_policy.ngram_score`.
    drafts: the n-gram and the model's tokens of the latest round; None if one of them had no draft.
    """

    __slots__ = ("drafts", "history", "score")

    def __init__(self, history: NGramHistory) -> None:
        self.history: NGramHistory = history
        self.score: int = 0
        self.drafts: tuple[Sequence[int], Sequence[int]] | None = None


class HybridDrafter:
    """Chains of a draft model, or n-grams in their place. The model drafts for every slot and is updated with
    the tokens of every step, whatever was taken."""

    max_tree_rows = 0

    def __init__(self, model: Drafter, min_length: int, max_length: int) -> None:
        """min_length, max_length: see `NGram`."""
        self._model, self._lengths = model, (min_length, max_length)
        self.aux_layers: Sequence[int] = model.aux_layers

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        state = slot.ngrams = HybridState(NGramHistory(*self._lengths))
        state.history.extend(cached_token_ids)
        self._model.enter(slot, cached_token_ids)

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        for span in spans:
            state = state_of(span.slot)
            tokens = (span.token_id, *span.next_token_ids)
            state.history.extend(tokens[len(state.history) - span.start :])
            if state.drafts is not None:
                counts = [num_right(draft, span.next_token_ids) for draft in state.drafts]
                state.score = next_score(state.score, *counts)
                state.drafts = None
        self._model.draft_extend(spans, aux_hidden, hidden)

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        drafts = self._model.propose(slots, limits)
        for index, (slot, limit) in enumerate(zip(slots, limits, strict=True)):
            state = state_of(slot)
            ngram = state.history.propose(limit.chain_length)
            state.drafts = (ngram, drafts[index].token_ids) if ngram else None
            if ngram and state.score >= 0:
                drafts[index] = Draft.chain(ngram, is_ngram=True)

        return drafts


def state_of(slot: Slot) -> HybridState:
    """The state that a HybridDrafter keeps for a slot."""
    assert isinstance(slot.ngrams, HybridState)
    return slot.ngrams
