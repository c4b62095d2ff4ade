"""Passes of draft heads over a whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drift_sdk.models.assistant import AssistantDecoder, NewestRows
from drift_sdk.models.attention import AttentionBatch, ParallelAttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.models.kv_cache import SequenceState, StateRows

__all__ = ["assistant_pass", "dflash_pass", "masked_pass", "whole_pass"]


def whole_pass(target: Decoder, draft: DraftDecoder, tokens: list[int]) -> torch.Tensor:
    """The draft's hidden state of every row of a token sequence, [len(tokens) - 1, H]."""
    return _rows(target, draft, tokens, 0)


def masked_pass(target: Decoder, draft: DraftDecoder, tokens: list[int], number: int) -> torch.Tensor:
    """The outputs [number, H] that a parallel head drafts from behind a token sequence."""
    return _rows(target, draft, tokens, number - 1)[-number:]


@torch.inference_mode()
def dflash_pass(target: Decoder, draft: DFlashDecoder, tokens: list[int], number: int) -> torch.Tensor:
    """The first `number` outputs [number, H] of masks behind a token sequence."""
    _, aux_hidden = _target_rows(target, tokens[:-1], draft.aux_layers)
    blocks = list(range(len(tokens)))
    cache = draft.empty_kv_cache(len(blocks), 1)
    batch = AttentionBatch([SequenceRows(blocks, 0, len(tokens) - 1)], cache)
    draft.store(draft.features(aux_hidden), batch, cache)
    config = draft.config
    rows = [SequenceRows(blocks, len(tokens) - 1, 1 + config.num_masks)]
    ids = torch.tensor([tokens[-1], *[config.mask_token_id] * config.num_masks])
    parallel = ParallelAttentionBatch(rows, cache, is_causal=config.is_causal)
    return draft.forward(ids, parallel, cache)[1 : 1 + number]


@torch.inference_mode()
def assistant_pass(
    target: Decoder, draft: AssistantDecoder, tokens: list[int], lengths: Sequence[int]
) -> torch.Tensor:
    """The outputs [len(lengths), hidden] that the first draft behind so many tokens is chosen from."""
    blocks = list(range(len(tokens)))
    cache = target.empty_kv_cache(len(blocks), 1)
    batch = AttentionBatch([SequenceRows(blocks, 0, len(tokens))], cache)
    hidden, _ = target.forward(torch.tensor(tokens), batch, cache)
    features = target.final_normed(hidden[[length - 2 for length in lengths]])
    newest = torch.tensor([tokens[length - 1] for length in lengths])
    rows = NewestRows([SequenceRows(blocks, length - 2, 1) for length in lengths], cache)
    return draft.forward(features, newest, rows, cache)


@torch.inference_mode()
def _rows(target: Decoder, draft: DraftDecoder, tokens: list[int], num_masks: int) -> torch.Tensor:
    hidden, aux_hidden = _target_rows(target, tokens[:-1], draft.aux_layers)
    features, ids = [draft.fuse(aux_hidden, hidden)], tokens[1:]
    if num_masks:
        features.append(draft.mask_feature.expand(num_masks, -1))
        ids = [*ids, *[draft.config.mask_token_id] * num_masks]
    blocks = list(range(len(ids) + 1))
    cache = draft.empty_kv_cache(len(blocks), 1)
    batch = AttentionBatch([SequenceRows(blocks, 0, len(ids))], cache, slot_offset=1)
    return draft.forward(torch.cat(features), torch.tensor(ids), batch, cache)


def _target_rows(
    target: Decoder, tokens: list[int], aux_layers: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The target's residual stream after the last layer and at `aux_layers`."""
    blocks = list(range(len(tokens)))
    cache = target.empty_kv_cache(len(blocks), 1)
    batch = AttentionBatch([SequenceRows(blocks, 0, len(tokens))], cache)
    states = []
    if target.spec.recurrent_layers:
        state = SequenceState(target.spec, target.dtype, target.device)
        states = [StateRows.of(state, 0, len(tokens), is_final=True)]
    return target.forward(torch.tensor(tokens), batch, cache, aux_layers, states)
