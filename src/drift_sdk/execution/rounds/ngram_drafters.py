"""The drafters of the graph executor with n-grams: alone, by prompt look-up in the token history of slots on
the device, and in place of a draft model's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.draft.ngrams import (
    append_history,
    num_searchers,
    propose_ngrams,
    score_ngrams,
    search_ngrams,
    take_ngrams,
)
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.forward.caches import DraftKVCache, PagedKVCache
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.ngram_history import SCORE_SHIFT, SCORE_UNIT
from drift_sdk.execution.rounds.drafter import ComputedChunks, RoundDrafter, VerifiedRows


class NGramRoundDrafter:
    """A `RoundDrafter` that drafts the tokens that `NGramDrafter` drafts.

    history [S, max_model_len + 1] int32: the token at each position of a slot before its newest token. The
    drafter appends to it; the host writes the cached tokens of a prefix hit.
    """

    aux_layers: Sequence[int] = ()
    kv_cache: DraftKVCache | None = None
    is_ngram: Tensor | None = None

    def __init__(self, history: Tensor, workspace: Workspace, *, min_length: int, max_length: int) -> None:
        """min_length, max_length: tokens of the runs that are looked up, see `NGram`."""
        num_slots, max_num_tokens = history.shape
        self._history = history
        self._min_length, self._max_length = min_length, max_length
        shape = (num_slots, num_searchers(max_num_tokens))
        self._found = workspace.take("ngrams_found", shape, torch.int64)

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        propose_ngrams(
            rows.slot,
            rows.position,
            rows.token,
            self._history,
            self._found[:num_slots],
            rows_per_slot=num_draft_tokens + 1,
            min_length=self._min_length,
            max_length=self._max_length,
        )

    def draft_extend(self, verified: VerifiedRows) -> None:
        # An accepted row holds the token that was sampled after the row before it.
        rows = verified.rows
        append_history(rows.slot, rows.position, rows.token, self._history, emitted=verified.emitted)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        rows = chunks.rows
        append_history(rows.slot, rows.position, rows.token, self._history)


class HybridRoundDrafter:
    """A `RoundDrafter` that drafts what `HybridDrafter` drafts: chains of a model, or n-grams in their place.

    The model drafts for all slots of a round and is extended by the tokens of every step, so its state does
    not depend on what was taken. kv_cache: the model's.
    """

    is_ngram: Tensor

    def __init__(
        self,
        model: RoundDrafter,
        table: SlotTable,
        workspace: Workspace,
        *,
        max_num_slots: int,
        min_length: int,
        max_length: int,
    ) -> None:
        """max_num_slots: of a round. min_length, max_length: see `NGram`."""
        self.aux_layers: Sequence[int] = model.aux_layers
        self._model, self._workspace = model, workspace
        self._history, self._score = table.history, table.ngram_score
        self._min_length, self._max_length = min_length, max_length
        self._num_searchers = num_searchers(table.history.shape[1])
        self.is_ngram = torch.zeros(max_num_slots, dtype=torch.int32, device=table.history.device)

    @property
    def kv_cache(self) -> DraftKVCache | PagedKVCache | None:
        return self._model.kv_cache

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        self._model.propose(rows, num_slots=num_slots, num_draft_tokens=num_draft_tokens)
        if num_draft_tokens == 0:
            return

        found = self._workspace.take("hybrid_found", (num_slots, self._num_searchers), torch.int64)
        search_ngrams(
            rows.slot,
            rows.position,
            rows.token,
            self._history,
            found,
            rows_per_slot=num_draft_tokens + 1,
            min_length=self._min_length,
            max_length=self._max_length,
        )
        take_ngrams(
            rows.slot,
            rows.position,
            rows.token,
            self._history,
            found,
            self._score,
            self._drafts(num_slots, num_draft_tokens),
            self.is_ngram[:num_slots],
        )

    def draft_extend(self, verified: VerifiedRows) -> None:
        rows, chosen, emitted = verified.rows, verified.chosen, verified.emitted
        if verified.num_draft_tokens > 0:
            drafts = self._drafts(verified.num_slots, verified.num_draft_tokens)
            score_ngrams(rows.slot, chosen, emitted, drafts, self._score, unit=SCORE_UNIT, shift=SCORE_SHIFT)
        # An accepted row holds the token that was sampled after the row before it.
        append_history(rows.slot, rows.position, rows.token, self._history, emitted=emitted)
        self._model.draft_extend(verified)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        rows = chunks.rows
        append_history(rows.slot, rows.position, rows.token, self._history)
        self._model.draft_extend_prefill(chunks)

    def _drafts(self, num_slots: int, num_draft_tokens: int) -> Tensor:
        """Both drafts of a round. They last until the round has been committed, also if it is split."""
        shape = (2, num_slots, num_draft_tokens + 1)
        return self._workspace.take("hybrid_drafts", shape, torch.int32)
