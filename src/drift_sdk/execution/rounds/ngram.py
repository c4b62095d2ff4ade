"""The n-gram drafter of the graph executor: prompt look-up in the token history of slots on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.draft.ngrams import append_history, num_searchers, propose_ngrams
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.draft_kv_cache import DraftKVCache
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.rounds.drafter import ComputedChunks, VerifiedRows

__all__ = ["NGramRoundDrafter"]


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
