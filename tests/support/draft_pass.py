"""The pass of a draft head over a whole sequence."""

from __future__ import annotations

import torch

from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.models.states import SequenceState, StateRows

__all__ = ["whole_pass"]


@torch.inference_mode()
def whole_pass(target: Decoder, draft: DraftDecoder, tokens: list[int]) -> torch.Tensor:
    """The draft's hidden state of every row of a token sequence, [len(tokens) - 1, H]."""
    blocks = list(range(len(tokens) + 1))
    rows = [SequenceRows(blocks, 0, len(tokens) - 1)]
    target_cache, draft_cache = (model.empty_kv_cache(len(blocks), 1) for model in (target, draft))
    ids = torch.tensor(tokens)
    states = []
    if target.spec.recurrent_layers:
        state = SequenceState(target.spec, target.dtype, target.device)
        states = [StateRows.of(state, 0, len(tokens) - 1, is_final=True)]
    hidden, aux_hidden = target.forward(
        ids[:-1], AttentionBatch(rows, target_cache), target_cache, draft.aux_layers, states
    )
    batch = AttentionBatch(rows, draft_cache, slot_offset=1)
    return draft.forward(draft.fuse(aux_hidden, hidden), ids[1:], batch, draft_cache)
